"""Sums over ranks of which one may be lost in the middle: all that are left have the sum, or none has (layer L).

    exchange n   each rank adds its tensors, and a row of numbers that says who takes part; nobody meets for it
    fails        who notices leaves the group, by which all notice; those that live meet and say how many sums they have
    some have n  they give it to the others, whose groups failed a moment before the end: nothing is made twice
    nobody has   it is made again among those that are left, who add what the lost rank was to add

A rank that has sum n keeps it until it has the next: by then all have it, or it would not have come about. So ranks are
never more than one exchange apart, and a lost rank's part is in a sum for all, or for none.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetero.base.elastic.run_meetings import RunMeetings
from lightning_hetero.transport.failures import FailureBoard
from lightning_hetero.transport.groups import close_connections
from lightning_hetero.transport.membership import Met
from lightning_hetero.transport.one_round import start_sum
from lightning_hetero.transport.side_channel import SideChannel

_LOOK_S = 0.25  # from one look for lost ranks to the next
_HERE, _PLACE, _SAMPLES, _ASKS, _FREE = range(5)  # what a row begins with


class _Slot:
    """One rank's numbers that travel with the next exchange, and those of all once they are here."""

    def __init__(self, row: Sequence[float]) -> None:
        self.row, self.of_all = list(row), list[list[float]]()


class ElasticExchange:
    """One rank's end; see the module. Towards loaders, weights and controllers it is a side channel.

    What they gather travels with the next exchange. A rank that is not there has a row of NaN.

    Args:
        meetings: of the ranks.
        channel: of those that are left.
        failures: ends waits where a rank has failed.
        rank, world_size: as the run began, whoever is left.

    Attributes:
        rank, world_size: as given.
        asked: a rank that was lost wants to join; all ranks know it.
    """

    def __init__(
        self, meetings: RunMeetings, channel: SideChannel, failures: FailureBoard, *, rank: int, world_size: int
    ) -> None:
        self.rank, self.world_size, self.asked = rank, world_size, False
        self._meetings, self._side, self._failures = meetings, channel, failures
        self._slots: list[_Slot] = []
        self._sent: list[Tensor] = []  # of the exchange that is under way
        self._last: list[Tensor] = []  # the sum that this rank has got last
        meetings.catch_up = self._catch_up

    # ---- as a side channel ------------------------------------------------------------------------------------

    def all_gather_object(self, value: object) -> list:
        """Gathers any picklable object of those that are there; blocking."""
        if self._meetings.joining:  # the others have compared theirs when they began
            return [value] * self.world_size
        return self._together("objects", lambda: self._side.all_gather_object(value))

    def broadcast_indices(self, indices: Sequence[int] | None) -> list[int]:
        """Returns rank 0's list of indices on every rank; blocking."""
        return self._together("indices", lambda: self._side.broadcast_indices(indices))

    def _together(self, what: str, collective: Callable[[], Any]) -> Any:
        return self._meetings.together(what, collective) if self._meetings.open else collective()

    def all_gather_row(self, row: Sequence[float]) -> Callable[[], list[list[float]]]:
        """Gathers a row with the next exchange; call the result for all rows, by rank as the run began."""
        slot = _Slot(row)
        self._slots.append(slot)

        def wait() -> list[list[float]]:
            if not slot.of_all:
                self.exchange("rows", lambda: (0, []))
            return slot.of_all

        return wait

    def sum_async(self, value: float) -> Callable[[], float]:
        """Sums a number over those that are there, with the next exchange; call the result for the sum."""
        rows = self.all_gather_row([value])
        return lambda: math.fsum(row[0] for row in rows() if not math.isnan(row[0]))

    # ---- an exchange ------------------------------------------------------------------------------------------

    def exchange(self, place: str, fill: Callable[[], tuple[int, Sequence[Tensor]]], samples: int = 0) -> list[Tensor]:
        """Returns the sums over the ranks; collective.

        Args:
            place: where it is, the same on all ranks.
            fill: returns how many samples this rank's tensors are of, and the tensors, of the same shapes on all ranks;
                called again when a rank has been lost. They may be overwritten.
            samples: of all ranks together.

        Raises:
            RuntimeError: a rank has failed, ranks are elsewhere, or samples are missing; too few ranks are left.
            ServerLostError: rank 0 is lost.
        """
        slots, self._slots = self._slots, []
        made = self._meetings.roll.steps + 1
        while self._meetings.roll.steps < made:
            own, tensors = fill()
            layout = place, [len(slot.row) for slot in slots], [(str(t.dtype), t.numel()) for t in tensors]
            rows = torch.zeros(self.world_size, _FREE + sum(layout[1]), dtype=torch.float64)
            head = 1, zlib.crc32(repr(layout).encode()), own, self._meetings.admission.asked()
            rows[self.rank] = torch.tensor([*map(float, head), *(x for s in slots for x in s.row)], dtype=torch.float64)
            self._sent = [rows, *tensors]
            try:
                self._got(made, self._summed())
                break
            except RuntimeError:
                self._meetings.leave()
            self._meetings.meet_again()  # outside of the handler, which keeps the old group, and its store, alive
        return self._read(place, slots, samples)

    def _summed(self) -> list[Tensor]:
        assert self._side.group is not None
        sums = [start_sum(tensor, self._side.group) for tensor in self._sent]
        for one in sums:
            self._wait(one.work)
        return [one.result() for one in sums]

    def _wait(self, work: dist.Work) -> None:
        while not work.is_completed():
            try:
                work.wait(timedelta(seconds=_LOOK_S))
            except RuntimeError:
                if not work.is_completed():  # the time is over
                    self._look()
        work.wait()  # returns, or raises what went wrong

    def _look(self) -> None:
        try:
            self._failures.check()
            self._meetings.roll.look()
        except RuntimeError:
            close_connections(self._side.group)  # or this rank, and others, would wait in the group for who is lost
            raise

    def _got(self, made: int, sums: list[Tensor]) -> None:
        self._last, self._sent, self._meetings.roll.steps = sums, [], made

    def _catch_up(self, met: Met) -> None:
        """Ranks that have the last sum give it to those whose exchange has failed; a collective."""
        most = max(met.steps, default=0)
        if most == min(met.steps, default=0):
            return
        behind = self._meetings.roll.steps < most
        tensors = self._sent if behind else self._last
        for tensor in tensors:
            dist.broadcast(tensor, met.steps.index(most), group=self._side.group)
        if behind:
            self._got(most, tensors)

    def _read(self, place: str, slots: Sequence[_Slot], samples: int) -> list[Tensor]:
        rows = self._last[0].tolist()
        here = [row for row in rows if row[_HERE]]
        if any(row[_PLACE] != here[0][_PLACE] for row in here):
            raise RuntimeError(
                f"ranks meet in different places: rank {self.rank} at {place}. They have taken different ways through"
                " the program, e.g. a condition that depends on the rank"
            )
        if (found := sum(row[_SAMPLES] for row in here)) != samples:
            raise RuntimeError(f"{found:.0f} of {samples} samples at {place}; this is a bug of lightning_hetero")
        self.asked, at = any(row[_ASKS] for row in here), _FREE
        for slot in slots:
            end = at + len(slot.row)
            slot.of_all = [row[at:end] if row[_HERE] else [math.nan] * len(slot.row) for row in rows]
            at = end
        return self._last[1:]
