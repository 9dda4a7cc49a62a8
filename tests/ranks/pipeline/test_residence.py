"""Planning takes a device's memory for one layer at a time: a model larger than it is planned without help.

The device is the CPU under the name ``cpu:0``, which no tensor has: so everything that would go to a device is copied,
through the one function that does it, and counted here.
"""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_hetero.measure import timer
from lightning_hetero.measure.device import HostDevice, Stamp
from lightning_hetero.pipeline.fit import rehearsal as rehearsing
from lightning_hetero.pipeline.fit.rehearsal import Rehearsal, measure_model
from lightning_hetero.pipeline.runtime.measure import memory
from lightning_hetero.pipeline.runtime.step.backbone import find_backbone
from lightning_hetero.pipeline.runtime.step.undivided import find_layers, undivided
from tests.ranks.kit import FEATURES, quiet_trainer, regression
from tests.ranks.pipeline.kit import WIDTH, Deep, pipeline

LAYER_BYTES = 8 * (64 * 64 + 64 + 2 * 64)  # of one layer and its buffers; float64


class Wide(Deep):
    """Ten layers that are all of one size; what is outside of them is small."""

    most_rows = 10**9

    def backbone(self) -> nn.Module:
        class Layer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(64, 64)
                self.register_buffer("seen", torch.zeros(128))

            def forward(self, x: Tensor) -> Tensor:
                if len(x) > Wide.most_rows:
                    raise torch.OutOfMemoryError("so many rows do not fit")
                self.seen += 1.0
                return x + self.linear(x).tanh()

        return nn.Sequential(*(Layer() for _ in range(10)))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        h = F.pad(self.before(x), (0, 64 - WIDTH))
        return F.mse_loss(self.head(self.model(h)[:, :WIDTH]), y)


class CountedDevice:
    """Counts what is on it.

    Attributes:
        cap_bytes: of its memory.
        peak_bytes: most that was on it.
    """

    def __init__(self) -> None:
        self.cap_bytes = float("inf")
        self.now_bytes = self.peak_bytes = 0
        self._here: set[int] = set()

    def copied_to(self, tensor: Tensor, device: torch.device) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_meta or storage.data_ptr() in self._here:
            return tensor.detach()
        if self.now_bytes + storage.nbytes() > self.cap_bytes:
            raise torch.OutOfMemoryError("the device is full")
        copy = tensor.detach().clone()
        at, size = copy.untyped_storage().data_ptr(), copy.untyped_storage().nbytes()
        self._here.add(at)
        self.now_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        weakref.finalize(copy.untyped_storage(), self._freed, at, size)
        return copy

    def _freed(self, at: int, size: int) -> None:
        self._here.discard(at)
        self.now_bytes -= size


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[CountedDevice]:
    found = CountedDevice()
    monkeypatch.setattr(memory, "copied_to", found.copied_to)
    yield found
    gc.collect()  # tracebacks of errors, where there were some
    assert found.now_bytes == 0  # all of it is given back


def rehearsal(module: Deep, *, named: bool = True) -> Rehearsal:
    trainer = quiet_trainer(devices=1, max_epochs=1)
    trainer.strategy.connect(module)
    module.trainer = trainer
    return Rehearsal(
        module=module,
        backbone=find_backbone(module, "model") if named else find_layers(module, None),
        found=not named,
        device=torch.device("cpu", 0),
        loader=DataLoader(regression(32), batch_size=16),
        optimizers=[torch.optim.Adam(module.parameters())],
        to_device=lambda batch: batch,
        context=nullcontext,
    )


def measured(module: Deep, *, named: bool = True, **options: Any) -> Any:
    defaults = {"micro_batch_size": None, "checkpoint_layers": False}
    return measure_model(rehearsal(module, named=named), **{**defaults, **options})


def test_one_layer_at_a_time_is_on_the_device(device: CountedDevice) -> None:
    module = Wide()
    outside = 8 * (FEATURES * WIDTH + WIDTH + WIDTH + 1)
    whole = sum(t.nbytes for t in (*module.parameters(), *module.buffers()))
    assert whole > 9 * LAYER_BYTES
    device.cap_bytes = 2 * LAYER_BYTES
    before = {name: (id(t), t.data_ptr()) for name, t in (*module.named_parameters(), *module.named_buffers())}
    model, calls, *_ = measured(module)
    assert calls == 1 and len(model.layers) == 10
    assert outside + LAYER_BYTES <= device.peak_bytes <= outside + 1.01 * LAYER_BYTES
    now = {name: (id(t), t.data_ptr()) for name, t in (*module.named_parameters(), *module.named_buffers())}
    assert now == before and not any(b.any() for b in module.buffers())


def test_fewer_samples_are_tried_where_so_many_do_not_fit(
    device: CountedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Wide, "most_rows", 5)
    model, *_ = measured(Wide())
    assert model.layers[0].output_bytes == 64 * 8  # of 4 samples
    monkeypatch.setattr(Wide, "most_rows", 1)
    with pytest.raises(torch.OutOfMemoryError, match="with one layer at a time and 2 samples, does not fit cpu:0"):
        measured(Wide())
    with pytest.raises(torch.OutOfMemoryError, match=r"and 8 samples, does not fit.*micro_batch_size="):
        measured(Wide(), micro_batch_size=8)


def test_what_fits_nowhere_is_told_with_a_way_out(device: CountedDevice) -> None:
    device.cap_bytes = LAYER_BYTES / 2
    with pytest.raises(torch.OutOfMemoryError, match=re.escape("pass profile= with costs measured")):
        measured(Wide())
    module = Wide()
    module.tower = module.model
    del module.model
    module.loss = lambda batch: F.mse_loss(module.tower(F.pad(batch[0], (0, 64 - FEATURES)))[:, :1], batch[1])
    with pytest.raises(torch.OutOfMemoryError, match=r"the whole model with 2 samples does not fit.*backbone='tower'"):
        measured(module, named=False)
    device.cap_bytes = 20 * LAYER_BYTES
    model, calls, *_ = measured(module, named=False)
    assert calls == 1 and [layer.name for layer in model.layers] == ["Wide"]
    trained = sum(p.nbytes for p in module.parameters())
    assert model.layers[0].param_bytes == trained
    assert model.layers[0].state_bytes == 4 * trained + sum(b.nbytes for b in module.buffers())
    assert model.layers[0].activation_bytes > 10 * 64 * 8


def test_a_series_of_whole_steps_has_the_module_on_the_device(device: CountedDevice) -> None:
    module = Wide()
    whole = sum(t.nbytes for t in (*module.parameters(), *module.buffers()))
    before = {name: (id(t), t.data_ptr()) for name, t in (*module.named_parameters(), *module.named_buffers())}
    step = replace(rehearsal(module), backbone=undivided(module, "as a whole"))
    found = measure_model(step, micro_batch_size=None, checkpoint_layers=False, repeats=(2, 8))
    assert len(found.series_s) == 8 and len(found.model.layers) == 1
    assert device.peak_bytes >= whole
    now = {name: (id(t), t.data_ptr()) for name, t in (*module.named_parameters(), *module.named_buffers())}
    assert now == before and not any(b.any() for b in module.buffers())


class Planned(Wide):
    """Its optimizer is made from how long the training will be, and moves parameters and a count of its steps."""

    stepped = 0

    def __init__(self, *, looks_ahead: bool) -> None:
        super().__init__()
        self.looks_ahead = looks_ahead

    def configure_optimizers(self) -> Any:
        if self.looks_ahead:
            assert self.trainer.estimated_stepping_batches > 0
        return {"optimizer": Slow(self.parameters(), lr=0.1, weight_decay=0.5)}


class Slow(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        Launched.now_s += 5.0
        return super().step(closure)


@pytest.mark.parametrize(("looks_ahead", "own_s"), [(False, 7.0), (True, 2.0)])
def test_an_updates_own_time_is_reading_and_the_optimizers_step_and_nothing_stays(
    looks_ahead: bool, own_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the optimizer cannot be made yet, one of torch's stands for it, which takes no time by this clock."""

    def collated(samples: Any) -> Any:
        Launched.now_s += 2.0
        return torch.utils.data.default_collate(samples)

    ahead = Ahead(torch.device("cpu"))
    monkeypatch.setattr(ahead, "stamp", lambda **_: Stamp(Launched.now_s))
    monkeypatch.setattr(timer, "device_of", lambda _: ahead)
    monkeypatch.setattr(timer, "_WARM_S", 0.0)
    module = Planned(looks_ahead=looks_ahead)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    step = replace(rehearsal(module), loader=DataLoader(regression(32), batch_size=16, collate_fn=collated))
    assert measure_model(step, micro_batch_size=None, checkpoint_layers=False, own=True).own_s == own_s
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert module.trainer.train_dataloader is None  # nothing of the fit has begun


class Ahead(HostDevice):
    """Runs ahead of nothing, but is taken for a device that does."""

    asynchronous = True


class Launched(Wide):
    """What takes long about it is to be launched, up to so many rows: by the clock, which each step moves on."""

    now_s, enough = 0.0, 200

    def loss(self, batch: Any) -> Tensor:
        Launched.now_s += max(1.0, len(batch[0]) / self.enough)
        return super().loss(batch)


def test_more_samples_are_tried_where_they_seem_to_cost_nothing(
    device: CountedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = Ahead(torch.device("cpu"))
    monkeypatch.setattr(ahead, "stamp", lambda **_: Stamp(Launched.now_s))
    for module in (rehearsing, timer):
        monkeypatch.setattr(module, "device_of", lambda _: ahead)
    monkeypatch.setattr(timer, "_WARM_S", 0.0)
    step = replace(rehearsal(found := Launched()), backbone=undivided(found, "as a whole"))
    model, *_ = measure_model(step, micro_batch_size=None, checkpoint_layers=False)
    # 16 samples, then 64, 256 and 1024; of these 4 and 1024 count, which take 1 s and 5 s.
    (layer,) = model.layers
    assert layer.forward.seconds(4) == pytest.approx(1.0) and layer.forward.seconds(1024) == pytest.approx(5.12)


def test_what_configure_model_builds_is_built_on_the_cpu() -> None:
    strategy = pipeline(None, parallel_devices=[torch.device("meta")])
    numbers = {"local_rank": 0, "global_rank": 0, "world_size": 2}
    asked = {name: lambda self, number=number: number for name, number in numbers.items()}
    strategy.cluster_environment = type("", (), asked)()
    with strategy.tensor_init_context():
        assert nn.Linear(2, 2).weight.device.type == "cpu"
