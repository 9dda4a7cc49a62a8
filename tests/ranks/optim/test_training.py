"""`UnevenZeroOptimizer` in a Trainer: weights of one process; checkpoints to and from other capacities, stock DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.strategies import DDPStrategy
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler

from lightning_hetero.optim import UnevenZeroOptimizer
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Toy, Weights, balanced, quiet_trainer, rank_trainer, regression, single, weights
from tests.ranks.optim.kit import EXACT, differing
from tests.ranks.resume_kit import Saver

SAMPLES, BATCH, EPOCHS = 96, 12, 2
TRAINER: dict[str, Any] = {"max_epochs": EPOCHS, "accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
BY_VALUE = TRAINER | {"gradient_clip_algorithm": "value", "gradient_clip_val": 0.01}


class Plain(Toy):
    def optimizer(self) -> Any:
        return AdamW(self.parameters(), lr=self.lr, weight_decay=0.1)

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        schedule = OneCycleLR(optimizer, max_lr=0.05, total_steps=EPOCHS * SAMPLES // BATCH)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Divided(Plain):
    def __init__(self, *capacities: float) -> None:
        super().__init__()
        self.capacities = capacities

    def optimizer(self) -> Any:
        return UnevenZeroOptimizer(
            self.parameters(), AdamW, capacities=self.capacities or "auto", lr=self.lr, weight_decay=0.1
        )


class Thawing(BaseFinetuning):
    """The first layer is trained from the second epoch on, in a group of its own."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=3e-3)


class PlainThawed(Toy):
    def configure_optimizers(self) -> Any:
        return AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)


class DividedThawed(Toy):
    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return UnevenZeroOptimizer(trained, AdamW, capacities=[3, 1], lr=self.lr)


def fit(rank: int, world: int, module: Toy, strategy: Any, ckpt: str | None = None, **options: Any) -> Any:
    trainer = rank_trainer(rank, world, strategy, **options)
    batches = DataLoader(regression(SAMPLES), batch_size=BATCH // world, shuffle=True)
    trainer.fit(module, batches, ckpt_path=ckpt)
    return trainer


def ddp() -> DDPStrategy:
    return DDPStrategy(process_group_backend="gloo")


def training_job(rank: int, world: int, folder: str) -> dict[str, Weights]:
    found = {}
    for name, strategy in (("balanced", balanced), ("ddp", ddp)):
        module = Divided(24, 10)
        fit(rank, world, module, strategy(), callbacks=[Saver(f"{folder}/{name}", [(1, 3)])], **TRAINER)
        found[name] = weights(module)
        stock = Plain()
        fit(rank, world, stock, ddp(), f"{folder}/{name}/epoch-0.ckpt", **TRAINER)
        found[f"stock after {name}"] = weights(stock)
    fit(rank, world, Plain(), ddp(), callbacks=[Saver(f"{folder}/stock", [])], **TRAINER)
    for name, capacities in (("stock", [1, 6]), ("balanced", [1, 9])):
        module = Divided(*capacities)
        fit(rank, world, module, balanced(), f"{folder}/{name}/epoch-0.ckpt", **TRAINER)
        found[f"after {name}"] = weights(module)
    module = Divided()
    fit(rank, world, module, balanced(), **BY_VALUE)
    found["by value"] = weights(module)
    thawed = DividedThawed()
    fit(rank, world, thawed, balanced(), max_epochs=EPOCHS, callbacks=[Thawing()])
    found["thawed"] = weights(thawed)
    return found


def resuming_job(rank: int, world: int, folder: str) -> list[Weights]:
    found = []
    for ckpt in ("epoch-0", "batch-1-3"):
        module = Divided(2, 1, 4)
        fit(rank, world, module, balanced(), f"{folder}/balanced/{ckpt}.ckpt", **TRAINER)
        found.append(weights(module))
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Weights]]]:
    folder = str(tmp_path_factory.mktemp("zero"))
    return folder, run_ranks(2, training_job, folder)


@pytest.fixture(scope="module")
def expected() -> dict[str, Weights]:
    runs: dict[str, tuple[Toy, dict[str, Any]]] = {
        "": (Plain(), TRAINER), "by value": (Plain(), BY_VALUE),
        "thawed": (PlainThawed(), {"max_epochs": EPOCHS, "callbacks": [Thawing()]}),
    }  # fmt: skip
    for module, options in runs.values():
        single(module, regression(SAMPLES), BATCH, **options)
    return {name: weights(module) for name, (module, _) in runs.items()}


@pytest.mark.parametrize(
    "name",
    [
        "balanced", "ddp", "stock after balanced", "stock after ddp", "after stock", "after balanced", "by value",
        "thawed",
    ],
)
def test_a_trainer_trains_saves_and_resumes_as_with_the_optimizer_alone(name: str, trained: Any, expected: Any) -> None:
    for rank in trained[1]:
        assert rank[name].distance(expected.get(name, expected[""])) <= EXACT


def test_three_ranks_continue_what_two_have_saved(trained: Any, expected: Any) -> None:
    for rank in run_ranks(3, resuming_job, trained[0]):
        assert [final.distance(expected[""]) <= EXACT for final in rank] == [True, True]


def test_without_ranks_it_is_the_optimizer(trained: Any, expected: Any) -> None:
    folder, _ = trained
    module, resumed = Divided(), Divided(24, 10)
    single(module, regression(SAMPLES), BATCH, **TRAINER)
    sampler = DistributedSampler(regression(SAMPLES), num_replicas=1, rank=0, seed=0)
    batches = DataLoader(regression(SAMPLES), batch_size=BATCH, sampler=sampler)
    quiet_trainer(devices=1, **TRAINER).fit(resumed, batches, ckpt_path=f"{folder}/balanced/epoch-0.ckpt")
    assert weights(module).distance(expected[""]) <= EXACT
    assert weights(resumed).distance(expected[""]) <= EXACT


def test_a_checkpoint_has_the_state_of_the_optimizer_alone(trained: Any) -> None:
    saved, stock = (
        torch.load(f"{trained[0]}/{name}/epoch-0.ckpt", weights_only=True)["optimizer_states"][0]
        for name in ("balanced", "stock")
    )
    assert differing(saved, stock) == []
