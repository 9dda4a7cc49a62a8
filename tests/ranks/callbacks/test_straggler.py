"""`StragglerMonitor`: what it logs, when, and who adds it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from lightning_hetero import BatchRebalancer, LoadBalancedStrategy, StragglerMonitor
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Toy, balanced, rank_trainer, regression

SAMPLES, BATCH = 80, 16


def loader(batch_size: int = BATCH // 2, samples: int = SAMPLES) -> DataLoader:
    return DataLoader(regression(samples), batch_size=batch_size)


class Seen(Callback):
    """Notes the logged ``hetero/*`` values after every batch and epoch, and the step they were measured on."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.reports: list[Any] = []
        self.bars: list[set[str]] = []
        self.epochs: list[dict[str, float]] = []
        self.summary: str | None = None

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.steps.append({k: float(v) for k, v in trainer.logged_metrics.items() if k.startswith("hetero/")})
        self.bars.append(set(trainer.progress_bar_metrics))
        self.reports.append(
            trainer.strategy.step_report() if hasattr(trainer.strategy, "step_report") else None
        )

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if hasattr(trainer.strategy, "summary"):
            self.summary = trainer.strategy.summary()
        self.epochs.append(
            {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("hetero/")}
        )


def monitor_job(rank: int, world: int) -> tuple[Seen, Seen]:
    ours, stock = Seen(), Seen()
    for seen, strategy in ((ours, balanced()), (stock, DDPStrategy(process_group_backend="gloo"))):
        callbacks = [StragglerMonitor(every_n_steps=2), seen]
        options = {"max_epochs": 2, "log_every_n_steps": 1, "logger": CSVLogger(type(strategy).__name__)}
        trainer = rank_trainer(rank, world, strategy, callbacks=callbacks, **options)
        trainer.fit(Toy(), loader())
    return ours, stock


def silent_job(rank: int, world: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for strategy in (balanced(), DDPStrategy(process_group_backend="gloo")):
            callbacks = [StragglerMonitor(every_n_steps=2)]
            rank_trainer(rank, world, strategy, callbacks=callbacks, max_epochs=1).fit(Toy(), loader())
    return [str(w.message) for w in caught if "hetero/" in str(w.message)]


def test_without_a_logger_nothing_is_warned_of() -> None:
    assert run_ranks(2, silent_job) == [[], []]


@pytest.fixture(scope="module")
def monitored() -> list[tuple[Seen, Seen]]:
    return run_ranks(2, monitor_job)


NAMES = ("share", "compute_s", "wait_s", "score")


def keys(names: Sequence[str]) -> set[str]:
    of_each = {f"hetero/{name}/{who}" for name in names for who in ("rank0", "rank1", "max", "min")}
    return of_each | {"hetero/imbalance"}


def check_derived(values: dict[str, float]) -> None:
    """Scores, extremes and imbalance follow from the logged times (float32 in the logs)."""
    times = [values[f"hetero/compute_s/rank{r}"] for r in range(2)]
    shares = [max(1.0, values[f"hetero/share/rank{r}"]) for r in range(2)]
    assert min(times) > 0
    speeds = [n / t for n, t in zip(shares, times, strict=True)]
    scores = [values[f"hetero/score/rank{r}"] for r in range(2)]
    assert scores == pytest.approx([s / max(speeds) for s in speeds], rel=1e-5)
    assert values["hetero/imbalance"] == pytest.approx(2 * max(times) / sum(times), rel=1e-5)
    for name in NAMES:
        both = [values[f"hetero/{name}/rank{r}"] for r in range(2)]
        assert (values[f"hetero/{name}/max"], values[f"hetero/{name}/min"]) == (max(both), min(both))


def test_the_monitor_logs_what_the_ranks_have_exchanged(monitored: list[tuple[Seen, Seen]]) -> None:
    for ours, _ in monitored:
        logged = [(values, report) for values, report in zip(ours.steps, ours.reports, strict=True) if values]
        assert len(ours.steps) == 10 and logged
        for values, report in logged:
            assert values.keys() in (keys(NAMES), keys((*NAMES, "predicted_s")))
            check_derived(values)
            assert sum(values[f"hetero/share/rank{r}"] for r in range(2)) >= BATCH
            assert report is not None
        assert logged[-1][0].keys() == keys((*NAMES, "predicted_s"))
        assert "hetero/imbalance" in ours.bars[-1]
    first, second = monitored
    assert first[0].steps == second[0].steps  # the same on every rank


def test_the_monitor_logs_every_n_steps_and_at_the_end_of_an_epoch(monitored: list[tuple[Seen, Seen]]) -> None:
    """Values of step 2k stay in ``logged_metrics`` during step 2k + 1, unless that is the last of 5 batches."""
    for ours, _ in monitored:
        changed = [i for i in range(2, 11) if ours.steps[i - 1] != ours.steps[i - 2]]
        assert set(changed) <= {2, 4, 5, 6, 8, 10}
        assert 5 in changed


def test_with_stock_ddp_the_monitor_logs_means_of_the_epoch(monitored: list[tuple[Seen, Seen]]) -> None:
    for _, stock in monitored:
        assert not stock.steps[0]
        (values,) = stock.epochs
        assert values.keys() == keys(NAMES)  # nothing is predicted there
        check_derived(values)
        assert [values[f"hetero/share/rank{r}"] for r in range(2)] == [BATCH / 2] * 2
    assert monitored[0][1].epochs == monitored[1][1].epochs


def test_the_last_line_tells_the_shares(monitored: list[tuple[Seen, Seen]]) -> None:
    pattern = (
        r"hetero_balanced: shares (\d+)/(\d+), [\d.]+ ms of work per batch;"
        r" equal shares would take [\d.]+ times as long"
    )
    for ours, _ in monitored:
        assert ours.summary is not None
        found = re.fullmatch(pattern, ours.summary)
        assert found and int(found[1]) + int(found[2]) == BATCH
    assert monitored[0][0].summary == monitored[1][0].summary


def test_the_monitor_refuses_a_bad_interval() -> None:
    with pytest.raises(ValueError, match=r"every_n_steps=0 must be at least 1"):
        StragglerMonitor(every_n_steps=0)


class Neighbours(Callback):
    """Notes our callbacks beside it, in every fit."""

    def __init__(self) -> None:
        self.seen: list[list[str]] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append(ours_among(trainer))


def ours_among(trainer: Any) -> list[str]:
    names = [type(callback).__name__ for callback in vars(trainer)["callbacks"]]
    return sorted(name for name in names if name in ("BatchRebalancer", "StragglerMonitor"))


def added_job(rank: int, world: int) -> list[list[list[str]]]:
    found = []
    for strategy, callbacks in (
        (LoadBalancedStrategy(), []),
        (LoadBalancedStrategy(monitor=False), []),
        (LoadBalancedStrategy(), [StragglerMonitor(), BatchRebalancer()]),
    ):
        neighbours = Neighbours()
        trainer = rank_trainer(rank, world, strategy, callbacks=[neighbours, *callbacks], max_epochs=1)
        for epochs in (1, 2):  # a second fit adds nothing more
            trainer.fit_loop.max_epochs = epochs
            trainer.fit(Toy(), loader())
        found.append([*neighbours.seen, ours_among(trainer)])
    return found


def test_the_monitor_is_added_for_a_fit_unless_given_or_declined() -> None:
    both, monitor = ["BatchRebalancer", "StragglerMonitor"], ["StragglerMonitor"]
    assert run_ranks(2, added_job) == [[[monitor, monitor, []], [[], [], []], [both, both, both]]] * 2
