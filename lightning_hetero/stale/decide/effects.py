"""What workers ask the coordinator and what it answers, as plain values (layer P).

    worker                      coordinator
      | -- claim(tick) ----------> |   "I am at batch `tick` of the epoch; give me work"
      | <------- Granted --------- |   positions of the epoch's order, parameters of version `base`
      |  or <--- Passed ---------- |   the server has gone on: batch `tick` is over
      |  (or nothing yet: held)    |
      | -- push(lease) ----------> |   gradients of the granted samples are ready
      | <-- Accepted / Refused --- |
      |        Updated             |   enough samples: the pool becomes one update, a new version

A *tick* is one batch of Lightning's training loop and one global batch of samples. A *version* counts updates of the
parameters. Under the pooling policies both advance together; under the asynchronous ones a tick spans several
versions. Both are numbered from 0; ticks start again with each epoch, versions never do.

The vocabulary of versions and staleness is SaPS's (abstract only); ticks, leases and grants are ours.
"""

from __future__ import annotations

from dataclasses import dataclass

Span = tuple[int, int]
"""Positions ``[start, end)`` in the epoch's order of samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Granted:
    """Work for a worker.

    Attributes:
        rank: the worker.
        lease: number of the lease, unique in a run; a push names it.
        tick: the server's tick at the time of the grant; later than the worker's if it comes late into an epoch.
        base: version of the parameters to compute with.
        spans: samples to compute on; empty = a dummy batch that must count nothing and is not pushed.
        micro: compute in micro-batches of so many samples and look between them whether to return early; 0 = at once.
        hint: samples this worker will probably be granted later; worth fetching ahead.
    """

    rank: int
    lease: int
    tick: int
    base: int
    spans: tuple[Span, ...]
    micro: int = 0
    hint: Span = (0, 0)

    @property
    def samples(self) -> int:
        return sum(end - start for start, end in self.spans)


@dataclass(frozen=True, kw_only=True, slots=True)
class Passed:
    """The tick the worker asked for is over; the server's is ``tick`` (the epoch's number of ticks at its end)."""

    rank: int
    tick: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Accepted:
    """A contribution goes into the pool, multiplied by ``scale`` (damping; 1 = as it is)."""

    rank: int
    lease: int
    samples: int
    staleness: int
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """A contribution is thrown away: ``gone`` (lease re-issued or cancelled), ``stale`` or ``nonfinite``.

    ``samples`` were computed in vain.
    """

    rank: int
    lease: int
    samples: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Reissued:
    """Leased samples may be granted again: their worker is dead, stalled, or too stale (``reason`` in words)."""

    rank: int
    lease: int
    samples: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Updated:
    """The pool becomes one update and is emptied.

    Attributes:
        version: of the parameters after it.
        tick: the tick the server is in afterwards.
        samples: samples in the pool; the gradient is their mean.
        worth: learning rate of this update, as a multiple of the user's; n/B for updates of n of B samples.
        ends_step: whether the batch is complete with it.
    """

    version: int
    tick: int
    samples: int
    contributions: tuple[Accepted, ...]
    worth: float = 1.0
    ends_step: bool = True


Effect = Granted | Passed | Accepted | Refused | Reissued | Updated
