"""How long a rank's own computations take (layer T)."""

from __future__ import annotations

import torch

from lightning_hetero.measure.device import Stamp, device_of
from lightning_hetero.pipeline.decide.schedule import Kind


class BusyTime:
    """Adds up what a rank's computations took; the stage runner's `Pace`.

    That is what they took on the device, between two stamps: of one that is asynchronous the host only starts them.

    Args:
        device: of this rank's layers.
    """

    def __init__(self, device: torch.device = torch.device("cpu")) -> None:  # noqa: B008
        self._device = device_of(device)
        self._busy_s = 0.0
        self._in_step = False
        self._began: Stamp | None = None
        self._spans: list[tuple[Stamp, Stamp]] = []  # of which nobody has waited for the second

    @property
    def busy_s(self) -> float:
        """In this training step, so far; waits for what runs on the device [s]."""
        if self._spans:
            self._spans[-1][1].wait()  # the others are before it
        self._busy_s += sum(began.seconds_until(ended) for began, ended in self._spans)
        self._spans.clear()
        return self._busy_s

    def begin(self, step: int) -> None:
        """Starts a training step, at 0."""
        self._busy_s, self._in_step = 0.0, True
        self._spans.clear()

    def end(self) -> None:
        """Ends the training step."""
        self._in_step = False

    def began(self) -> None:
        """A computation begins."""
        if self._device.asynchronous and self._in_step:
            self._began = self._device.stamp(timing=True)

    def computed(self, kind: Kind, stage: int, samples: int, elapsed_s: float) -> None:
        """Takes note of a computation."""
        if self._began is not None:
            began, self._began = self._began, None
            self._spans.append((began, self._device.stamp(timing=True)))
        else:
            self._busy_s += elapsed_s
