"""A virtual clock, and processes that run on it one at a time: nothing here knows what they do.

A process is a greenlet. It runs until it waits; then the earliest event comes next, whoever it is for. So a run is a
function of what is drawn from its generator, and an hour of waiting costs nothing.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet


class EndlessError(RuntimeError):
    """So many events came that somebody must be going round in circles."""


class World:
    """Time, and what is due.

    Attributes:
        now_s: the time [s].
        events: how many there were.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events = 0
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._made = 0
        self._hub = getcurrent()
        self._processes: list[Process] = []

    def clock(self) -> float:
        """Returns the time [s]."""
        return self.now_s

    def at(self, time_s: float, do: Callable[[], object]) -> None:
        """Has something done at a time, after all that is due by then already; never for an infinite one."""
        if time_s < math.inf:
            self._made += 1
            heapq.heappush(self._due, (max(time_s, self.now_s), self._made, do))

    def run(self, *, until_s: float, most_events: int, over: Callable[[], bool]) -> None:
        """Does what is due until ``over()``, or nothing is due any more, or the time is up.

        Raises:
            EndlessError: there were more than ``most_events``.
        """
        while self._due and not over():
            time_s, _, do = heapq.heappop(self._due)
            if time_s > until_s:
                return
            self.now_s = time_s
            self.events += 1
            if self.events > most_events:
                raise EndlessError(f"{self.events} events by {self.now_s:g} s, and no end in sight")
            do()

    def start(self, name: str, main: Callable[[], object]) -> Process:
        """Starts a process now."""
        process = Process(self, name, main)
        self._processes.append(process)
        process.wake()
        return process

    def end(self) -> None:
        """Takes down what is left of all processes."""
        for process in self._processes:
            process.take_down()


class Process:
    """Code that may wait; made by `World.start`.

    Attributes:
        name: for people.
        alive: neither at its end nor killed.
        killed: by `kill`.
        frozen_until_s: stopped until then, as by SIGSTOP [s].
        stopped_s: for how long it was stopped, or will have been by then [s].
        at_end: called when it ends, whatever the reason.
        error: what it raised.
    """

    def __init__(self, world: World, name: str, main: Callable[[], object]) -> None:
        self.name = name
        self.alive, self.killed = True, False
        self.frozen_until_s, self.stopped_s = -math.inf, 0.0
        self.at_end: list[Callable[[], object]] = []
        self.error: BaseException | None = None
        self._world = world
        self._main = main
        self._turn = 0
        self._greenlet = greenlet(self._run, parent=world._hub)

    def _run(self, _: object) -> None:
        try:
            self._main()
        except GreenletExit:
            pass
        except Exception as error:
            self.error = error
        self._ended()

    def _ended(self) -> None:
        if self.alive:
            self.alive = False
            for call in self.at_end:
                call()

    def wait(self, until_s: float = math.inf) -> Any:
        """Waits for `wake`, whose value it returns, at most until then (None). Called by the process itself."""
        self._wake_at(until_s, None)
        return self._world._hub.switch()

    def sleep(self, seconds: float) -> None:
        """Waits that long, whoever wakes it. Called by the process itself."""
        until_s = self._world.now_s + seconds
        while self._world.now_s < until_s:
            self.wait(until_s)

    def wake(self, value: Any = None) -> None:
        """Ends its present wait; without effect if that has ended by then."""
        self._wake_at(self._world.now_s, value)

    def _wake_at(self, time_s: float, value: Any) -> None:
        turn = self._turn
        self._world.at(time_s, lambda: self._resume(turn, value))

    def _resume(self, turn: int, value: Any) -> None:
        if not self.alive or turn != self._turn:
            return
        if self._world.now_s < self.frozen_until_s:
            self._world.at(self.frozen_until_s, lambda: self._resume(turn, value))
            return
        self._turn += 1
        self._greenlet.switch(value)

    @property
    def is_current(self) -> bool:
        """Whether it is the one that runs."""
        return getcurrent() is self._greenlet

    def halt(self) -> None:
        """Waits while it is stopped. Called by the process itself, where it could be stopped in the middle of."""
        while self._world.now_s < self.frozen_until_s:
            self.wait(self.frozen_until_s)

    def freeze(self, seconds: float) -> None:
        """Stops it for so long, from the next time on that it would run."""
        before_s = max(self.frozen_until_s, self._world.now_s)
        self.frozen_until_s = max(self.frozen_until_s, self._world.now_s + seconds)
        self.stopped_s += self.frozen_until_s - before_s

    def kill(self) -> None:
        """Ends it where it is, as SIGKILL does: nothing of it runs any more that could tell anybody."""
        self.killed = self.killed or self.alive
        self._ended()
        if self.is_current:
            self._world._hub.switch()  # comes back for `take_down` only

    def take_down(self) -> None:
        """Frees what it holds; called when nothing runs any more."""
        self.alive = False
        if self._greenlet:  # has begun, and not ended
            self._greenlet.throw(GreenletExit)
