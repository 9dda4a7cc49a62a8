"""What the user's code changed of the model where all ranks met, between two epochs: the same for all (layer L).

    trained parameters                  all ranks alike: the server starts again with them; else refused
    buffers                             the lowest rank's count, as under DDP
    parameters that no optimizer has    stay on their rank, so all must have changed them alike, also within the epoch
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_hetero.stale.runtime.work.watch import Numbers

__all__ = ["SEES_NOT_ALL", "Changed", "refuse_different"]

SEES_NOT_ALL = (
    "Under hetero_stale a batch may go on without a rank, or come to it in several chunks, so a moving average or a"
    " copy of parameters that each rank makes for itself becomes another one. Make it in on_train_epoch_end, or use"
    " policy='bsp', which has all ranks see every update, or strategy='hetero_balanced'"
)
_ROUNDED = 64  # times, in different ways: devices may be of several kinds


@dataclass(frozen=True, slots=True)
class Changed:
    """What has changed on a rank.

    Attributes:
        trained: some numbers of each changed parameter that an optimizer has, by name.
        others: the same of those that none has.
        buffers: names of changed buffers.
        new: names of parameters and buffers that the module did not have, or that are others now.
    """

    trained: Mapping[str, Numbers]
    others: Mapping[str, Numbers]
    buffers: tuple[str, ...]
    new: tuple[str, ...]

    @property
    def any(self) -> bool:
        """Whether there is a change."""
        return bool(self.trained or self.others or self.buffers or self.new)


def refuse_different(ranks: Sequence[int], everyone: Sequence[Changed]) -> None:
    """Refuses parameters that ranks have changed in different ways.

    Raises:
        RuntimeError: with name, ranks, reason and ways out; on all ranks alike.
    """
    for rank, own in zip(ranks[1:], everyone[1:], strict=True):
        name = _different(everyone[0].trained, own.trained)
        if name := name or next(iter({*everyone[0].new} ^ {*own.new}), None):
            raise RuntimeError(
                f"{name} was changed other than by an optimizer where the ranks met, and not alike on ranks {ranks[0]}"
                f" and {rank}. Under hetero_stale there is one {name}, in the parameter server: change it on all ranks"
                " alike, e.g. not under is_global_zero, nor with random numbers of each rank's own"
            )
        if name := _different(everyone[0].others, own.others):
            raise RuntimeError(
                f"{name} has no optimizer, was changed by your code, and has other values on ranks {ranks[0]} and"
                f" {rank} now. {SEES_NOT_ALL}"
            )


def _different(some: Mapping[str, Numbers], others: Mapping[str, Numbers]) -> str | None:
    """Returns the first name whose numbers are not alike."""
    for name in sorted({*some, *others}):
        if name not in some or name not in others:
            return name
        eps, values = some[name]
        within = _ROUNDED * eps * max(map(abs, values), default=0.0)
        pairs = zip(values, others[name].values, strict=True)
        if not all(math.isclose(a, b, rel_tol=0.0, abs_tol=within) or (a != a and b != b) for a, b in pairs):
            return name
    return None
