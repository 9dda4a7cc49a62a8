"""What workers ask the coordinator and what it answers, as plain values (layer P).

    worker                      coordinator
      | -- claim(step) ----------> |   "I am at global step `step` of the epoch; give me work"
      | <------- Assigned -------- |   positions of the epoch's order, parameters of version `base`
      |  or <--- Passed ---------- |   the server has gone on: that global step is over
      |  (or nothing yet: held)    |
      | -- push(assignment) -----> |   gradients of the assigned samples are ready
      | <-- Accepted / Refused --- |
      |        Updated             |   enough samples: the pool becomes one update, a new version

A *global step* is one batch of Lightning's training loop and one global batch of samples. A *version* counts updates of
the parameters. Under the pooling policies both advance together; under the asynchronous ones a global step spans
several versions. Both are numbered from 0; global steps start again with each epoch, versions never do.

The vocabulary of versions and staleness is SaPS's (abstract only); global steps and assignments are ours.
"""

from __future__ import annotations

from dataclasses import dataclass

Span = tuple[int, int]
"""Positions ``[start, end)`` in the epoch's order of samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assigned:
    """Work for a worker.

    Attributes:
        rank: the worker.
        assignment: its number, unique in a run; a push names it.
        global_step: the server's; later than the worker's if that one comes late into an epoch.
        base: version of the parameters to compute with.
        spans: samples to compute on; empty = a dummy batch that must count nothing and is not pushed.
        micro: compute in micro-batches of so many samples and look between them whether to return early; 0 = at once.
        hint: what this worker will probably be assigned later; worth fetching ahead.
    """

    rank: int
    assignment: int
    global_step: int
    base: int
    spans: tuple[Span, ...]
    micro: int = 0
    hint: Span = (0, 0)

    @property
    def samples(self) -> int:
        return sum(end - start for start, end in self.spans)


@dataclass(frozen=True, kw_only=True, slots=True)
class Passed:
    """The worker's global step is over: the server is in ``global_step``, the epoch's number of them at its end."""

    rank: int
    global_step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Accepted:
    """A contribution goes into the pool, multiplied by ``scale`` (damping; 1: unchanged)."""

    rank: int
    assignment: int
    samples: int
    staleness: int
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """A contribution is thrown away: ``gone`` (assignment re-issued or cancelled), ``stale`` or ``nonfinite``.

    ``samples`` were computed and wasted.
    """

    rank: int
    assignment: int
    samples: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Reissued:
    """Assigned samples may be assigned again: their worker is dead, stalled, or too stale (``reason`` in words)."""

    rank: int
    assignment: int
    samples: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Updated:
    """The pool becomes one update and is emptied.

    Attributes:
        version: of the parameters after it.
        global_step: in which the server is afterwards.
        samples: samples in the pool; the gradient is their mean.
        worth: learning rate of this update, as a multiple of the user's; n/B for updates of n of B samples.
        ends_step: whether the batch is complete with it.
    """

    version: int
    global_step: int
    samples: int
    contributions: tuple[Accepted, ...]
    worth: float = 1.0
    ends_step: bool = True


Effect = Assigned | Passed | Accepted | Refused | Reissued | Updated
