"""What a rank does, as under Lightning, over the engine's own worker, session, meetings and admission.

Played here are: Lightning's loop over epochs and batches, the computing (a sleep), and the store in which ranks ask to
join; in `played` process groups.

The model is the ledger. Its parameters have a column per sample of the run; the gradient of a chunk is 1 in the columns
of its samples, and the number of the push in a second row. The server sums, divides by 1 and steps plain SGD with a
learning rate of 1: so its parameters say which push every sample came from, and how often it was applied.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import Checkpoint
from torch import nn

from lightning_hetero.base.elastic.admission import Admission
from lightning_hetero.base.elastic.coming import Coming
from lightning_hetero.base.elastic.join import FIRST_GENERATION, Invitation
from lightning_hetero.base.elastic.members import Members
from lightning_hetero.stale.fit.meetings import ServerMeetings
from lightning_hetero.stale.fit.session import Session
from lightning_hetero.stale.runtime.start import Address
from lightning_hetero.stale.runtime.work.chunk import Chunk
from lightning_hetero.stale.runtime.work.worker import Worker
from lightning_hetero.transport.base import Ask, Reply, Request, Say
from lightning_hetero.transport.flags import PushFlag
from lightning_hetero.transport.groups import rebuild_default_group
from tests.ranks.stale.simulated.cases import LIVENESS_S
from tests.ranks.stale.simulated.played import GROUP_TIMEOUT_S, ProcessGroup
from tests.ranks.stale.simulated.wires import MemoryLink
from tests.ranks.stale.simulated.world import Process, World

if TYPE_CHECKING:
    from tests.ranks.stale.simulated.simulation import Simulation

_SILENT_S = 30.0  # as in `JoiningRank`: without any store
_ANSWER_S = 3.0  # as in `JoinRequests`
_TRIES = 3  # as in `JoiningRank`
_RESTART_S = 0.5  # until a process that is started asks to join


class Lobby:
    """Where ranks that come late ask, in place of the store at the ranks' first meeting point (`JoinRequests`)."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._asking: dict[int, Process] = {}
        self._invited: dict[int, Invitation | None] = {}
        self._coming: dict[int, Process | None] = {}  # who has been invited last
        self.open = True
        self.asked_at_s = 0.0

    def wait(self, rank: int, process: Process, anybody: Any) -> Invitation | None:
        """Asks to join; returns None if the run has ended before."""
        self._asking[rank] = process
        heard_s = self._world.now_s
        while self.open and rank not in self._invited:
            process.wait(self._world.now_s + 1.0)
            if anybody():
                heard_s = self._world.now_s
            elif self._world.now_s - heard_s > _SILENT_S:
                break
        self._asking.pop(rank, None)
        return self._invited.pop(rank, None)

    def of(self, process: Process) -> SimpleNamespace:
        """Returns what a member has of it."""

        def asking(ranks: Sequence[int]) -> list[int]:
            found = [rank for rank in ranks if rank in self._asking]
            answer = [r for r in found if self._asking[r].alive and self._world.now_s >= self._asking[r].frozen_until_s]
            if answer != found:
                process.sleep(_ANSWER_S)
                for rank in set(found) - set(answer):
                    self._asking.pop(rank, None)
            return answer

        def invite(rank: int, invitation: Invitation, path: str) -> None:
            asking = self._coming[rank] = self._asking.pop(rank, None)
            self._invited[rank] = invitation
            if asking is not None:
                asking.wake()

        def silent(ranks: Sequence[int], *, for_s: float = _ANSWER_S) -> list[int]:
            """At once: that others have given up too early must do no harm."""
            coming = {rank: self._coming[rank] for rank in ranks}
            return [r for r, p in coming.items() if p is None or not p.alive or self._world.now_s < p.frozen_until_s]

        def close(ranks: Sequence[int]) -> None:
            if process.alive:
                self.open = False

        return SimpleNamespace(
            announce=lambda: None, host=lambda: "", asking=asking, invite=invite, silent=silent,
            close=close,
        )  # fmt: skip


class _Members(Members):
    """Tells the run's notes, not the screen."""

    def __init__(self, rank: int, world_size: int, told: list[str]) -> None:
        super().__init__(rank, world_size)
        self._told = told

    def warn_once(self, text: str, *, speaks: bool | None = None) -> None:
        self._told.append(text)


class _Session(Session):
    """Without a process to fork, and connected in memory.

    Args:
        forked: what rank 0 has of the server.
    """

    def __init__(self, *args: Any, meetings: int, forked: Any) -> None:
        super().__init__(*args, meetings=meetings)
        self._process = forked

    @property
    def address(self) -> Address:
        return Address(near_server="", far_server="", host="memory", port=0, near=())


class Rank:
    """A rank's process.

    Args:
        simulation: where it runs.
        number: of the rank.
        joins: it comes into a run of others.

    Attributes:
        outcome: how it ended; "": it has not.
        told: what it was told to show to people.
        risky: it is where its death ends the run: before there is a server (rank 0: which somebody knows).
        wait_s: how long it waits in a collective [s].
        error_next: an error in the user's code comes with the next chunk.
        slow_until_s: it computes slowly until then [s].
        stopped_s: for how long it was stopped [s].
        was_cut: its connection to the server was cut.
        began_s: when its process began.
        place: where it was last, see `Point`.
        is_in: the others wait for it.
    """

    def __init__(self, simulation: Simulation, number: int, *, joins: bool = False) -> None:
        self.simulation, self.number, self._joins = simulation, number, joins
        self.outcome = ""
        self.told: list[str] = []
        self.risky = not joins
        self.error_next = self.was_cut = False
        self.began_s = 0.0
        self.place = ""
        self.is_in = not joins
        self.slow_until_s, self.wait_s = -math.inf, GROUP_TIMEOUT_S
        self.stopped_s = 0.0
        self.members = _Members(number, simulation.case.ranks, self.told)
        self.members.joining = joins
        self.group: ProcessGroup | None = None if joins else simulation.first_group
        self.index = number
        self.session: _Session | None = None
        self._first_epoch = 0
        self.process = simulation.world.start(f"rank {number}", self._run)
        self.process.at_end.append(lambda: self.leave_group("has died"))

    def leave_group(self, why: str) -> None:
        group, self.group = self.group, None
        if group is not None:
            group.leave(f"rank {self.number} {why}")

    # ---- from beginning to end --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            invitation = None
            if self._joins:
                self.process.sleep(_RESTART_S)
                invitation = self._come()
                if invitation is None:
                    self.outcome = "not let in"
                    return
            self._prepare(invitation)
            self._connect(invitation)
            self.is_in = True
            self._train()
            self.outcome = "done"
        except Exception as error:
            self.outcome = f"{type(error).__name__}: {error}"
            session = self.session
            if session is not None and session.worker is not None and self.is_in:
                session.worker.abort(f"rank {self.number} failed: {self.outcome}", error)
        finally:
            if self.session is not None and self.process.alive:
                self.admission.end()
                self.session.close()

    def _come(self) -> Invitation | None:
        """As `Joining rank.come` and `ElasticDDPStrategy.setup_distributed`."""
        simulation, tries = self.simulation, 0
        while (found := simulation.lobby.wait(self.number, self.process, simulation.anybody)) is not None:
            simulation.point(self.number, "invited")
            try:
                coming = Coming(simulation.store.opened(), found.generation)
                if coming.comes(self.number):
                    self._join_group(found, coming)
                    break
            except RuntimeError:
                tries += 1
                if tries == _TRIES:
                    raise
        return found

    def _join_group(self, invitation: Invitation, coming: Coming) -> None:
        self.members.alive = invitation.members
        rebuild_default_group(
            store=self.simulation.store.opened(),  # type: ignore[arg-type]
            generation=invitation.generation,
            members=invitation.members,
            rank=self.number,
            backend="gloo",
            timeout=None,
            living=lambda: coming.living(invitation.members),
        )

    def _prepare(self, invitation: Invitation | None) -> None:
        """As `StaleRun` and `ElasticDDPStrategy.setup_distributed` do."""
        simulation, members = self.simulation, self.members
        self.trainer: Any = SimpleNamespace(
            callbacks=[], _results=None, default_root_dir=".", current_epoch=0,
            strategy=SimpleNamespace(
                broadcast=self._broadcast, checkpoint_io=SimpleNamespace(remove_checkpoint=lambda path: None)
            ),
        )  # fmt: skip
        met = 0 if invitation is None else invitation.meetings
        first = self.number == 0 and invitation is None
        forked = simulation.server_process(self.process) if first else None
        strategy = SimpleNamespace(members=members, timeout=None)
        self.session = session = _Session(self.trainer, strategy, None, meetings=met, forked=forked)
        channel: Any = SimpleNamespace(rebind=lambda group: None, leave=lambda: None, group=None)
        self.meetings = ServerMeetings(
            self.trainer, session, members, channel, backend="gloo", timeout=None, liveness_s=LIVENESS_S,
            before_epoch=lambda: self.admission.admit(), leave_step=lambda: None,
            take_over_changes=lambda at_end: self._reduce("changes of the model"),
        )  # fmt: skip
        generation = FIRST_GENERATION if invitation is None else invitation.generation
        lobby: Any = simulation.lobby.of(self.process)
        store: Any = SimpleNamespace(reached=lambda: None)
        self.admission = Admission(self.trainer, self.meetings, members, lobby, store=store, generation=generation)
        self.meetings.changed.append(lambda before: self.admission.expect())
        if invitation is not None:
            self._first_epoch = simulation.checkpoints[invitation.checkpoint]
        self.admission.expect()

    def _connect(self, invitation: Invitation | None) -> None:
        simulation, session = self.simulation, self.session
        assert session is not None
        if invitation is None:
            self._collective()  # where the server is
        self.risky = False
        simulation.point(self.number, "connect")
        model = simulation.new_model()
        optimizer = simulation.optimizer(model)
        link = MemoryLink(simulation.wires, self.number, self.process)
        session.worker = worker = Worker(
            link, simulation.layout, [model], list, [optimizer], overlap=False, tell=self.told.append
        )
        link.sign_of_life()
        worker.pull()
        if invitation is not None:
            self.members.joining = False
            simulation.point(self.number, "ready")
            self.admission.come_in()

    def _train(self) -> None:
        case, session = self.simulation.case, self.session
        assert session is not None
        for epoch in range(self._first_epoch, len(case.ends)):
            self.trainer.current_epoch = epoch
            self._callbacks("on_train_epoch_start")
            self._epoch(epoch, case.ends[epoch])
            self._callbacks("on_train_epoch_end")
            self._reduce("reduce mean of the epoch")
        self._callbacks("on_train_end")
        # as `StaleRun.finish`
        self.meetings.meet("training ends")
        if self.members.is_lowest:
            session.fetch_state()
        self.meetings.meet("state is saved")
        self.admission.end()
        session.leave()

    def _callbacks(self, hook: str) -> None:
        """Checkpoints come last, also those that have come among the callbacks meanwhile."""
        for last in (False, True):
            for callback in [c for c in self.trainer.callbacks if isinstance(c, Checkpoint) is last]:
                getattr(callback, hook)(self.trainer, None)

    # ---- an epoch ---------------------------------------------------------------------------------------------

    @property
    def _worker(self) -> Worker:
        assert self.session is not None and self.session.worker is not None
        return self.session.worker

    def _epoch(self, epoch: int, ends: Sequence[int]) -> None:
        """As `GlobalSteps` and `StepLoop` go through it."""
        case, worker = self.simulation.case, self._worker
        worker.begin_epoch(epoch, ends)
        words: deque[int] = deque()
        for global_step in range(len(ends)):
            if not words:
                reply = worker.claim(epoch, global_step)
                while reply.kind is Say.ASSIGNED:
                    reply = self._chunk(epoch, global_step, reply)
                words.extend(reply.numbers)
            words.popleft()
            if not words:
                worker.pull()
            self.simulation.audit.passed(self.number, epoch, global_step)
            if case.save_every and (global_step + 1) % case.save_every == 0 and self.members.is_lowest:
                assert self.session is not None
                self.session.fetch_state()
            if case.validate_every and (global_step + 1) % case.validate_every == 0:
                self._validate()

    def _chunk(self, epoch: int, global_step: int, grant: Reply) -> Reply:
        """Computes what is granted and pushes it; returns the answer."""
        simulation, worker, process = self.simulation, self._worker, self.process
        version = worker.pull()
        simulation.audit.pulled(self.number, grant.version, version)
        chunk = Chunk(grant)
        if not chunk.samples:
            process.sleep(0.01)
            return worker.claim(epoch, global_step)
        positions: list[int] = []
        for piece in chunk.pieces[:1] if simulation.case.substeps else chunk.pieces:
            if positions and worker.wants_return(grant):
                break
            mine = [position for start, end in piece for position in range(start, end)]
            process.sleep(simulation.compute_s(self, len(mine)))
            positions += mine
        if self.error_next:
            simulation.error_raised()
            raise ArithmeticError("an error in the user's code")
        said = Request(
            kind=Ask.PUSH, epoch=epoch, global_step=global_step, assignment=grant.assignment,
            samples=len(positions), weight=1.0
        )  # fmt: skip
        substeps = simulation.case.substeps
        for k in range(substeps):
            self._write(epoch, positions, k, grant.version)
            worker.push(replace(said, substep=k, steps=1, zeroes=1), lambda: 0.5)
            worker.pull()
            process.sleep(simulation.compute_s(self, len(positions)))
        if not substeps:
            self._write(epoch, positions, 0, grant.version)
        steps = 0 if substeps else 1
        last = replace(said, flags=PushFlag.FINAL, substep=substeps, steps=steps, zeroes=steps)
        return worker.push(last, lambda: 0.5)

    def _write(self, epoch: int, positions: Sequence[int], substep: int, base: int) -> None:
        """Puts the gradient there that says whose these samples are."""
        number = self.simulation.audit.pushes(self.number, epoch, positions, substep, base)
        (parameter,) = self._worker.parameters
        gradient = torch.zeros_like(parameter)
        row = gradient.numpy()
        columns = [self.simulation.column(epoch, position) for position in positions]
        row[2 * substep, columns] = -1.0
        row[2 * substep + 1, columns] = -float(number)
        parameter.grad = gradient

    # ---- together ---------------------------------------------------------------------------------------------

    def _collective(self, value: Any = None) -> Any:
        self.simulation.point(self.number, "collective")
        if self.group is None:
            raise RuntimeError("there is no process group")
        self.process.sleep(0.0005)
        return self.group.collective(self.index, self.process, value, timeout_s=self.wait_s)

    def _reduce(self, what: str, value: Any = None) -> Any:
        """As the strategy's collectives do."""
        return self.meetings.together(what, lambda: self._collective(value))

    def _broadcast(self, value: Any, src: int = 0) -> Any:
        return self._reduce("broadcast 0", value)

    def _validate(self) -> None:
        self.meetings.meet("validation starts", pull=True)
        self.process.sleep(0.02)
        self.meetings.meet("validation ends")
        self._reduce("reduce mean of the validation")

    def write_checkpoint(self, path: str) -> None:
        """For a joining rank, in the place of Lightning's."""
        assert self.session is not None
        if self.members.is_lowest:
            self.session.fetch_state()
            self.simulation.checkpoints[path] = self.trainer.current_epoch + 1



def model_of(columns: int, substeps: int) -> nn.Parameter:
    """Returns two rows per substep, or two; see the module."""
    return nn.Parameter(torch.zeros(2 * max(1, substeps), columns, dtype=torch.float64))
