"""`ThrottleCallback` in a single-process Trainer, with a clock that only moves when told to."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero.callbacks.reporting import Reporting
from lightning_hetero.callbacks.throttle import ThrottleCallback
from lightning_hetero.callbacks.trace import HeteroTrace
from lightning_hetero.emulate import Scenario
from lightning_hetero.record import read_events
from tests.ranks.callbacks.kit import WARNINGS, Net, NoBackward, fit
from tests.ranks.emulate.kit import Time

CHANGING = Scenario(sample_s=0.01, step_s=0.1).slow(0, 2, at_step=4)
EXPECTED = [CHANGING.work_s(0, step, samples) for step, samples in enumerate([4, 4, 2, 4, 4, 2])]


def test_only_a_scenario_is_taken() -> None:
    with pytest.raises(TypeError, match="must be a Scenario"):
        ThrottleCallback(None)  # pyright: ignore[reportArgumentType]


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
    fit(tmp_path, [ThrottleCallback(CHANGING.cap(0, 4), throttle=Time().throttle)], model)
    assert len(reached) == 6
    with pytest.raises(torch.OutOfMemoryError, match="rank 0 got 4 samples at step 0, its memory holds at most 3"):
        fit(tmp_path, [ThrottleCallback(CHANGING.cap(0, 3), throttle=Time().throttle)], model)
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


class Working(Net):
    """Forward takes 0.01 s and backward 0.03 s of the test's clock; the optimizer, 1 s, is no work."""

    def __init__(self, time: Time, backwards: int = 0) -> None:
        super().__init__(backwards)
        self.time = time
        self.layer.weight.register_hook(self.spend)

    def spend(self, _: Tensor) -> None:
        self.time.now_s += 0.03

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        self.time.now_s += 0.01
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *args: Any) -> None:
        self.time.now_s += 1.0


@WARNINGS
def test_real_work_is_part_of_the_emulated_time(tmp_path: Path) -> None:
    time = Time()
    callback = ThrottleCallback(CHANGING, throttle=time.throttle, backward_per_forward=3.0)
    fit(tmp_path, [callback], Working(time))
    assert time.sleeps == pytest.approx([expected - 0.04 for expected in EXPECTED])


@WARNINGS
def test_stretched_work_counts_the_backward_pass(tmp_path: Path) -> None:
    time = Time()
    fit(tmp_path, [ThrottleCallback(Scenario(speeds=[0.5]), throttle=time.throttle)], Working(time), max_epochs=1)
    # taken for two forward passes at first; 3, as was measured, from then on, with what was missing
    assert time.sleeps == pytest.approx([0.03, 0.05, 0.04])


@WARNINGS
def test_what_a_wrapper_waits_for_in_forward_is_no_work(tmp_path: Path) -> None:
    time = Time()

    class Waiting(torch.nn.Module):
        """As DDP, which broadcasts buffers before the module's forward."""

        def __init__(self, module: LightningModule) -> None:
            super().__init__()
            self.module = module

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            time.now_s += 7.0
            return self.module(*args, **kwargs)

    class Wrapped(SingleDeviceStrategy):
        def setup(self, trainer: Trainer) -> None:
            super().setup(trainer)
            self.model = Waiting(trainer.lightning_module)

    callback = ThrottleCallback(CHANGING, throttle=time.throttle, backward_per_forward=3.0)
    model = Working(time)
    fit(tmp_path, [callback], model, strategy=Wrapped("cpu"))
    assert time.sleeps == pytest.approx([expected - 0.04 for expected in EXPECTED])
    assert not model._forward_pre_hooks and not model.layer.weight._post_accumulate_grad_hooks


class Counting(Reporting, SingleDeviceStrategy):
    """A strategy that says what it trains on."""

    samples: int | None = None

    def current_samples(self) -> int | None:
        return self.samples


@WARNINGS
def test_who_counts_the_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    time, scenario = Time(), Scenario(sample_s=1.0)

    def counted(**more: Any) -> list[float]:
        time.sleeps.clear()
        callback = ThrottleCallback(scenario, throttle=time.throttle, **more)
        fit(tmp_path, [callback], max_epochs=1, strategy=Counting("cpu"))
        return time.sleeps

    assert counted(samples=lambda batch: 2 * len(batch[0])) == [8.0, 8.0, 4.0]
    assert counted() == [4.0, 4.0, 2.0]
    monkeypatch.setattr(Counting, "samples", 0)
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
    scenario = Scenario(sample_s=0.01, step_s=0.1).raise_at(rank=0, at_step=4)
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
