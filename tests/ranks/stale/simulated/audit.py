"""Books of what was pushed and what was applied, read from the published parameters themselves; see `ranks`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from lightning_hetero.stale.runtime.layout import FlatLayout
from tests.ranks.stale.simulated.cases import Case

_MOST = 5  # violations of one run that are worth reading


@dataclass(frozen=True, slots=True)
class _Push:
    rank: int
    epoch: int
    positions: frozenset[int]
    substep: int
    base: int


class Audit:
    """See the module.

    Args:
        case: the run.
        bound: no contribution may be older [versions]; None: no such promise.
        columns: of the ledger: (epoch, position) of each.

    Attributes:
        violations: in words.
        applied, stale: contributions of samples that were applied, and those of them that were older than the newest.
    """

    def __init__(self, case: Case, bound: int | None, columns: Sequence[tuple[int, int]]) -> None:
        self.violations: list[str] = []
        self.applied = self.stale = 0
        self._case, self._bound, self._columns = case, bound, columns
        self._rows = max(1, case.substeps)
        self._pushes: list[_Push] = []
        self._before = np.zeros((2 * self._rows, len(columns)))
        self._version = 0
        self._global_steps: dict[tuple[int, int], int] = {}

    def violated(self, text: str) -> None:
        """A promise is broken."""
        if len(self.violations) < _MOST:
            self.violations.append(text)

    # ---- what ranks say ---------------------------------------------------------------------------------------

    def pushes(self, rank: int, epoch: int, positions: Sequence[int], substep: int, base: int) -> int:
        """A rank is about to push; returns the push's number, from 1."""
        self._pushes.append(_Push(rank, epoch, frozenset(positions), substep, base))
        return len(self._pushes)

    def pulled(self, rank: int, granted: int, version: int) -> None:
        """A rank has pulled parameters for a grant."""
        if version < granted:
            self.violated(f"rank {rank} was granted version {granted} and found {version} published")

    def passed(self, rank: int, epoch: int, global_step: int) -> None:
        """A global step is over for a rank."""
        before = self._global_steps.get((rank, epoch), -1)
        if global_step != before + 1:
            self.violated(f"rank {rank} went from global step {before} to {global_step} in epoch {epoch}")
        self._global_steps[rank, epoch] = global_step

    # ---- what the server publishes ----------------------------------------------------------------------------

    def published(self, version: int, area: Tensor, layout: FlatLayout) -> None:
        """Compares a version with the one before."""
        now = layout.views(area)[0].numpy()
        change = now - self._before
        for row, column in zip(*np.nonzero(change[0::2]), strict=True):
            self._applied(version, int(row), int(column), float(change[2 * row, column]), now, change)
        self._before = now.copy()
        self._version = version

    def _applied(self, version: int, row: int, column: int, count: float, now: np.ndarray, change: np.ndarray) -> None:
        epoch, position = self._columns[column]
        sample = f"sample {position} of epoch {epoch}" + (f", step {row}" if self._case.substeps else "")
        number = change[2 * row + 1, column]
        if abs(count - 1.0) > 1e-6 or abs(now[2 * row, column] - 1.0) > 1e-6:
            self.violated(f"version {version} applied {sample} {count:g} times, {now[2 * row, column]:g} in all")
            return
        which = round(float(number)) - 1
        push = self._pushes[which] if 0 <= which < len(self._pushes) else None
        if push is None or (push.epoch, push.substep) != (epoch, row) or position not in push.positions:
            self.violated(f"version {version} applied {sample} from push {number:g}, which had other samples: {push}")
            return
        staleness = self._version - push.base
        self.applied += 1
        self.stale += staleness > 0
        if self._bound is not None and staleness > self._bound:
            self.violated(
                f"version {version} applied {sample} from rank {push.rank}, computed with version {push.base}: that is"
                f" {staleness} old, the bound is {self._bound}"
            )

    def complete(self) -> None:
        """Training has ended well: every sample must be in."""
        missing = np.argwhere(self._before[0::2] == 0.0)
        if len(missing):
            some = (self._columns[column] for _, column in missing[:5])
            words = ", ".join(f"{position} of epoch {epoch}" for epoch, position in some)
            self.violated(f"{len(missing)} samples were never applied: {words}")
