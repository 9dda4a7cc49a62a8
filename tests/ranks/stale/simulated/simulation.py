"""One run: the engine's server and workers, a virtual clock, and an adversary; see `tests.ranks.stale.simulated`."""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from lightning_hetero.stale.decide.coordinator import Coordinator
from lightning_hetero.stale.runtime import start
from lightning_hetero.stale.runtime.layout import FlatLayout
from lightning_hetero.stale.runtime.serve.server import ParameterServer
from lightning_hetero.stale.runtime.start import serve
from lightning_hetero.transport.membership import Limits
from tests.ranks.stale.simulated.audit import Audit
from tests.ranks.stale.simulated.cases import LIVENESS_S, PATIENCE_S, SERVER, Case, Fault, Point
from tests.ranks.stale.simulated.played import GROUP_TIMEOUT_S, ProcessGroup, played
from tests.ranks.stale.simulated.ranks import Lobby, Rank, model_of
from tests.ranks.stale.simulated.wires import Delays, MemoryListener, Store, Wires
from tests.ranks.stale.simulated.world import EndlessError, Process, World

_MOST_EVENTS = 50_000


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a run.

    Attributes:
        seed: of the run.
        violations: promises that were broken, in words; empty: none.
        faults: that happened, by kind.
        ended: how many ranks ended in which way.
        excused: something happened that may end a run, e.g. an error of the user's.
        events, virtual_s: of the run.
        applied, stale: see `Audit`.
        digest: of all that happened; equal runs have equal ones.
        trace: all that happened, a line each.
    """

    seed: int
    violations: tuple[str, ...]
    faults: Counter[str]
    ended: Counter[str]
    events: int
    virtual_s: float
    excused: bool
    applied: int
    stale: int
    digest: str
    trace: tuple[str, ...]


def simulate(case: Case) -> Outcome:
    """Runs a case to its end."""
    return Simulation(case).run()


class Simulation:
    """See the module; what ranks need of it is public.

    Args:
        case: what happens.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.world = World()
        self.draw = random.Random(f"run {case.seed}")
        self._trace: list[tuple[float, str, str]] = []
        self._columns = [(epoch, i) for epoch, ends in enumerate(case.ends) for i in range(ends[-1])]
        self._column_of = {place: column for column, place in enumerate(self._columns)}
        policy = case.policy()
        # The user's number, where there is one: the engine may ask the policy in another way.
        bound = policy.claims_bound if policy.claims_bound is not None else policy.bound_for(case.ranks)
        self.audit = Audit(case, bound, self._columns)
        model = self.new_model()
        optimizer = self.optimizer(model)
        self.layout = FlatLayout.of([("ledger", model)], optimizers=[optimizer])
        self.area = torch.zeros(self.layout.bytes, dtype=torch.uint8)
        (view,) = self.layout.views(self.area)
        view.copy_(model.detach())
        model.data = view
        self.wires = Wires(
            self.world, Delays(self.draw, case.slow_messages, case.long_s), ranks=range(case.ranks),
            slot_bytes=self.layout.slot_bytes, parameter_bytes=self.layout.bytes, note=self.note, point=self.point,
            published=lambda version, area: self.audit.published(version, area, self.layout),
        )  # fmt: skip
        self.store = Store(self.wires, self._is_here)
        self.listener = MemoryListener(self.wires, lambda: self.draw.random() * case.lag_s)
        self.server = ParameterServer(
            layout=self.layout, area=self.area, parameters=[model], optimizers=[optimizer],
            listener=self.listener,
            coordinator=Coordinator(policy, workers=range(case.ranks), ahead=case.ahead, liveness_s=LIVENESS_S),
            divide_by=1.0, shards=1,
            # as `start_server` has it
            limits=Limits(
                connect_s=start._AWAITED_S, silence_s=start.SILENT_SIGNS * LIVENESS_S, meeting_s=GROUP_TIMEOUT_S
            ),
        )  # fmt: skip
        self.first_group = ProcessGroup(self.world, case.ranks)
        self.lobby = Lobby(self.world)
        self.checkpoints: dict[str, int] = {}
        self.ranks: dict[int, Rank] = {}  # the newest process of each
        self._everybody: list[Rank] = []
        self._running = 0
        self._faults: Counter[str] = Counter()
        self._lost_at_s: list[float] = []  # when ranks were killed, fell silent or were cut off
        self._excuses: list[str] = []
        self._waiting: list[tuple[Fault, Point, list[int]]] = []

    # ---- what ranks need --------------------------------------------------------------------------------------

    def new_model(self) -> nn.Parameter:
        return model_of(len(self._columns), self.case.substeps)

    @staticmethod
    def optimizer(model: nn.Parameter) -> torch.optim.Optimizer:
        return torch.optim.SGD([model], lr=1.0)

    def column(self, epoch: int, position: int) -> int:
        """Returns the ledger's column of a sample."""
        return self._column_of[epoch, position]

    def current(self) -> Rank:
        """Returns the rank whose process runs."""
        (rank,) = (rank for rank in self._everybody if rank.process.is_current)
        return rank

    def _is_here(self) -> None:
        """A rank has said that it comes to a new process group: who sees that waits for it there."""
        self.point(self.current().number, "look")

    def anybody(self) -> bool:
        """Whether a process of the run runs, besides those that wait to join it."""
        now_s, ranks = self.world.now_s, self.ranks.values()
        return any(r.process.alive and now_s >= r.process.frozen_until_s and not r.members.joining for r in ranks)

    def compute_s(self, rank: Rank, samples: int) -> float:
        """Returns the time that a rank takes for a chunk now [s]."""
        case = self.case
        own_s = case.start_s + case.sample_s[rank.number] * samples
        slow = 10.0 if self.world.now_s < rank.slow_until_s else 1.0
        return own_s * slow * math.exp(case.noise * self.draw.gauss(0.0, 1.0))

    def note(self, who: str, what: str) -> None:
        """Writes down what happens."""
        self._trace.append((self.world.now_s, who, what))

    def server_process(self, process: Process) -> Any:
        """Returns what rank 0, whose process is given, has of the server it has forked."""

        def stop(patience_s: float) -> None:
            """Waits until it ends by itself, then kills it."""
            until_s = self.world.now_s + patience_s
            while self.wires.server is not None and self.wires.server.alive and self.world.now_s < until_s:
                process.sleep(0.02)
            self._kill_server()

        def alive() -> bool:
            return self.wires.server is not None and self.wires.server.alive

        return SimpleNamespace(stop=stop, release=lambda: None, alive=alive)

    def _kill_server(self) -> None:
        assert self.wires.server is not None
        if self.wires.server.alive:
            self.note("server", "is killed")
            self.wires.server.kill()
            self.wires.close("the server was killed")

    # ---- the adversary ----------------------------------------------------------------------------------------

    def point(self, rank: int, place: str) -> None:
        """A rank's process, which calls this, is at a place where it could be hit."""
        own = self.ranks[rank]
        own.place = place
        for fault, point, left in self._waiting:
            if left[0] and point.rank == rank and place.startswith(point.place):
                left[0] -= 1
                if not left[0]:
                    self._hit(fault, within=rank)
        own.process.halt()

    def _hit(self, fault: Fault, within: int | None = None) -> None:
        """A fault happens; within a rank's process, that one is hit last, as it may not come back from it."""
        for victim in sorted(fault.victims, key=lambda victim: victim == within):
            rank = self.ranks.get(victim)
            if victim == SERVER:
                self._hit_server(fault)
            elif rank is not None and rank.process.alive and rank.process.frozen_until_s < math.inf:
                self._count(fault, victim)
                getattr(self, f"_{fault.kind}")(rank, fault.seconds)

    def _count(self, fault: Fault, victim: int) -> None:
        self._faults[fault.kind if victim != SERVER else f"{fault.kind} the server"] += 1
        self.note("fault", f"{fault.kind} {'server' if victim == SERVER else victim} {fault.seconds:g}")

    def _hit_server(self, fault: Fault) -> None:
        server = self.wires.server
        if server is None or not server.alive:
            return
        self._count(fault, SERVER)
        if fault.kind == "stop":
            server.freeze(fault.seconds)
        else:
            self._excuses.append("the server was killed")
            self._kill_server()

    def _is_last(self, rank: Rank) -> bool:
        """Whether nobody else takes part: the server ends then, and whoever is on its way finds none."""
        others = [other for other in self.ranks.values() if other is not rank and other.process.alive]
        unmet = rank.number == 0 and not self.wires.connections
        return unmet or (bool(others) and not any(other.is_in for other in others))

    def _kill(self, rank: Rank, seconds: float) -> None:
        self._lost_at_s.append(self.world.now_s)
        if rank.risky or self._is_last(rank):
            self._excuses.append(f"rank {rank.number} died where that ends the run")
        if seconds and rank.number > 0:  # rank 0 cannot join
            self.world.at(self.world.now_s + seconds, lambda: self._start_again(rank))
        rank.process.kill()

    def _start_again(self, dead: Rank) -> None:
        if self.ranks[dead.number] is dead:
            self._faults["start again"] += 1
            self.note("fault", f"rank {dead.number} is started again")
            self._start(dead.number, joins=True)

    def _stop(self, rank: Rank, seconds: float) -> None:
        rank.stopped_s += seconds
        rank.process.freeze(seconds)

    def _silence(self, rank: Rank, seconds: float) -> None:
        self._lost_at_s.append(self.world.now_s)
        if rank.group is not None:
            rank.group.falls_silent(rank.index)
        if rank.risky:
            self._excuses.append(f"rank {rank.number} fell silent where that ends the run")
        rank.process.freeze(math.inf)
        self._running -= 1

    def _cut(self, rank: Rank, seconds: float) -> None:
        connection = self.wires.connections.get(rank.number)
        if connection is None or connection.process is not rank.process:
            return
        self._lost_at_s.append(self.world.now_s)
        if rank.risky or self._is_last(rank):
            self._excuses.append(f"rank {rank.number} was cut off where that ends the run")
        rank.was_cut = True
        self.wires.end(connection, "the network failed", lose=self.draw.random() < 0.5)

    def _slow(self, rank: Rank, seconds: float) -> None:
        rank.slow_until_s = self.world.now_s + seconds

    def _raise(self, rank: Rank, seconds: float) -> None:
        rank.error_next = True

    def error_raised(self) -> None:
        """The user's code has failed."""
        self._excuses.append("the user's code failed")

    # ---- the run ----------------------------------------------------------------------------------------------

    def _start(self, number: int, *, joins: bool = False) -> None:
        self._running += 1
        self.ranks[number] = rank = Rank(self, number, joins=joins)
        rank.began_s = self.world.now_s
        self._everybody.append(rank)

        def ended() -> None:
            if rank.process.frozen_until_s < math.inf:
                self._running -= 1
            self.note(f"rank {number}", f"ends: {rank.outcome or 'killed'}")

        rank.process.at_end.append(ended)

    def _serve(self) -> None:
        try:
            first = self._everybody[0].process
            own = self.wires.server
            assert own is not None
            awake_s, orphaned = lambda: self.world.now_s - own.stopped_s, lambda: not first.alive
            serve(self.server, self.listener, awake_s, orphaned=orphaned)
        finally:
            if self.wires.server is not None and self.wires.server.alive:
                self.listener.close()

    def run(self) -> Outcome:
        """Runs to the end, or until it is late enough to say that there is none."""
        case, world = self.case, self.world
        with played(world, self.store, self.current):
            for number in range(case.ranks):
                self._start(number)
            self._running += 1
            self.wires.server = server = world.start("server", self._serve)

            def ended() -> None:
                self._running -= 1

            server.at_end.append(ended)
            for fault in case.faults:
                if isinstance(fault.when, Point):
                    self._waiting.append((fault, fault.when, [fault.when.count]))
                else:
                    world.at(fault.when, lambda fault=fault: self._hit(fault))
            try:
                world.run(until_s=case.limit_s, most_events=_MOST_EVENTS, over=lambda: self._running == 0)
            except EndlessError as error:
                self.audit.violated(str(error))
            self._judge()
            world.end()
        lines = tuple(f"{now_s:10.4f}  {who}: {what}" for now_s, who, what in self._trace)
        return Outcome(
            seed=case.seed,
            violations=tuple(self.audit.violations),
            faults=self._faults,
            ended=Counter(self._way(rank) for rank in self._everybody),
            events=world.events,
            virtual_s=world.now_s,
            excused=bool(self._excuses),
            applied=self.audit.applied,
            stale=self.audit.stale,
            digest=hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16],
            trace=lines,
        )

    # ---- afterwards -------------------------------------------------------------------------------------------

    @staticmethod
    def _way(rank: Rank) -> str:
        if rank.process.killed:
            return "killed"
        if not rank.outcome:
            return "silent" if rank.process.frozen_until_s == math.inf else "hangs"
        return rank.outcome if rank.outcome in ("done", "not let in") else "with a cause"

    def _judge(self) -> None:
        """Holds what became of everybody against what is promised."""
        audit, server = self.audit, self.wires.server
        assert server is not None
        ways = [(rank, self._way(rank)) for rank in self._everybody]
        done = any(way == "done" for _, way in ways)
        silent = any(way == "silent" for _, way in ways)
        ended = 0
        for rank, way in ways:
            # Or left behind, or turned away as it did not come in time, or as another was lost just then: nobody else
            # ends with it, and it is told to start again.
            late = not rank.is_in and (rank.stopped_s > 0.0 or self._lost_at_s[-1:] > [rank.began_s])
            alone = rank.was_cut or rank.stopped_s >= PATIENCE_S or late
            ended += way == "with a cause" and rank.is_in and not alone
            if way == "hangs":
                audit.violated(f"rank {rank.number} has no answer after {self.world.now_s:.0f} s, at {rank.place!r}")
            elif way == "with a cause" and not self._excuses and not alone:
                audit.violated(f"rank {rank.number} ended though nothing ends a run: {rank.outcome}")
        if server.error is not None:
            audit.violated(f"the server failed: {type(server.error).__name__}: {server.error}")
        if server.alive and not silent:  # one that is stopped, perhaps with all others, may go on one day
            audit.violated(f"the server has not ended by {self.world.now_s:.0f} s")
        if done and ended and "stop" not in self._faults and not server.killed:
            audit.violated("a run has ended for one rank with a cause, and well for another")
        if done:
            audit.complete()
