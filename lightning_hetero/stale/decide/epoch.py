"""Where an epoch stands: its global step, its samples, and what has arrived since the last update (layer P)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lightning_hetero.stale.decide.effects import Accepted, Span
from lightning_hetero.stale.decide.intervals import IntervalSet, size
from lightning_hetero.stale.decide.ledger import Ledger
from lightning_hetero.stale.decide.policy import Apply, Pool
from lightning_hetero.stale.decide.streams import Streams


class Epoch:
    """The books of one epoch.

    Args:
        number: of the epoch; -1: none has begun.
        ends: cumulative samples behind each of its global steps, strictly increasing.
        applied: samples that are applied already, when it is resumed at ``global_step``.
        global_step: the first one.
        now: time [s].
        streams: of the ranks' own, whose samples these are; None: any rank can have any sample.

    Attributes:
        ledger: which samples are free, assigned, arrived.
        streams: as given.
        global_step, began_s: the present one, and since when.
        opening: the first global step.
        witnessed: a worker that is in this global step has contributed to it.

    Raises:
        ValueError: ``ends`` or ``applied`` make no epoch, or too few samples are left for the remaining global steps.
    """

    def __init__(
        self, number: int, ends: Sequence[int], *, applied: Iterable[Span] = (), global_step: int = 0,
        now: float = 0.0, streams: Streams | None = None,
    ) -> None:  # fmt: skip
        self.streams = streams
        self.ledger = Ledger(ends, applied=applied)
        self.number, self.ends = number, self.ledger.ends
        to_come, free = len(self.ends) - global_step, self.ledger.free
        if not 0 <= to_come <= free or (free and not to_come) or global_step < 0:
            raise ValueError(
                f"global_step={global_step} of {len(self.ends)} does not belong to what is applied: {free} samples are"
                " left, and each global step to come needs one"
            )
        self.global_step = self.opening = global_step
        self.began_s = now
        self.witnessed = False
        self._contributions: list[Accepted] = []
        self._pooled: list[tuple[int, Span]] = []  # whose
        self._pushes = 0

    @property
    def over(self) -> bool:
        """Whether all global steps are over."""
        return self.global_step >= len(self.ends)

    def size(self, global_step: int) -> int:
        """Returns the samples of a batch."""
        start, end = self.ledger.bounds(global_step)
        return end - start

    @property
    def batch(self) -> int:
        """Samples of the present batch; of the last one when the epoch is over."""
        return self.size(min(self.global_step, len(self.ends) - 1))

    @property
    def need(self) -> int:
        """Samples still to arrive before the present batch is complete; <= 0: none."""
        return self.ends[self.global_step] - self.ledger.arrived

    @property
    def room(self) -> int:
        """Samples that may be assigned: one per later global step stays, so that each can have an update."""
        return self.ledger.free - (len(self.ends) - 1 - self.global_step)

    def told(self, rank: int, read: int, through: bool) -> None:
        """A rank has read so many samples of its own stream, and that is through or not."""
        assert self.streams is not None
        self.streams.tell(rank, read, through)
        self.ledger.extend(self.streams.grow())

    def arrive(self, rank: int, spans: Sequence[Span], contribution: Accepted | None, *, in_step: bool) -> None:
        """Puts computed samples into the pool; without a contribution they are used up (not finite)."""
        self.ledger.arrive(spans)
        self._pooled += [(rank, span) for span in spans]
        if self.streams is not None:
            self.streams.use(rank, size(spans))
        self._pushes += 1
        self.witnessed = self.witnessed or in_step
        if contribution is not None:
            self._contributions.append(contribution)

    def pool(self, workers: int) -> Pool:
        """Returns what has arrived since the last update, for the policy."""
        return Pool(
            contributions=len(self._contributions), pushes=self._pushes,
            samples=sum(c.samples for c in self._contributions), batch=self.batch, missing=self.need,
            witnessed=self.witnessed, workers=workers, slices=self.ledger.owners(self.global_step),
            last=self.global_step == len(self.ends) - 1,
        )  # fmt: skip

    def empty(self) -> tuple[Accepted, ...]:
        """Empties the pool; returns what was in it."""
        contributions = tuple(self._contributions)
        self._contributions, self._pooled, self._pushes = [], [], 0
        return contributions

    def advance(self, now: float) -> None:
        """The global step is over."""
        self.global_step += 1
        self.began_s = now
        self.witnessed = False

    def applied(self) -> list[list[int]]:
        """Returns the samples in applied updates as ``[start, end]``; what is only pooled is left out."""
        applied = IntervalSet(self.ledger.arrived_spans())
        for _, (start, end) in self._pooled:
            applied.remove(start, end)
        return [list(span) for span in applied]

    def used(self) -> dict[int, int]:
        """Returns the samples of each rank's own stream in applied updates."""
        used = {} if self.streams is None else self.streams.used_by_rank()
        for rank, (start, end) in self._pooled if used else ():
            used[rank] -= end - start
        return used


def check_update(update: Apply, pool: Pool, policy: str) -> None:
    """Refuses an update that would break a rule.

    Raises:
        RuntimeError: naming the policy.
    """
    if update.ends_step and not pool.witnessed:
        wrong = "ended a global step to which no worker in it contributed: see pool.witnessed"
    elif update.ends_step and pool.last and pool.missing > 0:
        wrong = "carries samples over the end of the epoch: see pool.last"
    elif pool.complete and not update.ends_step:
        wrong = "must end the global step once pool.complete"
    elif not pool.pushes and not update.ends_step:
        wrong = "made an update of an empty pool"
    else:
        return
    raise RuntimeError(f"{policy}.update {wrong}: {pool}")
