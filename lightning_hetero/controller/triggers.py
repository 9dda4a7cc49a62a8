"""When to look at the structure, and how long the present state should last (layer P)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lightning_hetero.controller.estimates import Estimates, State
from lightning_hetero.controller.settings import ControllerSettings
from lightning_hetero.controller.spending import Spending

_QUEUE_STEP, _QUEUE_EVERY = 0.1, 5  # of V: a change of a queue's weight that is worth a look; so many batches apart
_LOOK_EVERY = 50  # batches, without a change
_LEAST_LIFE, _LIFE, _MOST_LIFE = 20.0, 80.0, 400.0  # batches that a state is taken to last


class Look(NamedTuple):
    """Why to look at the structure, empty if there is no reason, and at which ranks first."""

    reason: str
    ranks: tuple[int, ...] = ()


class Triggers:
    """Tells when something has changed since the structure was looked at.

    Args:
        settings: the dead band.
        state: of the devices when the run begins.

    Attributes:
        at: the batch after which the structure was looked at last.
    """

    def __init__(self, settings: ControllerSettings, state: State) -> None:
        self._settings, self._state = settings, state
        self.at = self._changed_at = 0
        self._weights: Mapping[str, float] = {}
        self._lives: deque[float] = deque(maxlen=8)

    def look(self, batch: int, state: State, estimates: Estimates, spending: Spending, told: Sequence[str]) -> Look:
        """Returns whether to look at the structure after this batch.

        Args:
            batch: its number.
            state: of the devices by now.
            estimates: that it was read from.
            spending: of the run.
            told: what else has happened, in words.
        """
        changes = estimates.changes(self._state, self._settings.dead_band)
        words = [text for _, text, _ in changes[:2]] + list(told)
        weights = {weight.budget.name: weight.queue for weight in spending.weights}
        if batch - self.at >= _QUEUE_EVERY:
            step = _QUEUE_STEP * spending.v
            moved = [name for name, weight in weights.items() if abs(weight - self._weights.get(name, 0.0)) > step]
            words += [f"queue of {name} at {spending.queues[name]:.3g}" for name in moved]
        if changes:
            self._lives.append(float(batch - self._changed_at))
            self._changed_at = batch
        if not words and batch - self.at >= _LOOK_EVERY:
            words = [f"{_LOOK_EVERY} batches since the last look"]
        if not words:
            return Look("")
        self._state, self.at, self._weights = state, batch, weights
        return Look("; ".join(words), tuple(dict.fromkeys(rank for _, _, ranks in changes for rank in ranks)))

    def life(self, batch: int) -> float:
        """Returns how many batches the present state should last: as past ones did, or as long as it has already."""
        mean = sum(self._lives) / len(self._lives) if self._lives else _LIFE
        return min(max(mean, float(batch - self._changed_at), _LEAST_LIFE), _MOST_LIFE)
