"""State of one fit: what it is made of on this rank, and the order in which that starts and ends (layer L)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from lightning_hetero import lightning_compat as compat
from lightning_hetero._version import __version__
from lightning_hetero.glue.checks import check_same_settings
from lightning_hetero.glue.setup import own_memory
from lightning_hetero.stale import report
from lightning_hetero.stale.join import FIRST_GENERATION, Admission, Door
from lightning_hetero.stale.loaders import LoaderBinder
from lightning_hetero.stale.loop import TickLoop
from lightning_hetero.stale.meetings import Meetings, side_group
from lightning_hetero.stale.norms import normalise_single_samples
from lightning_hetero.stale.process import host_store
from lightning_hetero.stale.regroup import group_members
from lightning_hetero.stale.session import Session, host_name, patience
from lightning_hetero.stale.start import Address
from lightning_hetero.stale.takeover import take_over
from lightning_hetero.stale.worker import Worker
from lightning_hetero.transport.side_channel import SideChannel

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_hetero.stale.strategy import BoundedStalenessStrategy

__all__ = ["StaleRun"]


class StaleRun:
    """One fit on one rank.

    Args:
        strategy: gives settings, device and timeout; its process group exists.
        trainer: the running trainer.

    Attributes:
        channel: blocking exchanges of all ranks.
        binder: the train loader.
        meetings: where ranks meet.
        admission: where newcomers come in.
        loop: this rank's ticks; None before training.
        since: for reports of what the server has counted.
        state: of the server, as fetched last for a checkpoint.
        failed: this rank has failed.
    """

    def __init__(self, strategy: BoundedStalenessStrategy, trainer: Trainer) -> None:
        self.strategy = strategy
        self.trainer = trainer
        if strategy.world_size > 1:
            own_memory(trainer.lightning_module)
        self.channel = SideChannel(side_group(strategy.timeout))
        newcomer = strategy.newcomer
        if newcomer is None:
            check_same_settings(self.channel.all_gather_object(self._fingerprint()))
        invitation = newcomer.invitation if newcomer is not None else None
        assert strategy.cluster_environment is not None
        door = Door(strategy.cluster_environment)
        self.admission = Admission(self, door, FIRST_GENERATION if invitation is None else invitation.generation)
        self.binder = LoaderBinder(self)
        self.loop: TickLoop | None = None
        self.since = report.Since()
        self.state: dict[str, Any] = {}
        self.failed = False
        self._session: Session | None = None
        self._invited_to: Address | None = None if invitation is None else invitation.address
        self._stored: Mapping[str, Any] = {}
        self._undo: list[Callable[[], None]] = [compat.keep_train_sampler(trainer)]
        self.meetings = Meetings(self, 0 if invitation is None else invitation.meetings)
        self._undo.append(self.meetings.close)

    def _fingerprint(self) -> dict[str, str]:
        return {
            "lightning_hetero": __version__,
            "torch": torch.__version__,
            "accumulate_grad_batches": str(self.trainer.accumulate_grad_batches),
            **self.strategy.settings(),
        }

    @property
    def alive(self) -> tuple[int, ...]:
        """The ranks that are left."""
        return self.strategy.members

    @property
    def worker(self) -> Worker | None:
        """This rank's end of the server; None before training and after it."""
        session = self._session  # once: other threads ask, too
        return None if session is None else session.worker

    @property
    def address(self) -> Address:
        """Of the server; there while this rank is connected."""
        assert self._session is not None and self._session.address is not None
        return self._session.address

    # ---- training begins --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the server and connects to it; training begins."""
        trainer, strategy, binder = self.trainer, self.strategy, self.binder
        module = trainer.lightning_module
        assert binder.sampler is not None and binder.source is not None
        session = self._session = Session(strategy, module)
        newcomer, address = strategy.newcomer, self._invited_to
        if newcomer is None:
            if strategy.is_global_zero:
                state = self.state.get("coordinator") or self._stored.get("server", {})
                address = session.serve(members=self.alive, ahead=binder.source.ahead, state=state)
                self.meetings.announce(address)
            address = self._broadcast(address)
        assert address is not None
        session.connect(address)
        assert session.worker is not None
        if self.loop is None:
            self.loop = TickLoop(
                trainer,
                strategy,
                session.worker,
                binder.sampler,
                binder.source,
                before_epoch=self._before_epoch,
                resume=self._stored.get("applied") or {},
                weight=strategy.batch_weight or getattr(module, "batch_weight", None),
                sums=strategy.server_settings.divide_by is not None,
            )
            self._undo.append(compat.stop_sigterm_broadcast(trainer))
            self._undo.append(compat.skip_empty_batches(trainer))
            self._undo.append(normalise_single_samples(module))
            self._undo.append(take_over(module, strategy.optimizers, self.loop, strategy.warn_once))
        if newcomer is not None:
            strategy.newcomer = None
            dist.barrier()  # the members wait for this: from here on all is as it is for them

    def _broadcast(self, value: Any) -> Any:
        """Returns the value of the lowest of the ranks."""
        box = [value]
        dist.broadcast_object_list(box, 0)
        return box[0]

    def _before_epoch(self) -> Worker:
        """A callback may have unfrozen layers by adding them to an optimizer: the server starts again with them."""
        assert self._session is not None
        if self._session.outdated:
            self.meetings.meet("parameters were added to an optimizer")
            self._bring_home(self._session)
            self._leave(self._session)
            self.start()
        assert self.worker is not None
        return self.worker

    # ---- state ------------------------------------------------------------------------------------------------

    def resume(self, stored: Mapping[str, Any]) -> None:
        """Takes the state of a checkpoint, of this strategy or another; empty for one of stock DDP."""
        self._stored = stored
        self.binder.resume(stored)
        self.state = {}

    def fetch_state(self) -> None:
        """Renews `state` (lowest rank), with the parameters of the very same version on this rank."""
        assert self._session is not None
        self.state = self._session.fetch_state()

    def agree_on_averages(self) -> None:
        """Averaged weights are rank 0's on all ranks: a rank that a tick went by without has not seen its version."""
        if self.worker is not None and len(self.alive) > 1:
            for tensor in compat.averaged_weights(self.trainer):
                dist.broadcast(tensor.data, 0)  # the lowest of those left

    def checkpoint(self) -> dict[str, Any]:
        """Returns what a resumed run needs, as plain types."""
        server = self.state.get("coordinator", {})
        applied = {}
        if self.loop is not None and server:
            # Lightning's tick: while a rank fails, the others may go on, and the server with them.
            tick = min(server["tick"], compat.batches_trained(self.trainer))
            applied = {"epoch": server["epoch"], "tick": tick, "spans": server["applied"]}
        return {
            "world_size": self.strategy.world_size,
            **self.binder.state_dict(),
            "applied": applied,
            "server": server,
        }

    # ---- training ends ----------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Training is over: everything comes home, the server ends."""
        session = self._session
        if session is None or session.worker is None:
            return
        self.meetings.meet("training ends")
        self._bring_home(session)
        self.meetings.meet("state is saved")
        self.admission.end()
        self._outlive_server()
        self._leave(session)

    def _bring_home(self, session: Session) -> None:
        """The optimizers' state comes back to the lowest rank, which writes checkpoints."""
        if self.strategy.is_global_zero:
            self.fetch_state()
            session.bring_home(self.state)

    def _leave(self, session: Session) -> None:
        session.leave()
        self._session = None

    def _outlive_server(self) -> None:
        """The group of the ranks that are left gets a store that does not end with the server, for what comes next."""
        if group_members() is None:  # nobody has died: it is torch's own
            return
        strategy, hosted = self.strategy, None
        if strategy.is_global_zero:
            hosted = host_store(host_name(strategy), patience(strategy))
        host, port = self._broadcast(None if hosted is None else (host_name(strategy), hosted.port))
        store = dist.TCPStore(host, port, is_master=False) if hosted is None else hosted  # lives with the group
        self.meetings.rebuild(self.alive, 0, store=store)

    def abort(self, text: str) -> None:
        """This rank failed: tell the others why."""
        self.failed = True
        if self.worker is not None:
            self.worker.abort(text)

    def close(self) -> None:
        """Ends the run; after a failure without waiting for anybody."""
        self.binder.close()
        for undo in reversed(self._undo):
            undo()
        self._undo = []
        self.admission.end()
        session, self._session = self._session, None
        if session is not None:
            session.close()
        self.channel.close(destroy=not self.failed)
