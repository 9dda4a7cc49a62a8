"""Order of work on simulated devices: every stream has a vector clock, as `torch.cuda._sanitizer` has them.

A clock says, for each stream, up to which piece of its work everything is done before what comes next. Recording an
event copies the stream's clock; whoever waits for the event takes the maximum of the two; the host has a clock, too,
which every stream that is given work takes over. Copies to the host have their effect when the host's clock has passed
them, and not before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.simgpu.sim.native import ERROR, answer, lib
from tests.simgpu.sim.syncs import syncs

Stream = tuple[int, int]  # device, number
Clock = dict[Stream, int]

LAG_S = 0.002  # so long after it was recorded an event is seen to be reached by who only asks


@dataclass
class _Event:
    clock: Clock
    device: int
    at_s: float


@dataclass
class _Effect:
    stream: Stream
    number: int
    have: Callable[[], None]


def _sleep_until(at_s: float) -> None:
    time.sleep(max(0.0, at_s - time.perf_counter()))


def _pass(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        if clock.get(stream, 0) < number:
            clock[stream] = number


class Order:
    """Clocks of all streams of a process; safe to use from several threads.

    Attributes:
        asynchronous: whether effects are late and races are told.
        races: texts of all races found, also of those whose error somebody caught.
    """

    def __init__(self, asynchronous: bool) -> None:
        self.asynchronous = asynchronous
        self.races: list[str] = []
        self.lock = threading.RLock()
        self.before: Callable[[], None] = lambda: None  # called before order changes
        self._streams: dict[Stream, Clock] = {}
        self._host: Clock = {}
        self._events: dict[int, _Event] = {}
        self._effects: list[_Effect] = []
        self._busy_until_s: dict[Stream, float] = {}  # kernels take no time, but `sleep`

    # ---- work

    def work(self, stream: Stream) -> int:
        """Returns the number of a new piece of work on the stream."""
        with self.lock:
            clock = self._clock(stream)
            _pass(clock, self._host)
            clock[stream] = clock.get(stream, 0) + 1
            return clock[stream]

    def later(self, stream: Stream, number: int, have: Callable[[], None]) -> None:
        """Has an effect on the host as soon as the host knows that this piece of work is done."""
        with self.lock:
            self._effects.append(_Effect(stream, number, have))

    def is_before(self, stream: Stream, number: int, other: Stream) -> bool:
        """Whether this piece of work is done before what comes next on the ``other`` stream."""
        with self.lock:
            return max(self._clock(other).get(stream, 0), self._host.get(stream, 0)) >= number

    def race(self, text: str) -> None:
        """Tells of a race.

        Raises:
            RuntimeError: always.
        """
        self.races.append(text)
        raise RuntimeError(f"race on a simulated device: {text}")

    # ---- what torch's streams and events do

    def record(self, event: int, device: int, stream: int) -> int:
        with self.lock:
            self.before()
            known = self._events.get(event)
            if known is not None and known.device != device:
                raise RuntimeError(
                    f"Event device {known.device} does not match recording stream's device {device}."
                )
            clock = dict(self._clock((device, stream)))
            _pass(clock, self._host)
            at_s = max(time.perf_counter(), self._busy_until_s.get((device, stream), 0.0))
            self._events[event] = _Event(clock, device, at_s)
            return 0

    def block(self, event: int, device: int, stream: int) -> int:
        with self.lock:
            self.before()
            recorded = self._recorded(event)
            _pass(self._clock((device, stream)), recorded.clock)
            self._busy((device, stream), recorded.at_s)
            return 0

    def event_done(self, event: int) -> int:
        with self.lock:
            recorded = self._recorded(event)
            if time.perf_counter() - recorded.at_s < LAG_S and not self._host_knows(recorded.clock):
                return 0
            self._host_has(recorded.clock)
            return 1

    def stream_done(self, device: int, stream: int) -> int:
        with self.lock:
            if time.perf_counter() < self._busy_until_s.get((device, stream), 0.0):
                return 0
            self._host_has(self._clock((device, stream)))
            return 1

    def wait_event(self, event: int) -> int:
        syncs.note("event.synchronize")
        with self.lock:
            recorded = self._recorded(event)
        _sleep_until(recorded.at_s)
        with self.lock:
            self._host_has(recorded.clock)
        return 0

    def wait_stream(self, device: int, stream: int) -> int:
        syncs.note("stream.synchronize")
        self.host_waits((device, stream))
        return 0

    def wait_device(self, device: int) -> int:
        syncs.note("device synchronize")
        self.host_waits_for_device(device)
        return 0

    def elapsed_ms(self, first: int, second: int) -> float:
        with self.lock:
            one, two = self._recorded(first), self._recorded(second)
            if one.device != two.device:
                raise RuntimeError("CUDA error: invalid resource handle (times of events on two devices)")
            for event in (one, two):
                if time.perf_counter() - event.at_s < LAG_S and not self._host_knows(event.clock):
                    raise RuntimeError("CUDA error: device not ready")
            return max(0.0, 1e3 * (two.at_s - one.at_s))

    # ---- what others do

    def host_waits(self, stream: Stream) -> None:
        """The host waits until the stream has done all its work so far."""
        _sleep_until(self._busy_until_s.get(stream, 0.0))
        with self.lock:
            self._host_has(self._clock(stream))

    def host_waits_for_device(self, device: int) -> None:
        """The host waits until all streams of the device have done all their work so far."""
        for stream in [stream for stream in list(self._streams) if stream[0] == device]:
            self.host_waits(stream)

    def sleep(self, stream: Stream, seconds: float) -> None:
        """The stream does nothing for some time, which the host does not wait for: `torch.cuda._sleep`."""
        with self.lock:
            self.work(stream)
            self._busy(stream, max(time.perf_counter(), self._busy_until_s.get(stream, 0.0)) + seconds)

    def now(self, stream: Stream) -> Clock:
        """Returns the stream's clock, to be waited for later, see `waits` and `host_knows`."""
        with self.lock:
            return dict(self._clock(stream))

    def waits(self, stream: Stream, clock: Clock) -> None:
        with self.lock:
            self.before()
            _pass(self._clock(stream), clock)

    def host_knows(self, clock: Clock) -> None:
        with self.lock:
            self._host_has(clock)

    def _busy(self, stream: Stream, until_s: float) -> None:
        self._busy_until_s[stream] = max(until_s, self._busy_until_s.get(stream, 0.0))

    def _clock(self, stream: Stream) -> Clock:
        return self._streams.setdefault(stream, {})

    def _recorded(self, event: int) -> _Event:
        if event not in self._events:
            raise RuntimeError("an event that was never recorded is waited for")
        return self._events[event]

    def _host_knows(self, clock: Clock) -> bool:
        return all(self._host.get(stream, 0) >= number for stream, number in clock.items())

    def _host_has(self, clock: Clock) -> None:
        self.before()
        _pass(self._host, clock)
        known, later = [], []
        for effect in self._effects:
            (known if self._host.get(effect.stream, 0) >= effect.number else later).append(effect)
        self._effects = later
        for effect in known:
            effect.have()


_order: Order | None = None


def order() -> Order:
    assert _order is not None, "install() gives a process its devices"
    return _order


def start(asynchronous: bool) -> None:
    """Begins with streams that have done nothing, and has torch's streams and events ask here."""
    global _order
    _order = made = Order(asynchronous)
    from tests.simgpu.sim.races import keep, settle

    made.before = settle
    lib().call_python(
        {
            "record": answer(made.record, 1),
            "block": answer(made.block, 1),
            "event_done": answer(made.event_done, ERROR),
            "stream_done": answer(made.stream_done, ERROR),
            "wait_event": answer(made.wait_event, 1),
            "wait_stream": answer(made.wait_stream, 1),
            "wait_device": answer(made.wait_device, 1),
            "elapsed_ms": answer(made.elapsed_ms, -1.0),
            "keep": answer(keep, 1),
        }
    )
