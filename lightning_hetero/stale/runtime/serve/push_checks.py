"""Looks at pushes before they count: is the message possible, is the slot whole, are the gradients finite (layer T)."""

from __future__ import annotations

import math

from torch import Tensor

from lightning_hetero.stale.decide.report import Counts
from lightning_hetero.stale.runtime.serve.agreement import LiveWorkers
from lightning_hetero.stale.runtime.serve.update import Updater, bits
from lightning_hetero.transport.base import Listener, Request, TornSlotError
from lightning_hetero.transport.flags import PushFlag


class NonFiniteError(ArithmeticError):
    """A gradient has NaN or Inf, and the rule is to stop; the message names worker, place and parameter."""


class PushChecks:
    """See the module.

    Args:
        listener: has the slots.
        updater: knows optimizers and parameters.
        live_workers: who is told of what is left out.
        counts: where that is counted.
        stop: a gradient with NaN or Inf ends the run; else its samples are left out.
    """

    def __init__(
        self, listener: Listener, updater: Updater, live_workers: LiveWorkers, counts: Counts, *, stop: bool = True
    ) -> None:
        self._listener, self._updater, self._live_workers, self._counts = listener, updater, live_workers, counts
        self._stop = stop

    def check(self, push: Request) -> None:
        """Raises ValueError for a push that no worker can mean."""
        optimizers = len(self._updater.optimizers)
        if (push.steps | push.zeroes) >> optimizers:
            raise ValueError(f"optimizers {list(bits(push.steps | push.zeroes))} of {optimizers}")
        if not (math.isfinite(push.weight) and push.weight >= 0.0):
            raise ValueError(f"weight={push.weight!r} must be a finite number >= 0")
        if push.samples < 1:
            raise ValueError(f"samples={push.samples} must be at least 1; a dummy batch is not pushed")

    def slot(self, rank: int, push: Request) -> Tensor | None:
        """Returns the slot a push speaks of; None, and its worker is told, if that is not whole."""
        try:
            return self._listener.gradient(rank, push.slot)
        except TornSlotError as error:
            self._live_workers.notify(
                f"a push of worker {rank} was not whole and is discarded: {error}", only=rank
            )
            self._counts.discarded["torn"] += push.samples
            return None

    def finite(self, rank: int, push: Request, slot: Tensor) -> bool:
        """Returns whether the gradients are finite; if not, everybody is told.

        Raises:
            NonFiniteError: they are not, and the rule is to stop.
        """
        name = None if push.flags & PushFlag.OVERFLOW else self._updater.nonfinite(slot)
        if name is None:
            return True
        where = f"worker {rank} has a gradient with NaN or Inf in epoch {push.epoch}, batch {push.tick}: {name!r}"
        if self._stop:
            raise NonFiniteError(
                f"{where} is the first such parameter. Pass nonfinite='skip' to leave such batches out"
            )
        self._live_workers.notify(f"{where}; its {push.samples} samples are left out")
        return False
