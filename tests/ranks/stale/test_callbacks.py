"""Hooks and callbacks of the stale engine's users on ticks that a rank misses; our own callbacks' numbers."""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import (
    Callback,
    LambdaCallback,
    ThroughputMonitor,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_hetero import HeteroTrace, StragglerMonitor
from lightning_hetero.cluster import read_events
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Toy, rank_trainer, regression, stale
from tests.ranks.stale.fits import Late
from tests.ranks.stale.models import Watched, pair

pytestmark = pytest.mark.ranks

WORLD, BATCH, TICKS, EPOCHS = 2, 3, 10, 2
SAMPLES = WORLD * BATCH * TICKS


def loader(batches: int = TICKS) -> DataLoader:
    return DataLoader(regression(WORLD * BATCH * batches), batch_size=BATCH)


# ---- hooks never see a batch that is none -------------------------------------------------------------------------


class Hooked(Toy):
    """Fails on a batch that is None; notes the batch indices of its hooks' calls, and the samples that have ended."""

    def __init__(self, automatic: bool) -> None:
        super().__init__()
        self.automatic_optimization = automatic
        self.calls: dict[str, list[int]] = {}
        self.ended = 0

    def called(self, hook: str, batch: Any, batch_idx: int = -1) -> None:
        assert batch is not None, f"{hook} without a batch"
        self.calls.setdefault(hook, []).append(batch_idx)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.called("before", batch)
        return batch

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        self.called("transfer", batch)
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.called("after", batch)
        return batch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.called("start", batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs is not None or not self.automatic_optimization
        self.called("end", batch, batch_idx)
        self.ended += len(batch[0])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.called("step", batch, batch_idx)
        loss = self.loss(batch)
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)


class Users(Callback):
    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        assert batch is not None
        self.starts.append(batch_idx)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert batch is not None
        self.ends.append(batch_idx)


class Bar(TQDMProgressBar):
    """Notes where the bar ends each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.stood: list[tuple[int, Any]] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.stood.append((self.train_progress_bar.n, self.train_progress_bar.total))
        super().on_train_epoch_end(trainer, pl_module)


def hooks(rank: int, world: int, automatic: bool, who: int) -> dict[str, Any]:
    module, users, late, bar = Hooked(automatic), Users(), Late(who, "middle", 3), Bar()
    lambdas: list[bool] = []
    callbacks = [
        users,
        LambdaCallback(on_train_batch_end=lambda t, m, o, batch, i: lambdas.append(batch is not None)),
        ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=2),
        bar,
        late,
    ]
    trainer = rank_trainer(
        rank, world, stale(), callbacks=callbacks, max_epochs=EPOCHS, enable_progress_bar=True, log_every_n_steps=1,
        logger=CSVLogger(f"logs{automatic}{who}"),
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, loader(), loader(2))
    return {
        "calls": module.calls, "starts": users.starts, "ends": users.ends, "lambdas": lambdas, "bar": bar.stood,
        "passed": late.passed, "steps": trainer.global_step, "ended": module.ended,
        "warned": any("yielded None" in str(w.message) for w in caught),
        "patched": "on_train_batch_end" in {**vars(users), **vars(module)},
    }  # fmt: skip


@pytest.mark.parametrize(("automatic", "who"), [(True, 0), (True, 1), (False, 1)])
def test_no_hook_of_the_user_sees_a_missing_batch(automatic: bool, who: int) -> None:
    ranks = run_ranks(2, hooks, automatic, who)
    assert ranks[who]["passed"] > 0
    assert ranks[0]["bar"] == [(TICKS, TICKS)] * EPOCHS  # only rank 0 has one
    assert sum(one["ended"] for one in ranks) == SAMPLES * EPOCHS  # each once, also of fill-ins and of what was wasted
    for one in ranks:
        calls = one["calls"]
        assert one["starts"] == calls["start"] and one["ends"] == calls["end"]
        assert len(one["lambdas"]) == len(one["ends"]) and all(one["lambdas"])
        assert not one["warned"] and not one["patched"]
        assert one["steps"] == TICKS * EPOCHS
        assert set(one["ends"]) <= set(one["starts"]) and len(one["ends"]) <= len(one["starts"])
        # In manual optimization a dummy batch runs where one is passed: the user's code steps by itself.
        assert len(calls["step"]) >= len(calls["start"])
        assert len(calls["before"]) == len(calls["after"]) == len(calls["transfer"])
        assert len(calls["before"]) == len(calls["step"]) + 2 * EPOCHS  # two batches in each validation


class Counting(Callback):
    """Counts batches; looks at none, so it is called for every one of them."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.batches += 1


class Looking(Callback):
    """Looks at batches, so it is called for those that its rank trains."""

    def __init__(self) -> None:
        self.samples: list[int] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.samples.append(len(batch[0]))
        assert outputs["loss"] is not None


def counting_job(rank: int, world: int) -> tuple[int, list[int]]:
    counting, looking = Counting(), Looking()
    trainer = rank_trainer(rank, world, stale(policy="asp"), max_epochs=2, callbacks=[counting, looking])
    trainer.fit(Watched(rank, slow_s=0.05), pair()[0])
    return counting.batches, looking.samples


def test_hooks_that_look_at_no_batch_are_called_for_every_batch_on_every_rank() -> None:
    """Or the ranks would not come to save a checkpoint together."""
    ranks = run_ranks(2, counting_job)
    assert [batches for batches, _ in ranks] == [2 * 17] * 2
    assert sum(samples for _, ended in ranks for samples in ended) == 2 * len(pair()[0].dataset)
    assert len(ranks[1][1]) < 2 * 17  # the slow rank was passed by


# ---- what is written and logged -----------------------------------------------------------------------------------


class Figures(Callback):
    """Notes what the strategy says before and at the end, and what the monitor reported."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []  # of rank 0
        self.before: Any = ()
        self.summary: str | None = None
        self.metrics: dict[str, float] = {}

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        strategy = trainer.strategy
        self.before = (strategy.step_report(), strategy.engine_metrics(), strategy.summary())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.strategy._run.events.note("last", EPOCHS, 0, {})  # behind the last batch's end
        self.summary, self.metrics = trainer.strategy.summary(), trainer.strategy.engine_metrics()


class Noted(CSVLogger):
    """Has a callback note what the monitor reports."""

    def __init__(self, folder: str, figures: Figures) -> None:
        super().__init__(folder)
        self._figures = figures

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if any(name.startswith("hetero/") for name in metrics):
            self._figures.steps.append(dict(metrics))
        super().log_metrics(metrics, step)


def recorded(rank: int, world: int) -> tuple[Figures, list[Any]]:
    figures, folder = Figures(), Path.cwd() / "trace"
    callbacks: list[Callback] = [StragglerMonitor(every_n_steps=2), HeteroTrace(str(folder)), figures]
    # After the trace: it takes the events, too.
    waiting = Late(1, "middle", 3)
    waiting.on_train_epoch_end = lambda *_: None  # type: ignore[method-assign]
    trainer = rank_trainer(
        rank, world, stale(), callbacks=[*callbacks, waiting], max_epochs=EPOCHS,
        logger=Noted(str(folder), figures),
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(Toy(), loader())
    events = read_events(folder / f"rank{rank}.jsonl")
    return figures, [(e.kind, e.epoch, e.step, dict(e.data)) for e in events]


@cache
def recordings() -> list[tuple[Figures, list[Any]]]:
    return run_ranks(2, recorded)


def test_the_trace_tells_of_every_step() -> None:
    ranks = recordings()
    pushed = 0
    for _, events in ranks:
        assert events[0][0] == "run"
        places = [(epoch, step) for kind, epoch, step, data in events[1:] if kind in ("step", "passed")]
        assert sorted(set(places)) == [(e, t) for e in range(EPOCHS) for t in range(TICKS)]
        steps = [data for kind, *_, data in events if kind == "step"]
        assert all(d["compute_s"] > 0 and d["wait_s"] >= 0 and d["samples"] > 0 for d in steps)
        pushed += sum(d["samples"] for d in steps)
        assert [kind for kind, *_ in events].count("last") == 1
    assert pushed == EPOCHS * SAMPLES + max(figures.metrics["discarded_samples"] for figures, _ in ranks)
    assert any(kind == "passed" for kind, *_ in ranks[1][1])


def test_the_trace_tells_what_the_server_counted_and_of_what_policy() -> None:
    (_, first), (_, second) = recordings()
    counted = [data for kind, *_, data in first if kind == "server"]
    assert counted[-1]["updates"] == EPOCHS * TICKS
    assert not any(kind == "server" for kind, *_ in second)
    assert [data["updates"] for data in counted] == sorted({data["updates"] for data in counted})
    assert sum(counted[-1]["staleness"].values()) >= EPOCHS * SAMPLES
    about = first[0][3]
    assert (about["engine"], about["policy"], about["bound"]) == ("stale", "flexible", 2)


def test_the_monitor_reports_what_the_server_counted() -> None:
    (first, _), (second, _) = recordings()
    assert first.steps and not second.steps  # only rank 0 reports
    logged = first.steps[-1]
    for figures in (first, second):
        assert figures.before == (None, {}, None)  # the server has not started
        for name in ("share", "compute_s", "wait_s"):
            assert {f"hetero/{name}/{who}" for who in ("rank0", "rank1", "max", "min")} <= logged.keys()
        assert {f"hetero/{name}" for name in figures.metrics} <= logged.keys()
        assert logged["hetero/contribution/rank0"] + logged["hetero/contribution/rank1"] == pytest.approx(1.0)
        assert figures.summary is not None and figures.summary.startswith(f"hetero_stale: {EPOCHS * TICKS} updates")
        assert figures.metrics["hold_s"] >= 0 and figures.metrics["apply_s"] > 0
