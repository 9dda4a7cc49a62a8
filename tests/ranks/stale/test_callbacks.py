"""What the trace, the monitor and the summary of the stale engine tell."""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_hetero import HeteroTrace, StragglerMonitor
from lightning_hetero.cluster import read_events
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Toy, rank_trainer, regression, stale
from tests.ranks.stale.fits import Late

pytestmark = pytest.mark.ranks

WORLD, BATCH, TICKS, EPOCHS = 2, 3, 10, 2
SAMPLES = WORLD * BATCH * TICKS


def loader(batches: int = TICKS) -> DataLoader:
    return DataLoader(regression(WORLD * BATCH * batches), batch_size=BATCH)


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
    callbacks: list[Callback] = [StragglerMonitor(), HeteroTrace(str(folder)), figures]
    # After the trace: it takes the events, too.
    waiting = Late(1, "middle", 3)
    waiting.on_train_epoch_end = lambda *_: None  # type: ignore[method-assign]
    trainer = rank_trainer(
        rank, world, stale(), callbacks=[*callbacks, waiting], max_epochs=EPOCHS, log_every_n_steps=2,
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
