"""An emulated device for a loop by hand: as `ThrottleCallback`, at the same places."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from benchmarks.peers.cases import SPELL_STEP_S, Cluster
from lightning_hetero.emulate.throttle import Throttle, scenario_steps


class Device:
    """Lets forward and backward of each batch take the scenario's time, real work included.

    Args:
        net: what computes, without a wrapper that waits for peers.
        cluster: whose device this is.
        seed: of spells.
        rank: of the device.
    """

    def __init__(self, net: nn.Module, cluster: Cluster, seed: int, rank: int) -> None:
        self._throttle = throttle = Throttle(cluster.scenario(seed), rank)
        self._step = scenario_steps(SPELL_STEP_S if cluster.spells else None)
        net.register_forward_pre_hook(lambda *_: throttle.begin_work())
        for parameter in net.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: throttle.gradient_came())

    @contextmanager
    def batch(self, batches: int, samples: int) -> Iterator[None]:
        """A batch is trained, the optimizer's step included, after so many before."""
        self._throttle.begin(self._step(batches), samples)
        yield
        self._throttle.end()

    @contextmanager
    def backward(self, loss: Tensor) -> Iterator[None]:
        """The backward pass."""
        self._throttle.before_backward()
        loss.register_hook(lambda _: self._throttle.backward_began())
        yield
        self._throttle.after_backward()

    def taken(self) -> float:
        """What work took, as part of what it was to take."""
        return self._throttle.pacer.taken_s / self._throttle.pacer.wanted_s
