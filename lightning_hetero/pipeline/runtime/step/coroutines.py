"""What carries the stack of a suspended step: a greenlet, or a pooled thread where greenlet is missing (layer T).

A carrier only moves control and messages between the inside of a step and its outside; what torch holds per thread is
swapped by `resumable`, in the same way for both.

| | greenlet | thread |
|---|---|---|
| suspend + resume, alone | 1 µs | 5-20 µs |
| with all that is swapped | 30 µs | 40 µs |
| operating system's thread | the caller's | its own |
| the user's ``threading.local`` | kept | empty in the step |
| signal handlers, objects bound to the main thread (sqlite) | work | do not |
"""

from __future__ import annotations

import contextvars
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, ClassVar, Literal, Protocol

from lightning_hetero.pipeline.runtime.step.random_streams import HostStreams

try:
    import greenlet
except ImportError:  # an optional dependency
    greenlet = None

__all__ = ["Carrier", "CarrierName", "Greenlets", "Strand", "Threads", "make_carrier"]

CarrierName = Literal["auto", "greenlet", "thread"]


class Strand(Protocol):
    """One stack which runs until it pauses."""

    def switch(self, message: Any) -> Any:
        """From outside: goes on inside with ``message``; returns what it pauses with, or returns, next."""
        ...

    def pause(self, message: Any) -> Any:
        """From inside: goes on outside with ``message``; returns what the next `switch` is called with."""
        ...


class _Open(Protocol):
    def close(self) -> None: ...


class Carrier(ABC):
    """Makes strands, and ends what was left suspended. One owner, who closes it; usable as a context manager.

    Not left to the garbage collector: it does not see into the stack of a suspended step, which holds its carrier.

    While any step is open, the streams of `random` and of NumPy are the steps'; they go on as they were before once
    the last one has ended.

    Attributes:
        one_thread: strands run in the thread that switches to them.
    """

    one_thread: ClassVar[bool]

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}  # in order of opening
        self._host: HostStreams | None = None
        self._keeps = True
        self._closed = False

    @abstractmethod
    def strand(self, main: Callable[[Any], Any], context: contextvars.Context) -> Strand:
        """Returns a strand that will call ``main(message)`` in ``context`` at its first `Strand.switch`.

        ``main`` must not raise: its result is the last thing that `Strand.switch` returns.

        Raises:
            RuntimeError: the carrier is closed.
        """

    def opened(self, step: _Open) -> None:
        """Takes note of a step that has begun."""
        if self._keeps and not self._open:
            self._host = HostStreams()
        self._open[id(step)] = step

    def ended(self, step: _Open) -> None:
        """Takes note of a step's end."""
        self._open.pop(id(step), None)
        if not self._open and self._host is not None:
            self._host.put_back()
            self._host = None

    @contextmanager
    def streams_left(self) -> Iterator[None]:
        """Inside, the caller keeps those streams: to read and put them takes longer than several switches."""
        keeps, self._keeps = self._keeps, False
        try:
            yield
        finally:
            self._keeps = keeps

    def close_steps(self) -> None:
        """Closes every step still suspended, the last one begun first, so that its ``finally`` blocks run.

        Raises:
            BaseException: the first that one of them raised meanwhile; all are closed nevertheless.
        """
        first: BaseException | None = None
        for step in reversed(list(self._open.values())):
            try:
                step.close()
            except BaseException as error:
                first = first or error
        if first is not None:
            raise first

    def close(self) -> None:
        """Closes the steps (see `close_steps`) and gives up threads. May be called again."""
        self._closed = True
        try:
            self.close_steps()
        finally:
            self._give_up()

    def _give_up(self) -> None:
        pass

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("this carrier is closed: make a new one for further steps")

    def __enter__(self) -> Carrier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def make_carrier(name: CarrierName = "auto") -> Carrier:
    """Returns a carrier by its name; ``"auto"``: greenlets if the package is installed, else threads.

    Raises:
        ValueError: another name.
        ImportError: greenlets wanted and not installed.
    """
    if name not in ("auto", "greenlet", "thread"):
        raise ValueError(f"carrier={name!r} must be 'auto', 'greenlet' or 'thread'")
    if name == "thread" or (name == "auto" and greenlet is None):
        return Threads()
    return Greenlets()


# ---- greenlets -------------------------------------------------------------------------------------------------


class Greenlets(Carrier):
    """Stacks inside the caller's thread.

    Raises:
        ImportError: greenlet is not installed.
    """

    one_thread = True

    def __init__(self) -> None:
        if greenlet is None:
            raise ImportError("carrier='greenlet' needs it: pip install greenlet, or use carrier='thread'")
        super().__init__()

    def strand(self, main: Callable[[Any], Any], context: contextvars.Context) -> Strand:
        self._require_open()
        return _GreenletStrand(main, context)


class _GreenletStrand:
    def __init__(self, main: Callable[[Any], Any], context: contextvars.Context) -> None:
        assert greenlet is not None
        self._greenlet = greenlet.greenlet(main)
        self._greenlet.gr_context = context
        self._thread = threading.get_ident()

    def switch(self, message: Any) -> Any:
        assert greenlet is not None
        if threading.get_ident() != self._thread:
            raise RuntimeError("a step carried by a greenlet must be resumed and closed in the thread that started it")
        self._greenlet.parent = greenlet.getcurrent()  # where `pause` and the end lead to
        return self._greenlet.switch(message)

    def pause(self, message: Any) -> Any:
        outside = self._greenlet.parent
        assert outside is not None  # it has been switched to
        return outside.switch(message)


# ---- threads ---------------------------------------------------------------------------------------------------


class Threads(Carrier):
    """Threads which are kept for the next steps; as many as there were steps open at a time.

    Only one of a strand and its caller runs at any time.
    """

    one_thread = False

    def __init__(self) -> None:
        super().__init__()
        self._idle: list[_StepThread] = []
        self._started = 0

    @property
    def started(self) -> int:
        """Threads started so far."""
        return self._started

    def strand(self, main: Callable[[Any], Any], context: contextvars.Context) -> Strand:
        self._require_open()
        if not self._idle:
            self._idle.append(_StepThread(f"training-step-{self._started}"))
            self._started += 1
        return _ThreadStrand(self._idle.pop(), main, context, self._idle.append)

    def _give_up(self) -> None:
        while self._idle:
            self._idle.pop().end()

    def __del__(self) -> None:
        if not sys.is_finalizing():  # then threads do not end any more
            self._give_up()


class _StepThread:
    """A thread, and whose turn it is: that of its inside, or of the caller.

    The queues only wake the other side up. A wake-up too many, left by an interrupt, does no harm.
    """

    def __init__(self, name: str) -> None:
        self._wake_inside: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._wake_outside: SimpleQueue[None] = SimpleQueue()
        self._inside = False
        # A daemon: a carrier that nobody closed must not keep the interpreter from ending.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (job := self._wake_inside.get()) is not None:
            job()
            del job  # what it holds must not live until the next one
            self._inside = False
            self._wake_outside.put(None)

    def go_inside(self, job: Callable[[], None] | None = None) -> None:
        """Called outside: runs ``job``, or what it was at, until `go_outside` or its end."""
        try:
            self._inside = True
            self._wake_inside.put(job)
            self._wake_outside.get()
            while self._inside:  # that was one too many
                self._wake_outside.get()
        except BaseException:
            # A signal handler raised, e.g. KeyboardInterrupt, while the step computes: it cannot be stopped there,
            # and two sides must never run at a time.
            while self._inside:
                self._wake_outside.get()
            raise

    def go_outside(self) -> None:
        """Called inside: lets the caller run until its next `go_inside`."""
        self._inside = False
        self._wake_outside.put(None)
        self._wake_inside.get()

    def end(self) -> None:
        self._wake_inside.put(None)  # instead of a job
        self._thread.join()


class _ThreadStrand:
    def __init__(
        self,
        thread: _StepThread,
        main: Callable[[Any], Any],
        context: contextvars.Context,
        give_back: Callable[[_StepThread], None],
    ) -> None:
        self._thread, self._main, self._context, self._give_back = thread, main, context, give_back
        self._message: Any = None
        self._begun = self._ended = False

    def switch(self, message: Any) -> Any:
        self._message = message
        job, self._begun = None if self._begun else self._job, True
        try:
            self._thread.go_inside(job)
        finally:
            if self._ended:
                self._give_back(self._thread)
        message, self._message = self._message, None
        return message

    def pause(self, message: Any) -> Any:
        self._message = message
        self._thread.go_outside()
        message, self._message = self._message, None
        return message

    def _job(self) -> None:
        message, self._message = self._message, None
        self._message = self._context.run(self._main, message)
        self._ended = True
