"""`StragglerMonitor`: what it reports, where and when; and what an engine shows without it."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from lightning_hetero import (
    BalancePolicy,
    BoundedStalenessStrategy,
    HeteroPipelineStrategy,
    LoadBalancedStrategy,
    StragglerMonitor,
)
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Toy, balanced, rank_trainer, regression

SAMPLES, BATCH = 80, 16
STEPS = SAMPLES // BATCH


def loader(batch_size: int = BATCH // 2, samples: int = SAMPLES) -> DataLoader:
    return DataLoader(regression(samples), batch_size=batch_size)


class Noting(Logger):
    """A user's logger that notes its calls, on whatever rank."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int | None, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "noting"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.calls.append((step, dict(metrics)))


def ours(names: Any) -> set[str]:
    return {name for name in names if name.startswith("hetero/")}


ON_BAR = ("shares", "wait")


class Seen(Callback):
    """Notes where ``hetero/*`` turns up, and what the strategy reports."""

    def __init__(self) -> None:
        self.reports: list[Any] = []
        self.bars: list[dict[str, str]] = []
        self.elsewhere: set[str] = set()
        self.summary: str | None = None
        self.calls: list[tuple[int | None, dict[str, float]]] = []  # of the logger, with ours
        self.lines: list[str] = []
        self.named: list[str] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        shown = trainer.progress_bar_metrics
        self.bars.append({name: shown[name] for name in ON_BAR if name in shown})
        logged = {*trainer.logged_metrics, *trainer.callback_metrics}
        self.elsewhere |= (logged & set(ON_BAR)) | ours(logged) | ours(shown)
        self.reports.append(
            trainer.strategy.step_report() if hasattr(trainer.strategy, "step_report") else None
        )

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if hasattr(trainer.strategy, "summary"):
            self.summary = trainer.strategy.summary()
        self.elsewhere |= ours(trainer.logged_metrics) | ours(trainer.callback_metrics)


class Lines(logging.Handler):
    """What is said at level INFO, inside of ``with``."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        self._logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> Lines:
        self._before = self._logger.level
        self._logger.setLevel(logging.INFO)
        self._logger.addHandler(self)
        return self

    def __exit__(self, *args: object) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._before)


def fit(
    rank: int, world: int, strategy: Any, *callbacks: Callback, data: Any = MappingProxyType({}), **kwargs: Any
) -> tuple[Seen, list[str]]:
    """Returns what was seen, and the names of the other values that the logger was given."""
    seen, logger = Seen(), Noting()
    options = {"max_epochs": 2, "log_every_n_steps": 1, "logger": logger, **kwargs}
    with Lines() as said:
        trainer = rank_trainer(rank, world, strategy, callbacks=[*callbacks, seen], **options)
        trainer.fit(Toy(), loader(**data))
    ours_said = [line for line in said.lines if line.startswith(("hetero_", "StragglerMonitor"))]
    seen.named = [line for line in ours_said if "is slow since" in line]  # a busy machine may well make one
    seen.lines = [line for line in ours_said if line not in seen.named]
    seen.calls = [call for call in logger.calls if ours(call[1])]
    return seen, [",".join(sorted(values)) for _, values in logger.calls if not ours(values)]


def monitor_job(rank: int, world: int) -> tuple[Seen, Seen]:
    one, _ = fit(rank, world, balanced(), StragglerMonitor(), log_every_n_steps=2)
    stock, _ = fit(rank, world, DDPStrategy(process_group_backend="gloo"), StragglerMonitor(), log_every_n_steps=2)
    return one, stock


@pytest.fixture(scope="module")
def monitored() -> list[tuple[Seen, Seen]]:
    return run_ranks(2, monitor_job)


NAMES = ("share", "compute_s", "wait_s", "score", "straggler")


def keys(names: Sequence[str]) -> set[str]:
    of_each = {f"hetero/{name}/{who}" for name in names for who in ("rank0", "rank1", "max", "min")}
    return of_each | {"hetero/imbalance", "hetero/waiting"}


def check_derived(values: dict[str, float]) -> None:
    """Scores, extremes and imbalance follow from the reported times."""
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


def test_rank_0_gives_its_loggers_what_the_ranks_have_exchanged(monitored: list[tuple[Seen, Seen]]) -> None:
    (first, _), (second, _) = monitored
    assert first.calls and not second.calls
    for step, values in first.calls:
        assert values.keys() in (keys(NAMES), keys((*NAMES, "predicted_s")))
        check_derived(values)
        assert sum(values[f"hetero/share/rank{r}"] for r in range(2)) >= BATCH
        assert step is not None
        report = first.reports[step]  # the very numbers of the step that the logger is told
        assert [values[f"hetero/compute_s/rank{r}"] for r in range(2)] == [r.compute_s for r in report.records]
    assert first.calls[-1][1].keys() == keys((*NAMES, "predicted_s"))


def test_the_monitor_reports_every_n_steps_and_at_the_end_of_an_epoch(monitored: list[tuple[Seen, Seen]]) -> None:
    """Steps as Lightning's own values have them, from 0; an epoch has 5. Nothing is known in the very first ones."""
    steps = [step for step, _ in monitored[0][0].calls if step is not None]
    assert set(steps) - {2} <= {1, 3, 4, 5, 7, 9} and {4, 5, 7, 9} <= set(steps)
    assert steps == sorted(set(steps))


def test_shares_and_waiting_are_on_the_progress_bar_and_nowhere_else(monitored: list[tuple[Seen, Seen]]) -> None:
    for one, stock in monitored:
        assert one.elsewhere == stock.elsewhere == set()
    first, second = monitored
    for seen in first:
        bar = seen.bars[-1]
        assert sum(map(int, bar["shares"].split("/"))) == BATCH and re.fullmatch(r"\d{1,3}%", bar["wait"])
    assert first[1].bars[-1]["shares"] == f"{BATCH // 2}/{BATCH // 2}"
    assert second[0].bars[-1] == second[1].bars[-1] == {}


def test_with_stock_ddp_the_monitor_reports_means_of_the_epoch(monitored: list[tuple[Seen, Seen]]) -> None:
    calls = monitored[0][1].calls
    assert [step for step, _ in calls] == [STEPS - 1, 2 * STEPS - 1] and not monitored[1][1].calls
    for _, values in calls:
        assert values.keys() == keys(NAMES)  # nothing is predicted there
        check_derived(values)
        assert [values[f"hetero/share/rank{r}"] for r in range(2)] == [BATCH / 2] * 2


def test_with_stock_ddp_the_last_lines_tell_what_engines_would_give(monitored: list[tuple[Seen, Seen]]) -> None:
    (line,) = monitored[0][1].lines
    pattern = (
        r"StragglerMonitor: \d+ % of your 2 ranks' time in steps was waiting for slower ranks \([\d.]+ of ([\d.]+)"
        r" device-seconds\)\. A step took ([\d.]+) ms\.\nIf work grows .* with strategy='hetero_balanced', and .*"
        r" with 'hetero_stale'\."
    )
    assert re.fullmatch(pattern, line), line


# ---- who is slow ------------------------------------------------------------------------------------------------

SLOW_FROM, SLOWER = 24, 1.5


def tokens(batch: Any) -> float:
    """Differs by a factor of ten between batches, and between ranks."""
    return 10.0 + 100.0 * abs(float(batch[1][0]))


class Timed(Callback):
    """Puts times in the place of a probe's: in proportion to tokens, on rank 1 longer from a step on."""

    def __init__(self, monitor: StragglerMonitor) -> None:
        self.monitor = monitor
        self.batches: list[float] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        own = self.monitor._own
        probe = trainer.strategy._run.probe if own is None else own.probe
        self.batches.append(tokens(batch) * 1e-4 * (SLOWER if trainer.global_rank and batch_idx >= SLOW_FROM else 1.0))
        if batch_idx == 0:
            inner = probe.take
            probe.take = lambda: None if inner() is None else self.batches[-1]


def named_job(rank: int, world: int) -> list[tuple[list[str], list[tuple[int | None, dict[str, float]]]]]:
    def run(strategy: Any, **kwargs: Any) -> Any:
        monitor = StragglerMonitor(**kwargs)
        seen, _ = fit(
            rank, world, strategy, monitor, Timed(monitor), max_epochs=1, data={"samples": 70 * BATCH},
            log_every_n_steps=10,
        )
        return seen.named, seen.calls

    policy = BalancePolicy(dead_band=100.0)  # equal shares: the times are of the test's making
    return [
        run(balanced(batch_cost=tokens, policy=policy)),
        run(DDPStrategy(process_group_backend="gloo"), batch_cost=tokens),
        run(DDPStrategy(process_group_backend="gloo")),
    ]


@pytest.fixture(scope="module")
def named() -> list[Any]:
    return run_ranks(2, named_job)


@pytest.mark.parametrize("run", [0, 1], ids=["balanced", "stock DDP"])
def test_a_slow_rank_is_named_once_since_when_and_by_how_much(named: list[Any], run: int) -> None:
    (line,), calls = named[0][run]
    said = (
        r"StragglerMonitor: rank 1 is slow since epoch 0, step (\d+): it needs ([\d.]+) times as long for the same work"
        r" as the other ranks' median"
    )
    found = re.fullmatch(said, line)
    assert found, line
    assert int(found[1]) in (SLOW_FROM, SLOW_FROM + 1) and float(found[2]) == pytest.approx(SLOWER, rel=0.01)
    assert calls[-1][1]["hetero/straggler/rank1"] == pytest.approx(SLOWER, rel=0.01)
    assert calls[-1][1]["hetero/straggler/rank0"] == 1.0
    before = [values for step, values in calls if step is not None and step < SLOW_FROM]
    assert all(values["hetero/straggler/max"] == 1.0 for values in before)
    assert named[1][run] == ([], [])


# ---- without a monitor ------------------------------------------------------------------------------------------


class Watching(Callback):
    """Calls of a user's callback and module hooks, and the Trainer's callbacks and metrics at each."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.callbacks: set[str] = set()

    def note(self, trainer: Any, name: str) -> None:
        self.calls.append(name)
        ours = [type(c).__name__ for c in trainer.callbacks]
        self.callbacks.add(",".join(ours))

    def metrics(self, trainer: Any, name: str) -> None:
        kinds = (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics)
        self.note(trainer, f"{name} {[sorted(kind) for kind in kinds]}")

    def on_train_start(self, trainer: Any, *args: Any) -> None:
        self.metrics(trainer, "start")

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        self.note(trainer, "batch start")

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.metrics(trainer, "batch end")

    def on_train_epoch_end(self, trainer: Any, *args: Any) -> None:
        self.note(trainer, "epoch end")

    def on_train_end(self, trainer: Any, *args: Any) -> None:
        self.metrics(trainer, "end")


class Hooked(Toy):
    """Notes its own hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.called.append("batch end")

    def on_train_end(self) -> None:
        self.called.append("end")


def watched(rank: int, world: int, strategy: Any) -> tuple[list[str], list[str], list[str], set[str], list[str]]:
    watching, logger, module = Watching(), Noting(), Hooked()
    with Lines() as said:
        trainer = rank_trainer(
            rank, world, strategy, callbacks=[watching], max_epochs=2, log_every_n_steps=1, logger=logger
        )
        before = list(trainer.callbacks)
        trainer.fit(module, loader())
    assert trainer.callbacks == before
    logged = [f"{step} {sorted(values)}" for step, values in logger.calls]
    lines = [line for line in said.lines if line.startswith("hetero_") and "\n" not in line]  # the plan has several
    return watching.calls, module.called, logged, watching.callbacks, lines


def drop_in_job(rank: int, world: int) -> list[Any]:
    backend: dict[str, Any] = {"process_group_backend": "gloo"}
    return [
        watched(rank, world, strategy)
        for strategy in (
            DDPStrategy(**backend),
            LoadBalancedStrategy(**backend),
            HeteroPipelineStrategy(**backend),
            BoundedStalenessStrategy(policy="bsp", **backend),
        )
    ]


@pytest.mark.stock_ddp("logger")
def test_user_code_sees_what_it_sees_under_stock_ddp() -> None:
    for rank, (stock, *engines) in enumerate(run_ranks(2, drop_in_job)):
        assert stock[2] and stock[4] == []
        for name, engine in zip(("balanced", "pipeline", "stale"), engines, strict=True):
            assert engine[:3] == stock[:3], name
            if name != "stale":  # where ranks meet is a callback
                assert engine[3] == stock[3], name
            # One line, which is what ``monitor`` is: said, not logged.
            assert len(engine[4]) == (rank == 0), name
            assert all(line.startswith(f"hetero_{name}: ") for line in engine[4])
