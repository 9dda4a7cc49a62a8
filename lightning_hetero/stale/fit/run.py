"""State of one fit: what it is made of on this rank, and the order in which that starts and ends (layer L)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_hetero import lightning_compat as compat
from lightning_hetero.base.elastic.admission import Admission
from lightning_hetero.base.elastic.ddp import ElasticDDPStrategy
from lightning_hetero.base.elastic.join import FIRST_GENERATION, Invitation, JoinRequests
from lightning_hetero.base.run import EngineRun
from lightning_hetero.callbacks.reporting import RequeueByOne
from lightning_hetero.stale.decide import report
from lightning_hetero.stale.decide.policy import Bsp
from lightning_hetero.stale.decide.report import Counts, Measures
from lightning_hetero.stale.fit.gradient_hooks import watch_gradient_hooks
from lightning_hetero.stale.fit.loaders import AssignedBinder
from lightning_hetero.stale.fit.meetings import ServerMeetings
from lightning_hetero.stale.fit.optimizers import redirect_steps
from lightning_hetero.stale.fit.parts import Parts
from lightning_hetero.stale.fit.refusals import Changed, refuse_different
from lightning_hetero.stale.fit.session import Session
from lightning_hetero.stale.fit.step_loop import StepLoop
from lightning_hetero.stale.runtime.start import Address, ServerSettings
from lightning_hetero.stale.runtime.work.single_samples import normalise_single_samples
from lightning_hetero.stale.runtime.work.worker import Worker
from lightning_hetero.transport.alone import guard_groups
from lightning_hetero.transport.base import LeftBehindError
from lightning_hetero.transport.groups import group_members
from lightning_hetero.transport.run_store import host_store, reach_store
from lightning_hetero.types import StepReport

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class StaleRun(EngineRun[AssignedBinder]):
    """One fit on one rank.

    Args:
        trainer: the running trainer; its process group exists.
        strategy: that of the trainer; with its arguments, and who takes part.
        settings: of the server.
        agreed: what must be the same on all ranks, in words.
        invitation: into a run of others.
        stream: what an `IterableDataset` is.

    Attributes:
        session: this rank's end of the server.
        meetings: where ranks meet.
        admission: where joining ranks come in.
        loop: this rank's global steps; None before training.
    """

    channel_is_idle = True  # it is for set-up and for the order of an epoch

    def __init__(
        self, trainer: Trainer, strategy: ElasticDDPStrategy[Any], settings: ServerSettings,
        agreed: Mapping[str, str] | None, invitation: Invitation | None, stream: Literal["finite"] | None,
    ) -> None:  # fmt: skip
        assert strategy.cluster_environment is not None
        self._members = members = strategy.members
        agreed, store = (agreed, None) if invitation is None else (None, invitation.store)
        super().__init__(trainer, timeout=strategy.timeout, settings=agreed, store=store)
        channel = self.channel
        met = 0 if invitation is None else invitation.meetings
        generation = FIRST_GENERATION if invitation is None else invitation.generation
        self.session = session = Session(trainer, strategy, settings, meetings=met)
        requests = JoinRequests(strategy.cluster_environment)
        self.meetings = ServerMeetings(
            trainer, session, members, channel, backend=strategy.process_group_backend or "gloo",
            timeout=strategy.timeout, liveness_s=settings.liveness_s,
            before_epoch=lambda: self.admission.admit(), leave_step=self._end_epoch,
            take_over_changes=self._take_over_changes,
        )  # fmt: skip
        self.admission = Admission(trainer, self.meetings, members, requests, store=self.store, generation=generation)
        self.admission.expect()
        self.meetings.changed.append(self._regrouped)
        self.binder = AssignedBinder(trainer, channel, members, strategy.shared, stream)
        self.loop: StepLoop | None = None
        self._parts = Parts(trainer)
        self._since = report.Since()  # the last report, of this server
        self._shares: tuple[int, ...] = ()
        self._is_in = invitation is None  # the others wait for this rank
        self._noted = 0  # updates that the last event of the server tells of
        self._strategy = strategy
        self._invited_to = None if invitation is None else Address.of(invitation.address)
        self._stored: Mapping[str, Any] = {}
        self._callback_hooks = ExitStack()
        requeue = RequeueByOne(trainer, lambda: None if self.worker is None else members.is_lowest)
        self.undo.callback(requeue.close)
        self.undo.callback(self.meetings.close)
        self.undo.callback(self.admission.close)
        self.undo.callback(self._callback_hooks.close)

    @property
    def present(self) -> tuple[int, ...]:
        return self._members.alive

    @property
    def worker(self) -> Worker | None:
        """This rank's end of the server; None before training and after it."""
        return self.session.worker

    # ---- training begins --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the server and connects to it; training begins.

        A fit may begin within the fit, as a learning-rate finder's does in a hook: then the server starts again, and
        once more when an epoch of the outer one begins.
        """
        members, joins = self._members, self._members.joining
        if self.session.worker is not None:
            self._disconnect("a fit begins within the fit")
        self._connect()
        if self.loop is None:
            self._begin()
        if joins:
            members.joining = False
            self.admission.come_in()
            self._is_in = True

    def _connect(self) -> None:
        session, binder, address = self.session, self.binder, self._invited_to
        assert binder.source is not None
        session.share()
        if not self._members.joining:
            if self._members.is_lowest:
                state = session.state.get("coordinator") or self._stored.get("server", {})
                # A finder reads rank 0's loss of every batch, and all ranks meet there.
                policy = Bsp() if compat.finds_learning_rate(self.trainer) else None
                address = session.serve(ahead=binder.source.ahead, state=state, policy=policy)
                self.admission.announce()
            address = self.channel.all_gather_object(address)[0]
        assert address is not None
        session.connect(address)
        self._since = report.Since()
        self._callback_hooks.close()  # callbacks may be others now
        self._callback_hooks.callback(compat.skip_empty_batches(self.trainer, self._parts))

    def _disconnect(self, why: str) -> None:
        """All ranks leave the server; what it has is brought back, for another one."""
        self._leave_step()
        self.meetings.meet(why)
        self.session.bring_home()
        self.session.leave()

    def _regrouped(self, before: tuple[int, ...]) -> None:
        """Other ranks take part than before."""
        alive = self._members.alive
        self.admission.expect()
        if 0 in before and 0 not in alive:  # of another's death rank 0 has told, when the server told it
            self._members.warn_once(
                f"rank 0 died; the others go on without, on {len(alive)} devices, with the same global batch: rank"
                f" {alive[0]} writes checkpoints now, loggers of rank 0 log no more"
            )

    def _end_epoch(self) -> None:
        if self.loop is not None:
            self.loop.end_epoch()

    def _leave_step(self) -> None:
        if self.loop is not None:
            self.loop.leave_step()

    def _begin(self) -> None:
        trainer, shared, binder, module = self.trainer, self._strategy.shared, self.binder, self.module
        assert binder.source is not None
        self.loop = binder.steps = StepLoop(
            trainer, self.session, binder.source, weight=shared.weight_in(module),
            sums=shared.loss_reduction == "sum", parts=self._parts, events=self.events,
            before_epoch=self._before_epoch, resume=self._stored.get("applied") or {},
        )  # fmt: skip
        self.weigh_logs(lambda: None if self.loop_in_use is None else self.loop_in_use.computed)
        self.undo.callback(compat.replace_sigterm_broadcast(trainer, lambda _: False))
        self.undo.callback(compat.watch_epoch_values(trainer, self._parts.logged))
        self.undo.callback(normalise_single_samples())
        self.undo.callback(guard_groups())
        self.undo.callback(watch_gradient_hooks(module, lambda: bool(self.current_samples()), self._members.warn_once))
        self.undo.callback(
            redirect_steps(module, trainer.optimizers, self.loop, call=self._call, warn_once=self._members.warn_once)
        )

    def _call(self, index: int, name: str) -> None:
        """All ranks have the server call an optimizer's own method; without a server the optimizers are the ranks'."""
        optimizer = self.trainer.optimizers[index]
        if self.worker is None:
            getattr(type(optimizer), name)(optimizer)
        else:
            self.meetings.meet(f"{name}() of {type(optimizer).__name__}", pull=True, call=index)

    def _before_epoch(self) -> None:
        """A callback may have put other parameters into an optimizer, or other values into them: the server starts
        again with these."""
        if self.session.worker is None:  # a fit within this one has ended
            self._connect()
        elif self.session.outdated:
            self._disconnect("parameters were added to an optimizer")
            self._connect()
        elif self.session.changed().any:  # in on_train_epoch_start; nobody waits there otherwise
            self._take_over_changes(False)

    def _take_over_changes(self, at_end: bool) -> None:
        """The user's code has perhaps changed the model where the ranks met: the server starts again with it.

        Args:
            at_end: it does not, as nobody will train; the lowest rank's buffers count all the same.

        Raises:
            RuntimeError: parameters were changed differently.
        """
        worker = self.session.worker
        if worker is None:
            return
        own = self.session.changed()
        why = "changes of the model other than by optimizers, which all ranks must make"
        everyone: list[Changed] = self.meetings.together(why, lambda: self.channel.all_gather_object(own))
        refuse_different(self._members.alive, everyone)
        self.session.settle_others()
        lowest = everyone[0]
        if not (lowest.trained or lowest.buffers or lowest.new):
            if own.buffers:  # which are not the server's
                worker.weights.discard()
                worker.pull()
        elif at_end:
            for buffer in self.module.buffers():
                dist.broadcast(buffer.data, 0)
        else:
            self._disconnect("the model was changed other than by optimizers")
            self._connect()

    # ---- state ------------------------------------------------------------------------------------------------

    def resume(self, state: Mapping[str, Any]) -> None:
        self._leave_step()  # a finder restores its checkpoint also after an error inside a batch
        self._stored = state
        self.binder.resume(state)
        self.session.state = {}

    def state_dict(self) -> dict[str, Any]:
        server = self.session.state.get("coordinator", {})
        applied = {}
        if self.loop is not None and server:
            # Lightning's global step: while a rank fails, the others may go on, and the server with them.
            global_step = min(server["tick"], compat.batches_trained(self.trainer))
            applied = {"epoch": server["epoch"], "tick": global_step, "spans": server["applied"]}
        own = {"world_size": self._members.world_size, "applied": applied, "server": server}
        if used := server.get("used"):  # samples of each rank's own stream
            own["used"] = [used.get(rank, 0) for rank in range(self._members.world_size)]
        return {**self.binder.state_dict(), **own}

    # ---- what others may ask ----------------------------------------------------------------------------------

    @property
    def loop_in_use(self) -> StepLoop | None:
        """This rank's global steps, while it trains and is connected."""
        return self.loop if self.worker is not None and self.trainer.training else None

    def trained(self) -> tuple[int, int] | None:
        return None if self.loop is None else self.loop.at.trained()

    def current_samples(self) -> int | None:
        """Samples of the batch this rank is training on; 0 means a dummy that counts nothing."""
        loop = self.loop_in_use
        return loop.samples if loop is not None else None

    def ask_report(self) -> None:
        if (worker := self.worker) is not None:
            worker.ask_measures()

    @property
    def shares(self) -> tuple[int, ...]:
        """Of the batch that was present when the server was last asked, by a report or metric; it is not asked now."""
        return self._shares

    def step_report(self) -> StepReport | None:
        """Per rank samples, own work and waiting per update, since this rank's last call.

        Asks the server, unless the last answer has brought it, see `ask_report`. ``None`` outside of training, if
        nothing was updated since, and while a report that was asked for has not come.
        """
        measures = self._measures()
        return None if measures is None else self._since.report(measures, self._members.world_size)

    @property
    def meets(self) -> bool:
        return False

    def engine_metrics(self) -> dict[str, float]:
        """Staleness, wasted work and the server's times so far, see `report.engine_metrics`; asks as `step_report`."""
        measures = self._measures()
        return {} if measures is None else report.engine_metrics(measures, self._members.world_size)

    def summary(self) -> str | None:
        """One line on who did how much and how stale it was; ``None`` outside of training or before an update."""
        worker = self.worker
        return None if worker is None else report.summary(worker.measures(), self._members.world_size)

    def _measures(self) -> Measures | None:
        worker = self.worker
        if worker is None or worker.awaits_measures:
            return None
        measures = worker.brought or worker.measures()
        if any(measures.shares):
            self._shares = measures.shares
        self._note(measures.counts, measures.epoch, measures.global_step)
        return measures

    def _note(self, counts: Counts, epoch: int, global_step: int) -> None:
        """Has one rank report what the server has counted, if there is anything new."""
        if self._members.is_lowest and counts.updates != self._noted:
            self._noted = counts.updates
            self.events.note("server", epoch, global_step, counts.as_dict())

    # ---- training ends ----------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Training is over: everything comes home, the server ends."""
        session = self.session
        if session.worker is None:
            return
        self.meetings.meet("training ends")
        session.bring_home()
        if self.meetings.counts is not None and self._members.is_lowest:  # others' last updates came after its own
            last = session.state["coordinator"]
            self._note(self.meetings.counts, last["epoch"], last["tick"])
        self.meetings.meet("state is saved")
        self.admission.end()
        self._outlive_server()
        session.leave()

    def _outlive_server(self) -> None:
        """The group of the ranks that are left gets a store that does not end with the server, for what comes next."""
        if group_members() is None:  # nobody has died: it is torch's own
            return
        members, strategy, hosted = self._members, self._strategy, None
        if members.is_lowest:
            hosted = host_store(strategy.host_name(), self.session.patience)
        host, port = self.channel.all_gather_object(None if hosted is None else (strategy.host_name(), hosted.port))[0]
        store = reach_store(host, port) if hosted is None else hosted  # lives with the group
        self.meetings.rebuild(store, 0)

    def sizes_differ(self, error: BaseException, *again: Callable[..., Any]) -> bool:
        return super().sizes_differ(error, StepLoop._end_batch, *again)

    def fail(self, error: BaseException) -> None:
        """This rank failed: tells the others why."""
        super().fail(error)
        if self.worker is not None and self.ends_others(error):  # else its connection ends
            self.worker.abort(f"rank {self._members.rank} failed: {type(error).__name__}: {error}", error)

    def ends_others(self, error: BaseException) -> bool:
        """They go on if it was only told to go (SIGTERM), was left behind, or is not yet one of them."""
        told_to_go = isinstance(error, SIGTERMException) and not self._members.is_lowest
        return self._is_in and not told_to_go and not isinstance(error, LeftBehindError)

    def close(self) -> None:
        self.binder.close()
        self.undo.close()
        self.admission.end()
        self.session.close()
        super().close()
