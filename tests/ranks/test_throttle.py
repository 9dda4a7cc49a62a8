"""The throttle with a clock that only moves when told to, and the callbacks in a single-process Trainer."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero.callbacks.throttle import ThrottleCallback
from lightning_hetero.callbacks.trace import HeteroTrace
from lightning_hetero.cluster.record import read_events
from lightning_hetero.emulate import Scenario, Throttle
from lightning_hetero.types import Event


class Time:
    """A clock and a sleep that may take longer than asked."""

    def __init__(self, late_s: list[float] | None = None) -> None:
        self.now_s = 100.0
        self.sleeps: list[float] = []
        self.late_s = list(late_s or [])

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now_s += seconds + (self.late_s.pop(0) if self.late_s else 0.0)

    def throttle(self, scenario: Scenario, rank: int, **more: Any) -> Throttle:
        return Throttle(scenario, rank, clock=self.clock, sleep=self.sleep, **more)


EMULATED = Scenario(speeds=[1.0, 0.25], sample_s=0.01, step_s=0.1)


def test_sleeps_sum_to_the_scenarios_work() -> None:
    time, scenario = Time(), EMULATED.jittered(0.3)
    throttle = time.throttle(scenario, 1)
    for step in range(20):
        throttle.begin(step, samples=step)
        time.now_s += 0.7  # real work is not subtracted
        throttle.finish()
    assert time.sleeps == pytest.approx([scenario.work_s(1, step, step) for step in range(20)])


def test_no_samples_cost_the_fixed_time() -> None:
    time = Time()
    throttle = time.throttle(EMULATED, 1)
    throttle.begin(0, samples=0)
    assert throttle.finish() == pytest.approx(0.1 / 0.25)


@settings(max_examples=50)
@given(st.lists(st.floats(0.0, 0.5), min_size=1, max_size=20))
def test_late_sleeps_are_made_up_for(late_s: list[float]) -> None:
    time = Time(late_s)
    throttle = time.throttle(EMULATED, 1)
    for step in range(len(late_s) + 2):  # work is 0.8 s each: two more steps make up for anything
        throttle.begin(step, samples=10)
        throttle.finish()
    assert time.now_s - 100.0 == pytest.approx((len(late_s) + 2) * 0.8)
    assert all(pause > 0 for pause in time.sleeps)


def test_a_suspended_process_makes_up_for_one_step_only() -> None:
    time = Time(late_s=[1000.0])
    throttle = time.throttle(EMULATED, 1)
    for step in range(3):
        throttle.begin(step, samples=10)
        throttle.finish()
    assert time.sleeps == pytest.approx([0.8, 0.8])  # the second step sleeps nothing, the third in full


def test_a_late_sleep_is_spread_over_steps_shorter_than_it() -> None:
    time = Time(late_s=[0.5])
    throttle = time.throttle(EMULATED, 1)
    for step, samples in enumerate([10, 0, 0, 0]):  # 0.8 s, then 0.4 s each
        throttle.begin(step, samples)
        throttle.finish()
    assert time.sleeps == pytest.approx([0.8, 0.3, 0.4])
    assert time.now_s - 100.0 == pytest.approx(0.8 + 3 * 0.4)


@given(st.floats(0.1, 1.0), st.floats(0.001, 2.0), st.floats(1.0, 4.0))
def test_real_work_is_stretched_to_the_speed(speed: float, work_s: float, factor: float) -> None:
    time = Time()
    throttle = time.throttle(Scenario(speeds=[speed]), 0)
    throttle.begin(0, samples=3)
    time.now_s += work_s
    throttle.finish(work_factor=factor)
    assert sum(time.sleeps) + factor * work_s == pytest.approx(factor * work_s / speed)


def test_finish_without_begin_and_twice_does_nothing() -> None:
    time = Time()
    throttle = time.throttle(EMULATED, 0)
    assert throttle.finish() == 0.0
    throttle.begin(0, samples=1)
    throttle.finish()
    assert throttle.finish() == 0.0
    assert len(time.sleeps) == 1


def test_faults_hit_their_rank_and_step_only() -> None:
    killed: list[str] = []
    scenario = EMULATED.kill(1, 3).stall(1, 4, seconds=9.0).raise_at(1, 5).kill(0, 6)
    time = Time()
    throttle = time.throttle(scenario, 1, kill=lambda: killed.append("now"))
    for step in (0, 1, 2):
        throttle.begin(step, samples=0)
    assert (killed, time.sleeps) == ([], [])
    throttle.begin(3, samples=0)
    assert killed == ["now"]
    throttle.begin(4, samples=0)
    assert time.sleeps == [9.0]
    with pytest.raises(RuntimeError, match=r"scripted fault.*rank 1 at step 5"):
        throttle.begin(5, samples=0)
    assert throttle.finish() == 0.0  # the step never began
    throttle.begin(6, samples=0)
    assert killed == ["now"]  # rank 0's own


def test_a_fault_comes_once_and_also_if_its_step_was_skipped() -> None:
    time = Time()
    throttle = time.throttle(EMULATED.stall(0, 4, seconds=9.0), 0)
    throttle.begin(2, samples=0)
    throttle.begin(7, samples=0)  # the rank was granted nothing in between
    assert time.sleeps == [9.0]
    throttle.begin(7, samples=0)  # another batch of the same step
    assert time.sleeps == [9.0]
    throttle.begin(4, samples=0)  # another fit
    assert time.sleeps == [9.0, 9.0]


def test_kill_is_a_signal_nobody_can_catch_to_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    Throttle(Scenario().kill(0, 0), 0).begin(0, samples=1)
    assert sent == [(os.getpid(), signal.SIGKILL)]


def test_memory_cap() -> None:
    throttle = Time().throttle(EMULATED.cap(1, 8), 1)
    throttle.begin(0, samples=8)
    with pytest.raises(torch.OutOfMemoryError, match=r"rank 1 got 9 samples at step 1.*at most 8"):
        throttle.begin(1, samples=9)
    Time().throttle(EMULATED.cap(1, 8), 0).begin(0, samples=9)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(TypeError, match="must be a Scenario"):
        Throttle({"speeds": [1.0]}, 0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="must be a Scenario"):
        ThrottleCallback(None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="rank=-1"):
        Throttle(EMULATED, -1)
    with pytest.raises(ValueError, match=r"highest speed is 4.*divide all speeds by 4"):
        Throttle(Scenario(speeds=[1.0]).change([4.0], at_step=5), 0)
    with pytest.raises(ValueError, match="every_n_steps=0"):
        HeteroTrace(every_n_steps=0)
    with pytest.raises(ValueError, match="local folder"):
        HeteroTrace("s3://bucket/run")


class Net(LightningModule):
    """One linear layer; `backwards` > 0: manual optimisation with as many backward passes per batch."""

    def __init__(self, backwards: int = 0) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.automatic_optimization = backwards == 0
        self.backwards = backwards

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        if self.automatic_optimization:
            return self.layer(batch[0]).square().mean()
        optimizer: Any = self.optimizers()
        for _ in range(self.backwards):
            self.manual_backward(self.layer(batch[0]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        return None

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.layer(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class NoBackward(Net):
    """Skips every batch."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        return None


def fit(
    folder: Path, callbacks: list[Any], model: LightningModule | None = None, **arguments: Any
) -> Trainer:
    """Trains 2 epochs of batches of 4, 4 and 2 samples."""
    loader = DataLoader(TensorDataset(torch.ones(10, 2)), batch_size=4)
    settings: dict[str, Any] = {"max_epochs": 2, "enable_checkpointing": False, "logger": False} | arguments
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        accelerator="cpu", devices=1, default_root_dir=folder, callbacks=callbacks, **settings, **quiet
    )
    trainer.fit(model or Net(), loader, loader)
    return trainer


WARNINGS = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers", "ignore:.*logging interval", "ignore:.*returned `None`"
)
CHANGING = Scenario(sample_s=0.01, step_s=0.1).slow(0, 2, at_step=4)
EXPECTED = [CHANGING.work_s(0, step, samples) for step, samples in enumerate([4, 4, 2, 4, 4, 2])]


@WARNINGS
@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        (Net(), {}),
        (Net(), {"accumulate_grad_batches": 2}),
        (Net(backwards=1), {}),
        (Net(backwards=2), {}),
        (NoBackward(), {}),
    ],
    ids=["automatic", "accumulation", "manual", "manual with two backwards", "no backward"],
)
def test_one_sleep_per_training_batch(tmp_path: Path, model: Net, arguments: dict[str, Any]) -> None:
    time = Time()
    fit(tmp_path, [ThrottleCallback(CHANGING, throttle=time.throttle)], model, **arguments)
    assert time.sleeps == pytest.approx(EXPECTED)


@WARNINGS
def test_the_sleep_comes_before_the_backward_pass(tmp_path: Path) -> None:
    order: list[str] = []
    time = Time()

    class Watched(Net):
        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            order.append(f"backward after {len(time.sleeps)} sleeps")
            super().backward(loss, *args, **kwargs)

    fit(tmp_path, [ThrottleCallback(CHANGING, throttle=time.throttle)], Watched(), max_epochs=1)
    assert order == [f"backward after {n} sleeps" for n in (1, 2, 3)]


@WARNINGS
def test_steps_go_on_after_a_resume(tmp_path: Path) -> None:
    first, second = Time(), Time()
    trainer = fit(tmp_path, [ThrottleCallback(CHANGING, throttle=first.throttle)], max_epochs=1)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    callback = pickle.loads(pickle.dumps(ThrottleCallback(CHANGING)))  # as a spawn launcher does
    callback._make_throttle = second.throttle
    loader = DataLoader(TensorDataset(torch.ones(10, 2)), batch_size=4)
    resumed = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        default_root_dir=tmp_path,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    resumed.fit(Net(), loader, ckpt_path=tmp_path / "last.ckpt")
    assert first.sleeps + second.sleeps == pytest.approx(EXPECTED)


@WARNINGS
def test_stretched_work_counts_the_backward_pass(tmp_path: Path) -> None:
    time = Time()

    class Working(Net):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
            time.now_s += 1.0
            return super().training_step(batch, batch_idx)

    scenario = Scenario(speeds=[0.5])
    fit(tmp_path, [ThrottleCallback(scenario, throttle=time.throttle)], Working(), max_epochs=1)
    assert time.sleeps == pytest.approx([3.0] * 3)  # 1 s forward, 2 s backward, both again


@WARNINGS
def test_who_counts_the_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    time, scenario = Time(), Scenario(sample_s=1.0)

    def counted(**more: Any) -> list[float]:
        time.sleeps.clear()
        fit(tmp_path, [ThrottleCallback(scenario, throttle=time.throttle, **more)], max_epochs=1)
        return time.sleeps

    assert counted(samples=lambda batch: 2 * len(batch[0])) == [8.0, 8.0, 4.0]
    from lightning.pytorch.strategies import SingleDeviceStrategy

    monkeypatch.setattr(SingleDeviceStrategy, "current_samples", lambda self: None, raising=False)
    assert counted() == [4.0, 4.0, 2.0]
    monkeypatch.setattr(SingleDeviceStrategy, "current_samples", lambda self: 0, raising=False)
    assert counted(samples=len) == []  # nothing to compute, no fixed cost either


@WARNINGS
@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.ones(3, 2), 3),
        ([torch.ones(5, 2), torch.ones(7)], 5),
        ({"x": {"y": torch.ones(6)}, "name": "a"}, 6),
        (["text", torch.ones(4)], 4),
        (torch.tensor(1.0), 1),
    ],
)
def test_samples_are_counted_as_lightning_does(batch: Any, samples: int) -> None:
    from lightning_hetero.callbacks.samples import count_samples

    trainer: Any = SimpleNamespace(strategy=object(), train_dataloader=None)
    assert count_samples(trainer, batch) == samples


@WARNINGS
def test_samples_of_a_graph_batch_are_counted_by_the_loader(tmp_path: Path) -> None:
    """The first tensor of a graph counts its nodes, here 7 per graph; 10 graphs in batches of 4 are 4, 4 and 2."""

    class Graphs:
        def __init__(self, graphs: list[Any]) -> None:
            self.nodes = torch.stack([x for (x,) in graphs]).repeat(7, 1)

    seen: list[int] = []

    class Count(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            seen.append(count_samples(trainer, batch))

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            seen.append(count_samples(trainer, args[1]))

    from lightning_hetero.callbacks.samples import count_samples

    class OnGraphs(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: Graphs, batch_idx: int) -> Tensor:
            return self.layer(batch.nodes).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    graphs = DataLoader(TensorDataset(torch.ones(10, 2)), batch_size=4, collate_fn=Graphs)
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False, callbacks=[Count()],
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )
    trainer.fit(OnGraphs(), graphs)
    assert seen == [4, 4, 4, 4, 2, 2]


@WARNINGS
def test_faults_end_a_fit_and_are_recorded(tmp_path: Path) -> None:
    scenario = EMULATED.raise_at(rank=0, at_step=4)
    with pytest.raises(RuntimeError, match="rank 0 at step 4"):
        fit(tmp_path, [HeteroTrace(), ThrottleCallback(scenario, throttle=Time().throttle)])
    *steps, fault = read_events(tmp_path / "hetero")[1:]
    assert [(e.epoch, e.step) for e in steps] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert (fault.kind, fault.epoch, fault.step) == ("fault", 1, 1)
    assert "scripted fault" in fault.data["error"]


@WARNINGS
def test_stock_strategies_are_traced_with_batch_times(tmp_path: Path) -> None:
    trace = HeteroTrace(str(tmp_path / "mine"), every_n_steps=2)
    fit(tmp_path, [trace])
    run, *steps = read_events(tmp_path / "mine")
    assert (run.kind, run.data["world_size"]) == ("run", 1)
    assert [(e.epoch, e.step, e.data["samples"]) for e in steps] == [
        (0, 0, 4),
        (0, 2, 2),
        (1, 0, 4),
        (1, 2, 2),
    ]
    assert all(e.data["step_s"] > 0 and set(e.data) == {"samples", "step_s"} for e in steps)
    fit(tmp_path, [trace])  # the same callback again continues the file
    assert [e.kind for e in read_events(tmp_path / "mine")].count("run") == 2


def _source(trainer_steps: list[int]) -> Callable[[Any], list[Event]]:
    def step_events(self: Any) -> list[Event]:
        n = len(trainer_steps)
        trainer_steps.append(n)
        kinds = ("step", "decision")
        return [Event(kind=k, rank=0, epoch=0, step=n, t_s=0.0, data={"call": n}) for k in kinds]

    return step_events


@WARNINGS
def test_what_the_strategy_measured_is_drained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.strategies import SingleDeviceStrategy

    calls: list[int] = []
    monkeypatch.setattr(SingleDeviceStrategy, "step_events", _source(calls), raising=False)
    fit(tmp_path, [HeteroTrace(every_n_steps=2)], max_epochs=1)
    rows = [(e.kind, e.step) for e in read_events(tmp_path / "hetero")[1:]]
    assert len(calls) >= 4  # three batches, and what was left at the end
    assert [s for k, s in rows if k == "decision"] == calls
    assert [s for k, s in rows if k == "step"] == calls[::2]
    assert all(e.data.keys() <= {"call"} for e in read_events(tmp_path / "hetero")[1:])


@WARNINGS
def test_a_callback_that_measures_is_used_under_stock_strategies(tmp_path: Path) -> None:
    from lightning.pytorch import Callback

    calls: list[int] = []
    meter = type("Meter", (Callback,), {"step_events": _source(calls)})()
    fit(tmp_path, [HeteroTrace(), meter], max_epochs=1)
    assert {e.kind for e in read_events(tmp_path / "hetero")} == {"run", "step", "decision"}
    assert all("call" in e.data for e in read_events(tmp_path / "hetero")[1:])


@WARNINGS
def test_the_trace_goes_next_to_the_logger(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    trainer = fit(tmp_path, [HeteroTrace()], logger=CSVLogger(tmp_path, name="csv"))
    assert (Path(str(trainer.log_dir)) / "hetero" / "rank0.jsonl").is_file()
    assert pickle.loads(pickle.dumps(HeteroTrace())).dirpath is None
