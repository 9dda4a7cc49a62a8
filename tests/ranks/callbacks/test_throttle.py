"""`ThrottleCallback` in a single-process Trainer, with a clock that only moves when told to."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_hetero.callbacks import throttle
from lightning_hetero.callbacks.throttle import ThrottleCallback
from lightning_hetero.callbacks.trace import HeteroTrace
from lightning_hetero.emulate import Fault, Scenario
from lightning_hetero.emulate.throttle import Throttle
from lightning_hetero.record import read_events
from tests.ranks.callbacks.kit import WARNINGS, Net, NoBackward, fit
from tests.ranks.emulate.kit import Time
from tests.ranks.measure.kit import VirtualGpu

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
def test_the_memory_cap_is_met_in_the_training_step(tmp_path: Path) -> None:
    reached: list[int] = []

    class Starts(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            reached.append(batch_idx)

    model = Starts()
    fit(tmp_path, [ThrottleCallback(replace(CHANGING, mem_samples=[4]), throttle=Time().throttle)], model)
    assert len(reached) == 6
    with pytest.raises(torch.OutOfMemoryError, match="rank 0 got 4 samples at step 0, its memory holds at most 3"):
        fit(tmp_path, [ThrottleCallback(replace(CHANGING, mem_samples=[3]), throttle=Time().throttle)], model)
    assert reached[6:] == [0] and "training_step" not in vars(model)


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
    from lightning_hetero.callbacks.reporting import count_samples

    trainer: Any = SimpleNamespace(strategy=object(), train_dataloader=None)
    assert count_samples(trainer, batch) == samples


@WARNINGS
def test_faults_end_a_fit_and_are_recorded(tmp_path: Path) -> None:
    scripted = Fault(step=4, rank=0, kind="exception")
    scenario = Scenario(sample_s=0.01, step_s=0.1, faults=[scripted])
    with pytest.raises(RuntimeError, match="rank 0 at step 4"):
        fit(tmp_path, [HeteroTrace(), ThrottleCallback(scenario, throttle=Time().throttle)])
    *steps, fault = read_events(tmp_path / "hetero")[1:]
    assert [(e.epoch, e.step) for e in steps] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert (fault.kind, fault.epoch, fault.step) == ("fault", 1, 1)
    assert "scripted fault" in fault.data["error"]


@WARNINGS
def test_a_scenario_of_more_ranks_than_train_is_said(tmp_path: Path) -> None:
    time = Time()
    callback = ThrottleCallback(Scenario(speeds=[1.0, 0.25], sample_s=0.01), throttle=time.throttle)
    with pytest.warns(UserWarning, match=r"more ranks than the 1 that train; .*beyond the first 1: \[0.25\]"):
        fit(tmp_path, [callback], max_epochs=1)


# ---- a device that is asynchronous -----------------------------------------------------------------------------


@WARNINGS
def test_work_that_a_device_has_not_done_yet_is_stretched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is through with a pass at once. Peers' work, behind the last gradient, is none of this rank's."""
    gpu, slept = VirtualGpu(), list[float]()
    monkeypatch.setattr(throttle, "device_of", lambda device: gpu)

    class OnDevice(Net):
        def on_fit_start(self) -> None:
            self.layer.weight.register_hook(lambda grad: gpu.submit(3.0))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            gpu.submit(1.0)
            return super().training_step(batch, batch_idx)

        def on_after_backward(self) -> None:
            gpu.submit(100.0)

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        gpu.host_s += seconds

    paced = partial(Throttle, sleep=sleep)
    fit(tmp_path, [ThrottleCallback(Scenario(speeds=[0.25]), throttle=paced)], OnDevice(), max_epochs=1)
    guessed_s, wanted_s = 3 * (1.0 + 2.0), 3 * (1.0 + 3.0)
    assert slept == pytest.approx([guessed_s, wanted_s + 0.05, wanted_s])  # as much as is made up for
