"""The stale engine's own paths on a device: what is in the slot at a push, what is noticed without waiting for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_hetero.stale.runtime.layout import FINITE, NONFINITE
from tests.ranks.exact_models import Manual
from tests.ranks.kit import Toy
from tests.ranks.stale.note import backward, now, same, start
from tests.simgpu import kit
from tests.simgpu.harness import run_sim_ranks


def _pushes(rank: int, world: int) -> None:
    model, link, worker = start(device="cuda")
    norm: Any = model[1]
    last: Any = model[2]

    def again(change: Callable[[], Any], scale: float = 1.0) -> list[int]:
        worker.claim(0, 0)
        worker.pull()
        backward(model, scale)
        change()
        expected = now(model)
        worker.push(steps=1)
        assert same(link.pushes[-1]["gradients"], expected)
        link.version += 1
        return link.layout.flags_of(link.gradient)[0].tolist()

    def gradient() -> Tensor:
        found = last.weight.grad
        assert found is not None
        return found

    def scale_all() -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.data.mul_(0.25)

    assert again(lambda: None) == [FINITE] * 6
    assert link.pushes[-1]["ready"], "a bucket travels while backward runs"
    mean = norm.running_mean.cpu().clone()
    assert torch.equal(link.pushes[-1]["buffers"][0], mean) and int(link.pushes[-1]["buffers"][2]) == 1
    again(lambda: gradient().mul_(0.5))
    again(lambda: backward(model))  # a second backward pass
    again(lambda: setattr(last.weight, "grad", None))
    again(scale_all, scale=1024.0)  # no version is counted
    flags = again(lambda: gradient().fill_(math.inf))
    assert flags == [FINITE] * 4 + [NONFINITE, FINITE]
    worker.detach()


def test_what_a_device_has_at_the_push_is_in_the_slot() -> None:
    run_sim_ranks(1, _pushes)


class _Changes(kit.Sgd):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 3:
            next(self.parameters()).data.add_(1.0)  # no version is counted


def _refused(rank: int, world: int) -> str:
    trainer = kit.trainer_on_gpus(world, kit.strategy_of("stale", policy="bsp"))
    with pytest.raises(RuntimeError) as caught:
        kit.fit_quietly(trainer, _Changes(), kit.loader(world))
    return str(caught.value)


def test_a_change_that_nobody_counts_is_refused_where_the_host_waits_next() -> None:
    for text in run_sim_ranks(2, _refused):
        assert "changed on rank" in text and "behind an optimizer's step" in text and "strategy=" in text


class _Manual(Manual, kit.Sgd):
    pass


_KINDS: dict[str, tuple[type[Toy], dict[str, Any], float]] = {
    "manual": (_Manual, {"policy": "bsp"}, 1e-6),
    "pairs": (kit.Sgd, {"policy": "bsp", "transport": "pairs"}, 1e-6),
    "micro-batches": (kit.Sgd, {"policy": "saps"}, 0.2),
    "flexible": (kit.Sgd, {"compression": "bf16"}, 0.2),
}


def _trained(rank: int, world: int, kind: str) -> Any:
    kind_of, options, _ = _KINDS[kind]
    module = kind_of()
    trainer = kit.trainer_on_gpus(world, kit.strategy_of("stale", **options))
    kit.fit_quietly(trainer, module, kit.loader(world))
    assert trainer.global_step == kit.STEPS
    return kit.host_weights(module)


@pytest.mark.parametrize("kind", ["manual", *(pytest.param(kind, marks=pytest.mark.long) for kind in list(_KINDS)[1:])])
def test_other_ways_to_train(kind: str) -> None:
    module, _, tolerance = _KINDS[kind]
    one, two = run_sim_ranks(2, _trained, kind)
    assert one.distance(two) == 0.0
    assert one.distance(kit.oracle(module())) <= tolerance
