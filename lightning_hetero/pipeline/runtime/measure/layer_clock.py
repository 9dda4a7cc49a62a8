"""What each layer of a stage takes while it trains, forward and backward (layer T).

Two stamps per layer and pass: when its output is there, and when the gradient of that is. What lies between two stamps
is one layer's.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from lightning_hetero.measure.device import Stamp, device_of
from lightning_hetero.measure.step_clock import needing_gradient

_Span = tuple[Stamp, Stamp]


class LayerClock:
    """Times the layers of one stage; one pass at a time.

    Args:
        layers: numbers of the stage's layers, in order.
        device: where they are.
    """

    def __init__(self, layers: Iterable[int], device: torch.device) -> None:
        self._now = partial(device_of(device).stamp, timing=True)
        self._forward: dict[int, list[_Span]] = {index: [] for index in layers}
        self._backward: dict[int, list[_Span]] = {index: [] for index in self._forward}
        self._since = self._now()
        self._at: int | None = None  # the layer whose backward pass runs

    def begins(self, inputs: Any = ()) -> None:
        """A forward pass begins.

        Args:
            inputs: what the first layer is called with, where the backward pass goes on to what computed them.
        """
        tensor = next(needing_gradient(inputs), None)
        if tensor is not None and not tensor.is_leaf:
            tensor.register_hook(lambda _: self.is_back())
        self._since = self._now()

    def returned(self, index: int, output: Any) -> None:
        """A layer has returned its output; its gradient is waited for."""
        self._forward[index].append((self._since, self._now()))
        tensor = next(needing_gradient(output), None)
        if tensor is not None:
            tensor.register_hook(partial(self._back, index))
        self._since = self._now()

    def goes_back(self) -> None:
        """A backward pass begins."""
        self._at, self._since = None, self._now()

    def _back(self, index: int, _: Tensor) -> None:
        now = self._now()
        self._spent(now)
        self._at, self._since = index, now

    def is_back(self) -> None:
        """It has ended, or has left the layers."""
        self._spent(self._now())
        self._at = None

    def _spent(self, now: Stamp) -> None:
        if self._at is not None:
            self._backward[self._at].append((self._since, now))

    def take(self) -> list[float]:
        """Returns what all passes since it was last asked took, by layer [s]; empty if there were none.

        The median of the passes, times their number: one hiccup says nothing of a layer. Waits for the device's work.
        """
        found = [_total(self._forward[index]) + _total(self._backward[index]) for index in self._forward]
        for spans in (*self._forward.values(), *self._backward.values()):
            spans.clear()
        return found if all(seconds > 0.0 for seconds in found) else []


def _total(spans: list[_Span]) -> float:
    if not spans:
        return 0.0
    spans[-1][1].wait()  # the others are before it
    return median([start.seconds_until(end) for start, end in spans]) * len(spans)
