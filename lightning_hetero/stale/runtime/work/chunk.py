"""One grant on its way through a rank: its samples, its micro-batches, what the computed part counts (layer T)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_hetero.measure.device import Stamp
from lightning_hetero.stale.decide.intervals import pairs, pieces, size
from lightning_hetero.transport.base import Reply


class Chunk:
    """What a rank is training on, from the grant to the last push.

    Args:
        grant: the server's; None: a global step that went by, for which user code runs on a dummy batch.
        wait_s: how long it was waited for [s].
        top_up: it is not the first in its global step.

    Attributes:
        spans, samples: all that is granted; 0 samples: a dummy batch, which counts nothing.
        pieces: the micro-batches it is computed in; one, if the grant does not ask for more.
        piece: the one that is computed.
        computed: samples of those that are, or were, computed.
        weight: what they count in the mean over the update.
        substep: pushes so far.
        started: when this rank had parameters and began to fetch samples; None for a global step that went by.
    """

    def __init__(
        self, grant: Reply | None, *, started: Stamp | None = None, wait_s: float = 0.0, top_up: bool = False
    ) -> None:
        self.grant = grant
        self.wait_s = wait_s
        self.top_up = top_up
        self.spans = () if grant is None else pairs(grant.numbers)
        self.samples = size(self.spans)
        self.pieces = pieces(self.spans, 0 if grant is None else grant.micro)
        self.piece = self.pieces[0]
        self.computed = size(self.piece)
        self.weight = 1.0
        self.substep = 0
        self.started = started

    @property
    def piece_samples(self) -> int:
        """Samples of the piece that is computed."""
        return size(self.piece)


def combine_means_(
    parameters: Sequence[Parameter], before: Sequence[Tensor | None], old_part: float, new_part: float
) -> None:
    """Replaces each gradient by ``old_part`` of ``before`` plus ``new_part`` of itself.

    None stays None where both are; a part that counts nothing may be NaN and is left out.
    """
    for parameter, old in zip(parameters, before, strict=True):
        new = parameter.grad
        parts = [g * part for g, part in ((old, old_part), (new, new_part)) if g is not None and part]
        if parts:
            parameter.grad = sum(parts[1:], parts[0])
        elif old is not None or new is not None:
            parameter.grad = torch.zeros_like(parameter)
