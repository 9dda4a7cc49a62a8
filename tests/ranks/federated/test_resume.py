"""Checkpoints, at the end of a round and within one: the resumed run ends with the weights of the uninterrupted run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy

from lightning_hetero.federated.policy import FedAvg
from tests.ranks.federated.kit import EXACT, Plain, Scripted, federated, fit, own
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Weights, balanced, rank_trainer, weights
from tests.ranks.resume_kit import plain_types

BATCH, EPOCHS = 4, 3
LENGTHS = (28, 12)  # 7 and 3 batches


class Saver(Callback):
    """Saves behind given batches, and behind every epoch."""

    def __init__(self, folder: str, at: tuple[tuple[int, int], ...]) -> None:
        self.folder, self.at = folder, at

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) in self.at:
            trainer.save_checkpoint(f"{self.folder}/{trainer.current_epoch}-{batch_idx}.ckpt")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(f"{self.folder}/epoch-{trainer.current_epoch}.ckpt")


CASES: dict[str, dict[str, Any]] = {
    "fedavg": {"policy": FedAvg()},
    "again": {"policy": FedAvg(again=True)},
    "sizes": {"policy": Scripted()},
    "proximal": {"policy": FedAvg(again=True), "proximal": 0.3},
}
AT = ((0, 3), (1, 1), (1, 2))  # behind slot 2 and 5 of an epoch the ranks meet anyway, and behind the last


def loader(rank: int) -> Any:
    start = sum(LENGTHS[:rank])
    return own(range(start, start + LENGTHS[rank]), BATCH, shuffle=True)


def job(rank: int, world: int, folder: str, name: str) -> list[tuple[Weights, list[list[int]]]]:
    case = {"local_steps": 3, **CASES[name]}
    kwargs: dict[str, Any] = {"max_epochs": EPOCHS}
    module, saver = Plain(momentum=0.9), Saver(folder, AT)
    fit(rank, world, federated(**case), loader(rank), module=module, callbacks=[saver], **kwargs)
    runs = [(weights(module), module.batches)]
    for file in ("0-3", "1-1", "1-2", "epoch-0"):
        torch.manual_seed(99)  # the global stream is elsewhere in a new process
        again = {**case, "policy": type(case["policy"])(again=True) if name in ("again", "proximal")
                 else type(case["policy"])()}  # fmt: skip
        module, _ = fit(
            rank,
            world,
            federated(**again),
            loader(rank),
            module=Plain(momentum=0.9),
            # The same meetings as in the uninterrupted run.
            callbacks=[Saver(f"{folder}/again-{file}", AT)],
            ckpt=f"{folder}/{file}.ckpt",
            **kwargs,
        )
        runs.append((weights(module), module.batches))
    return runs


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_is_the_uninterrupted_run(tmp_path: Path, name: str) -> None:
    for (whole, batches), *resumed in run_ranks(2, job, str(tmp_path), name):
        assert whole.distance(weights(Plain())) > 1e-2
        for final, rest in resumed:
            assert final.distance(whole) <= EXACT
            assert rest == batches[len(batches) - len(rest) :]
        lengths = [len(rest) for _, rest in resumed]
        assert lengths[0] >= lengths[3] >= lengths[1] >= lengths[2]


def saving(rank: int, world: int, folder: str, strategy: Any) -> None:
    fit(rank, world, strategy, loader(rank), module=Plain(momentum=0.9), callbacks=[Saver(folder, ((0, 3),))])


def stock(rank: int, world: int, folder: str) -> None:
    saving(rank, world, folder, DDPStrategy(process_group_backend="gloo"))


class Silent(Plain):
    """For strategies that know no samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch[1:])


def common(rank: int, world: int, folder: str) -> list[int]:
    saving(rank, world, f"{folder}/ours", federated(policy=FedAvg(again=True), local_steps=3))
    steps = []
    for strategy in (DDPStrategy(process_group_backend="gloo"), balanced()):
        trainer = rank_trainer(rank, world, strategy, max_epochs=2)
        module = Silent(momentum=0.9)
        trainer.fit(module, own(range(40), BATCH), ckpt_path=f"{folder}/ours/epoch-0.ckpt")
        steps.append(trainer.global_step)
    trainer = rank_trainer(rank, world, balanced(), max_epochs=1)
    trainer.fit(Silent(momentum=0.9), own(range(40), BATCH))
    trainer.save_checkpoint(f"{folder}/balanced.ckpt")
    _, trainer = fit(
        rank, world, federated(), loader(rank), module=Plain(momentum=0.9), ckpt=f"{folder}/balanced.ckpt", max_epochs=2
    )
    return [*steps, trainer.global_step]


def test_the_format_is_stock_ddps_plus_one_key_and_engines_read_each_other(tmp_path: Path) -> None:
    assert run_ranks(2, common, str(tmp_path)) == [[7 + 5, 7 + 5, 5 + 7]] * 2
    for name in ("0-3", "epoch-0"):
        ours = torch.load(tmp_path / f"ours/{name}.ckpt", weights_only=True)
        state = ours.pop("lightning_hetero")
        assert plain_types(state) and state["engine"] == "federated" and state["format"] == 1
        assert (state["world_size"], state["global_batch_size"], state["batch_size"]) == (2, 8, BATCH)
        assert state["clients"] == ([[0, 16], [1, 4]] if name == "0-3" else [[1, 0], [2, 4]])
    assert set(ours) >= {"state_dict", "optimizer_states", "loops", "lr_schedulers", "epoch", "global_step"}


def alone(rank: int, world: int, folder: str) -> int:
    del rank, world
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(Silent(momentum=0.9), own(range(28), BATCH), ckpt_path=f"{folder}/epoch-0.ckpt")
    return trainer.global_step


def saved(rank: int, world: int, folder: str) -> None:
    saving(rank, world, folder, federated(local_steps=3))


def test_plain_lightning_goes_on_from_the_average(tmp_path: Path) -> None:
    run_ranks(2, saved, str(tmp_path))
    assert run_ranks(1, alone, str(tmp_path)) == [14]
