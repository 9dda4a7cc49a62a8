"""Where an epoch stands: its tick, its samples, and what has arrived since the last update (layer P)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lightning_hetero.stale.decide.effects import Accepted, Span
from lightning_hetero.stale.decide.intervals import IntervalSet
from lightning_hetero.stale.decide.ledger import Ledger
from lightning_hetero.stale.decide.policy import Pool


class Epoch:
    """The books of one epoch.

    Args:
        number: of the epoch; -1: none has begun.
        ends: cumulative samples behind each of its ticks, strictly increasing.
        applied: samples that are applied already, when it is resumed at ``tick``.
        tick: first tick.
        now: time [s].

    Attributes:
        ledger: which samples are free, leased, arrived.
        tick, began_s: the present tick, and since when.
        opening: the first tick.
        witnessed: a worker that is in this tick has contributed to it.

    Raises:
        ValueError: ``ends`` or ``applied`` make no epoch, or too few samples are left for the remaining ticks.
    """

    def __init__(
        self, number: int, ends: Sequence[int], *, applied: Iterable[Span] = (), tick: int = 0, now: float = 0.0
    ) -> None:
        self.ledger = Ledger(ends, applied=applied)
        self.number = number
        self.ends = self.ledger.ends
        if type(tick) is not int or not 0 <= tick <= len(self.ends):
            raise ValueError(f"tick={tick!r} must be a whole number in 0 to {len(self.ends)}")
        if self.ledger.free < len(self.ends) - tick:
            raise ValueError(
                f"{self.ledger.free} samples are left for {len(self.ends) - tick} ticks, which need one each:"
                f" applied and tick={tick} do not belong to these ends"
            )
        if tick == len(self.ends) and self.ledger.free:
            raise ValueError(f"tick={tick} says the epoch is over, but {self.ledger.free} samples are not applied")
        self.tick = self.opening = tick
        self.began_s = now
        self.witnessed = False
        self._contributions: list[Accepted] = []
        self._pooled: list[Span] = []
        self._pushes = 0

    @property
    def over(self) -> bool:
        """Whether all ticks are over."""
        return self.tick >= len(self.ends)

    def size(self, tick: int) -> int:
        """Returns the samples of a batch."""
        start, end = self.ledger.bounds(tick)
        return end - start

    @property
    def batch(self) -> int:
        """Samples of the present batch; of the last one when the epoch is over."""
        return self.size(min(self.tick, len(self.ends) - 1))

    @property
    def need(self) -> int:
        """Samples still to arrive before the present batch is complete; <= 0: none."""
        return self.ends[self.tick] - self.ledger.arrived

    @property
    def room(self) -> int:
        """Samples that may be leased: one per later tick stays, so that each can have an update."""
        return self.ledger.free - (len(self.ends) - 1 - self.tick)

    def arrive(self, spans: Sequence[Span], contribution: Accepted | None, *, in_tick: bool) -> None:
        """Puts computed samples into the pool; without a contribution they are used up (not finite)."""
        self.ledger.arrive(spans)
        self._pooled += spans
        self._pushes += 1
        self.witnessed = self.witnessed or in_tick
        if contribution is not None:
            self._contributions.append(contribution)

    def pool(self, workers: int) -> Pool:
        """Returns what has arrived since the last update, for the policy."""
        return Pool(
            contributions=len(self._contributions),
            pushes=self._pushes,
            samples=sum(c.samples for c in self._contributions),
            batch=self.batch,
            missing=self.need,
            witnessed=self.witnessed,
            workers=workers,
            slices=self.ledger.owners(self.tick),
            last=self.tick == len(self.ends) - 1,
        )

    def empty(self) -> tuple[Accepted, ...]:
        """Empties the pool; returns what was in it."""
        contributions = tuple(self._contributions)
        self._contributions.clear()
        self._pooled.clear()
        self._pushes = 0
        return contributions

    def advance(self, now: float) -> None:
        """The tick is over."""
        self.tick += 1
        self.began_s = now
        self.witnessed = False

    def applied(self) -> list[list[int]]:
        """Returns the samples in applied updates as ``[start, end]``; what is only pooled is left out."""
        applied = IntervalSet(self.ledger.arrived_spans())
        for start, end in self._pooled:
            applied.remove(start, end)
        return [list(span) for span in applied]


def check_update(ends_step: bool, pool: Pool, policy: str) -> None:
    """Refuses an update that would break a rule.

    Raises:
        RuntimeError: naming the policy.
    """
    if ends_step and not pool.witnessed:
        raise RuntimeError(
            f"{policy}.update ended a global step to which no worker in it contributed: see pool.witnessed"
        )
    if ends_step and pool.last and pool.missing > 0:
        raise RuntimeError(f"{policy}.update carries samples over the end of the epoch: see pool.last: {pool}")
    if pool.complete and not ends_step:
        raise RuntimeError(f"{policy}.update must end the global step once pool.complete: {pool}")
    if not pool.pushes and not ends_step:
        raise RuntimeError(f"{policy}.update made an update of an empty pool: {pool}")
