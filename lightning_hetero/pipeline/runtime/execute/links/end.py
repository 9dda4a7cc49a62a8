"""One end of a link between two neighbours, whatever carries it (layer T)."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from lightning_hetero.measure.device import Stamp
from lightning_hetero.pipeline.decide.link_clock import LinkClock
from lightning_hetero.pipeline.runtime.execute.links.messages import Message
from lightning_hetero.types import Link

__all__ = ["Arrivals", "Come", "LinkEnd"]

# Header, payload, from when on they may be used [s, time.monotonic], after what on the device; None: at once.
Come = tuple[bytes, Tensor, float, Stamp | None]


class LinkEnd(ABC):
    """Sends to one neighbour, and takes in what it sends: first in, first out."""

    @property
    @abstractmethod
    def broken(self) -> str | Exception | None:
        """Why nothing can be sent, or come, any more: what went wrong on this side, or in words; None: it can."""

    @abstractmethod
    def post(self, message: Message | None) -> None:
        """Posts a message, without waiting; None: the last one. Whether it could is seen by `broken`."""

    def room(self, timeout_s: float) -> bool:
        """Returns whether another message can be posted, after at most ``timeout_s``."""
        return True

    @abstractmethod
    def wait_out(self, timeout_s: float) -> bool:
        """Returns whether all that was posted is out, after at most ``timeout_s``."""

    @abstractmethod
    def take(self, timeout_s: float) -> Come | str | Exception | None:
        """Returns what comes next, why nothing will come, what went wrong on this side, or None after the timeout."""

    @abstractmethod
    def ended(self, timeout_s: float) -> bool:
        """Returns whether both sides have posted their last message, or the link is broken."""

    @abstractmethod
    def abort(self) -> None:
        """Ends the link at once; the neighbour is told."""

    def close(self) -> None:
        """Lets go of what an end holds that has `ended`."""


class Arrivals:
    """When messages may be used, and what they took on their way.

    Args:
        clock: of what comes.
        emulated: what comes is usable no earlier than over such a link, which carries one after the other.
    """

    def __init__(self, clock: LinkClock, emulated: Link | None) -> None:
        self.clock = clock
        self._link = emulated
        self._free_s = 0.0  # when the emulated link is

    def usable_s(self, sent_s: float, size_bytes: int) -> float:
        """Returns when a message arrives over the emulated link [s, time.monotonic]; 0: at once."""
        if self._link is None:
            return 0.0
        self._free_s = max(sent_s, self._free_s) + size_bytes / self._link.bandwidth_bytes_per_s
        return self._free_s + self._link.latency_s

    def came(self, *, sent_s: float, back_s: float, arrived_s: float, usable_s: float, size_bytes: int) -> None:
        """Takes note of a message that arrived then; see `LinkClock.came`."""
        arrived_s = max(arrived_s, usable_s)
        self.clock.came(sent_s=sent_s, back_s=back_s, arrived_s=arrived_s, size_bytes=size_bytes)
