"""Streams of unequal length, one of each client's own: every sample once, FedAvg by hand."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from lightning_hetero.base.setup import CHECKPOINT_KEY
from lightning_hetero.federated.decide.rounds import UNCOUNTED, Client, RoundPlan
from lightning_hetero.federated.fit.settings import check_data
from lightning_hetero.federated.policy import FedAvg
from tests.ranks.data.indexed import Looking, by_name, indexed
from tests.ranks.data.own_streams import APART, BATCH, WORLD, Iterating, Own
from tests.ranks.data.own_streams import MORE as LENGTHS
from tests.ranks.data.own_streams import loader as any_loader
from tests.ranks.federated.kit import EXACT, Plain, Scripted, by_hand, federated, fit, own
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Weights, balanced, rank_trainer, weights

EPOCHS, TAU = 2, 2  # 12, 5 and 8 batches; the last are of 1, 4 and 3 samples
BRIEF = (17, 0, 9)
ODD = (45, 20, 29)  # whose last sample would be alone


def loader(rank: int, lengths: Sequence[int] = LENGTHS, **kwargs: Any) -> DataLoader:
    return any_loader(rank, lengths, **kwargs)


class Seen(NamedTuple):
    weights: Weights
    batches: list[list[list[int]]]  # by epoch
    steps: int
    dummies: int


class Noting(Plain):
    """Notes its batches by epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs: list[list[list[int]]] = []
        self.calls = 0

    def on_train_epoch_end(self) -> None:
        self.epochs.append(self.batches)
        self.batches = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        return super().training_step(batch, batch_idx)


class Normed(Noting):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(6, dtype=torch.float64)

    def loss(self, batch: Any) -> Any:
        return super().loss((self.norm(batch[0]), batch[1]))


class Steps(FedAvg):
    """Other local steps on every rank."""

    @property
    def plan(self) -> RoundPlan:
        plan = super().plan
        return RoundPlan(sizes=plan.sizes, steps=STEPS, lr_factors=plan.lr_factors)


STEPS = (3, 1, 2)


def train(rank: int, world: int, data: Any, module: Any = None, *, strategy: Any = None, **kwargs: Any) -> Seen:
    given = {"local_steps": TAU, "stream": "finite", **(strategy or {})}
    kwargs.setdefault("max_epochs", EPOCHS)
    module, trainer = fit(rank, world, federated(**given), data, module=module or Noting(), **kwargs)
    dummies = module.calls - sum(map(len, module.epochs))
    return Seen(weights(module), module.epochs, trainer.global_step, dummies)


def runs(rank: int, world: int) -> dict[str, Seen]:
    def run(data: DataLoader, module: Any = Noting, strategy: Any = None, **kwargs: Any) -> Seen:
        return train(rank, world, data, module(), strategy=strategy, **kwargs)

    validated = loader(rank), DataLoader(indexed(10), batch_size=2)
    return {
        "plain": run(loader(rank)),
        "workers": run(loader(rank, workers=2, make=Iterating)),
        "accumulated": run(loader(rank), accumulate_grad_batches=3, gradient_clip_val=0.05),
        "sizes": run(loader(rank), strategy={"policy": Scripted()}),
        "BatchNorm": run(loader(rank, ODD, batch_size=5), Normed, {"policy": Scripted()}),
        "steps": run(loader(rank), strategy={"policy": Steps()}),
        "looked at": run(loader(rank), callbacks=[Looking(3)]),
        "empty": run(loader(rank, BRIEF), accumulate_grad_batches=2),
        "limited": run(loader(rank), limit_train_batches=7),
        "dropped": run(loader(rank, drop_last=True)),
        "stopped": run(loader(rank), max_steps=5),
        "validated": run(validated, val_check_interval=3),  # type: ignore[arg-type]
    }


@cache
def all_runs() -> dict[str, list[Seen]]:
    return by_name(run_ranks(WORLD, runs))


WHOLE = {
    "plain": 12, "workers": 12, "accumulated": 4, "sizes": None, "BatchNorm": None, "steps": None, "looked at": 12,
    "empty": 3, "validated": 12,
}
ACCUMULATED = {"accumulated": 3, "empty": 2}


def expected(name: str, ranks: Sequence[Seen]) -> Weights:
    """FedAvg by hand on the batches that each rank has noted: of each epoch, what is left of a round is rest."""
    window, steps = ACCUMULATED.get(name, 1), STEPS if name == "steps" else (TAU,) * WORLD
    clients = [list[list[int]]() for _ in ranks]
    for of_epoch in zip(*(run.batches for run in ranks), strict=True):
        rounds = max(-(-len(batches) // (window * n)) for batches, n in zip(of_epoch, steps, strict=True))
        for client, batches, n in zip(clients, of_epoch, steps, strict=True):
            client += batches + [[]] * (rounds * window * n - len(batches))
    clip = 0.05 if name == "accumulated" else None
    return by_hand(clients, steps, whole=indexed(WORLD * APART), window=window, clip=clip)


@pytest.mark.parametrize("name", [n for n in WHOLE if n not in ("BatchNorm", "validated")] + ["dropped", "limited"])
def test_weights_are_fedavgs_by_hand(name: str) -> None:
    ranks = all_runs()[name]
    by_fedavg = expected(name, ranks)
    for run in ranks:
        assert run.weights.distance(by_fedavg) <= EXACT
    assert by_fedavg.distance(weights(Plain())) > 1e-3


@pytest.mark.parametrize("name", WHOLE)
def test_each_sample_is_trained_once_per_epoch_and_all_end_together(name: str) -> None:
    ranks, lengths = all_runs()[name], {"empty": BRIEF, "BatchNorm": ODD}.get(name, LENGTHS)
    for rank, run in enumerate(ranks):
        own_samples = list(range(APART * rank, APART * rank + lengths[rank]))
        for epoch in run.batches:
            flat = [i for batch in epoch for i in batch]
            assert sorted(flat) == own_samples and (flat == own_samples or name == "workers")
        assert len(run.batches) == EPOCHS and run.dummies == (EPOCHS if name == "empty" and rank == 1 else 0)
        assert run.weights.distance(ranks[0].weights) == 0.0
    (steps,) = {run.steps for run in ranks}
    assert WHOLE[name] is None or steps == EPOCHS * (WHOLE[name] or 0)
    if name in ("sizes", "BatchNorm"):  # as many as the rank with most of them has
        assert steps == sum(max(map(len, of_epoch)) for of_epoch in zip(*(r.batches for r in ranks), strict=True))
    if name == "BatchNorm":
        assert [len(batch) for batch in ranks[2].batches[0]] == [5, 5, 3, 3, 2, 2, 4, 3, 2]


@pytest.mark.parametrize(("name", "batches"), [("limited", (7, 5, 7)), ("dropped", (11, 5, 7))])
def test_what_is_left_out_is_the_end(name: str, batches: tuple[int, ...]) -> None:
    for rank, run in enumerate(all_runs()[name]):
        for epoch in run.batches:
            assert len(epoch) == batches[rank]
            assert [i for batch in epoch for i in batch] == [APART * rank + i for i in range(sum(map(len, epoch)))]
        assert run.steps == EPOCHS * max(batches)
    assert {run.steps for run in all_runs()["stopped"]} == {5}


# ---- resume ------------------------------------------------------------------------------------------------

AT = {"1-3": 3, "1-6": 6, "1-11": 11}  # behind a round, within one, behind the last batch


class Saver(Callback):
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (name := f"{trainer.current_epoch}-{batch_idx}") in (*AT, "0-2"):
            trainer.save_checkpoint(f"{self.folder}/{name}.ckpt")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(f"{self.folder}/epoch-{trainer.current_epoch}.ckpt")


class Silent(Noting):
    """For the balanced engine, which logs as DDP does."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.strategy.current_samples() != 0:  # type: ignore[attr-defined]
            self.batches.append(batch[0].tolist())
        return self.loss(batch[1:])


def resumed(rank: int, world: int) -> tuple[dict[str, Seen], str, list[list[int]]]:
    def run(saved: str | None) -> Seen:
        folder, ckpt = (f"again-{saved}", f"whole/{saved}.ckpt") if saved else ("whole", None)
        return train(rank, world, loader(rank), callbacks=[Saver(folder)], max_epochs=3, ckpt=ckpt)

    found = {"whole": run(None), **{name: run(name) for name in (*AT, "epoch-0")}}
    crossed = []
    for strategy, name in ((balanced(stream="finite", rebalance=False), "whole/1-3"), (None, "balanced/0-2")):
        trainer = rank_trainer(rank, world, strategy or federated(stream="finite"), max_epochs=2)
        module = Silent()
        trainer.fit(module, loader(rank), ckpt_path=f"{name}.ckpt")
        crossed.append([i for batch in module.epochs[0] for i in batch])
        if strategy is not None:
            strategy = balanced(stream="finite", rebalance=False)
            trainer = rank_trainer(rank, world, strategy, max_epochs=1, callbacks=[Saver("balanced")])
            trainer.fit(Silent(), loader(rank))
    if rank == 0:
        stripped = torch.load("whole/1-3.ckpt", weights_only=True)
        assert stripped[CHECKPOINT_KEY].pop("used") == [16, 16, 16]
        assert stripped[CHECKPOINT_KEY].pop("clients") == [[1, 16]] * 3
        torch.save(stripped, "whole/stripped.ckpt")
    torch.distributed.barrier()
    with pytest.raises(ValueError) as error:
        run("stripped")
    return found, str(error.value), crossed


@cache
def resumed_runs() -> list[tuple[dict[str, Seen], str, list[list[int]]]]:
    return run_ranks(WORLD, resumed)


@pytest.mark.parametrize("name", [*AT, "epoch-0"])
def test_a_resumed_run_goes_on_in_each_stream(name: str) -> None:
    for found, _, _ in resumed_runs():
        whole, run = found["whole"], found[name]
        assert run.weights.distance(whole.weights) <= EXACT and run.steps == whole.steps == 36
        rest = whole.batches[1][AT.get(name, -1) + 1 :]
        assert run.batches == [*([rest] if name != "1-11" else []), whole.batches[2]]


def test_engines_go_on_in_each_others_streams() -> None:
    """Behind four and three batches of four samples each."""
    for rank, (_, _, crossed) in enumerate(resumed_runs()):
        for rest, used in zip(crossed, (16, 12), strict=True):
            assert rest == list(range(APART * rank + used, APART * rank + LENGTHS[rank]))


def test_a_checkpoint_that_does_not_say_what_was_used_is_refused() -> None:
    for _, said, _ in resumed_runs():
        assert "after 4 batches in the middle of an epoch" in said and "as many ranks" in said


# ---- refusals ----------------------------------------------------------------------------------------------


class ByHand(Noting):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def ends(rank: int, world: int) -> dict[str, str]:
    def said(data: Any, module: Any = Noting, **kwargs: Any) -> str:
        try:
            train(rank, world, data, module(), **kwargs)
        except (TypeError, ValueError, OSError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        return "accepted"

    def failing(samples: int) -> Any:
        return DataLoader(Own(rank, LENGTHS[rank], fails=samples if rank == 1 else None), batch_size=BATCH)

    return {
        "infinite": said(loader(rank), strategy={"stream": "infinite"}),
        "by hand": said(loader(rank), ByHand),
        "again": said(loader(rank), strategy={"policy": FedAvg(again=True)}),
        "some": said(loader(rank) if rank else own(range(16), BATCH)),
        "batches": said(DataLoader(Own(rank, 8), batch_size=None)),
        "all empty": said(loader(rank, (0, 0, 0))),
        "fails at once": said(failing(2)),
    }


@cache
def all_ends() -> dict[str, list[str]]:
    return by_name(run_ranks(WORLD, ends))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("infinite", "stream='infinite' must be one of (None, 'finite')"),
        ("by hand", "with manual optimization no rank can rest"),
        ("again", "which FedAvg(again=True) contradicts"),
        ("some", "and only rank(s) [1, 2] have one"),
        ("batches", "makes its own batches"),
        ("all empty", "accepted"),
    ],
)
def test_all_ranks_are_told_the_same(name: str, words: str) -> None:
    assert all(words in said for said in all_ends()[name]), all_ends()[name]


def test_a_rank_that_comes_again_has_lost_a_part_of_its_stream() -> None:
    with pytest.raises(TypeError, match="of which a rank that comes again has lost a part"):
        check_data([Client(UNCOUNTED, BATCH, UNCOUNTED)], joining=True, again=False)


def test_a_stream_that_fails_at_its_begin_ends_the_run_on_all_ranks() -> None:
    first, failing, last = all_ends()["fails at once"]
    assert failing == "OSError: the shard is gone"
    assert first == last == "RuntimeError: the stream of rank 1 fails at its begin, see its error"
