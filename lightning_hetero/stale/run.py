"""State of one fit: the server's process, this rank's link to it, the bound loader, and where ranks meet (layer L)."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint
from torch.utils.data import DataLoader

from lightning_hetero import lightning_compat as compat
from lightning_hetero._version import __version__
from lightning_hetero.data.loader import inspect_loader
from lightning_hetero.data.ticks import SampleSource, TickSampler, tick_loader
from lightning_hetero.glue.checks import check_same_settings
from lightning_hetero.glue.orders import OrderFinder
from lightning_hetero.glue.setup import own_memory
from lightning_hetero.stale import report
from lightning_hetero.stale.join import FIRST_GENERATION, Admission, Door
from lightning_hetero.stale.layout import FlatLayout
from lightning_hetero.stale.loop import TickLoop
from lightning_hetero.stale.norms import normalise_single_samples
from lightning_hetero.stale.process import ServerProcess, host_store
from lightning_hetero.stale.regroup import group_members, rebuild_default_group, shrink_sampler
from lightning_hetero.stale.start import Address, connect, start_server
from lightning_hetero.stale.takeover import take_over
from lightning_hetero.stale.worker import Worker
from lightning_hetero.transport.side_channel import SideChannel

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_hetero.stale.strategy import BoundedStalenessStrategy

__all__ = ["MeetingPoints", "StaleRun"]


class MeetingPoints(Callback):
    """Before anything of Lightning or torchmetrics reduces over ranks, all live ranks meet at the server.

    Then they hold the same version, and a rank that died meanwhile is out of the group. First among the callbacks.
    """

    def __init__(self, run: StaleRun) -> None:
        self._run = run
        self._validating = set[int]()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        ranks = self._run.alive
        self._run.meet("validation starts", pull=True)
        self._run.agree_on_averages()
        if self._run.alive != ranks:
            compat.count_val_batches(trainer, begin=True)
        self._validating = set(self._run.alive)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._run.meet(f"validation ends{self._run.logged()}")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._validating - set(self._run.alive):
            self._run.strategy.warn_once(
                "a rank died during this validation: the metrics leave out the samples it was to validate; the next"
                " validation covers all samples again"
            )

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._run.meet(f"epoch ends{self._run.logged()}", pull=True)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Before anybody's hook: a newcomer goes through all hooks of its first epoch."""
        self._run.admission.admit()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Before callbacks put their averages in place of the parameters."""
        self._run.meet("last batch trained", pull=True)
        self._run.agree_on_averages()


class LastPoint(Checkpoint):
    """Saves what a newcomer resumes from, after all hooks of an epoch's end: Lightning puts checkpoints last."""

    def __init__(self, run: StaleRun) -> None:
        self._run = run

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._run.admission.look()


class StaleRun:
    """One fit on one rank.

    Args:
        strategy: gives settings, device and timeout; its process group exists.
        trainer: the running trainer.
    """

    def __init__(self, strategy: BoundedStalenessStrategy, trainer: Trainer) -> None:
        self.strategy = strategy
        self.trainer = trainer
        module = trainer.lightning_module
        if strategy.world_size > 1:
            own_memory(module)
        self.channel = SideChannel(self._new_group())
        newcomer = strategy.newcomer
        if newcomer is None:
            check_same_settings(self.channel.all_gather_object(self._fingerprint()))
        self.orders = OrderFinder(
            trainer,
            self.channel,
            strategy_name=type(strategy).__name__,
            global_batch_size=strategy.settings_global_batch_size,
            batch_sampler=strategy.batch_sampler,
            stream=None,
        )
        self.sampler: TickSampler | None = None
        self.source: SampleSource | None = None
        self.loop: TickLoop | None = None
        self.worker: Worker | None = None
        self.server_process: ServerProcess | None = None
        self.failed = False
        self.resume: Mapping[str, Any] = {}
        invitation = newcomer.invitation if newcomer is not None else None
        self.meetings = 0 if invitation is None else invitation.meetings
        assert strategy.cluster_environment is not None
        door = Door(strategy.cluster_environment)
        self.admission = Admission(self, door, FIRST_GENERATION if invitation is None else invitation.generation)
        self.metrics: dict[str, Any] = {}
        self.since = report.Since()
        self._advised = False
        self._batch_size: int | None = None
        self.address: Address | None = None if invitation is None else invitation.address
        self._generation = 0
        self._signature: tuple[Any, ...] = ()
        self.state: dict[str, Any] = {}
        self._undo: list[Callable[[], None]] = [compat.keep_train_sampler(trainer)]
        points, callbacks = MeetingPoints(self), compat.trainer_callbacks(trainer)
        callbacks.insert(0, points)
        self._undo.append(lambda: callbacks.remove(points))
        self._last_point: LastPoint | None = None
        self._expect_newcomers()

    @property
    def alive(self) -> tuple[int, ...]:
        """The ranks that are left."""
        return self.strategy.members

    def _new_group(self) -> dist.ProcessGroup:
        group = dist.new_group(backend="gloo", timeout=self.strategy.timeout)
        assert isinstance(group, dist.ProcessGroup)
        return group

    def _fingerprint(self) -> dict[str, str]:
        return {
            "lightning_hetero": __version__,
            "torch": torch.__version__,
            "accumulate_grad_batches": str(self.trainer.accumulate_grad_batches),
            **self.strategy.settings(),
        }

    # ---- the train loader -------------------------------------------------------------------------------------

    def process(self, loader: object) -> DataLoader:
        """Returns the copy of the train loader that trains what the server grants.

        Raises:
            TypeError, ValueError: the loader's samples cannot be granted one by one, or the ranks' loaders differ.
        """
        spec = inspect_loader(loader)
        assert isinstance(loader, DataLoader)
        if spec.kind == "stream":
            raise TypeError(
                "the train dataset is an IterableDataset, whose samples have no positions that could be granted to one"
                " rank or another; use a map-style dataset, strategy='hetero_balanced' or strategy='ddp'"
            )
        if self.sampler is not None and self.loop is None:
            raise TypeError(
                "several train loaders: samples are granted from one order, which several loaders do not have. Combine"
                " the datasets (torch.utils.data.StackDataset or ConcatDataset), or use strategy='hetero_balanced'"
            )
        newcomer = self.strategy.newcomer
        if newcomer is None:
            self.orders.agree(spec)
        elif spec.kind != "plain":
            raise TypeError(
                "a rank cannot join a run whose order of samples the ranks draw together (a sampler or batch sampler of"
                " your own): start all ranks again from the last checkpoint"
            )
        if spec.kind == "plain" and (size := self._settled_batch(spec.batch_size)) is not None:
            self.orders.settle(size)
        order = self.orders.order(loader, spec, 0)
        self.orders.check_position(order.global_batch_size)
        self._batch_size = spec.batch_size
        self.sampler = TickSampler(order)
        self.source = SampleSource(loader)
        if self.loop is not None:
            self.loop.bind(self.sampler, self.source)
        self.sampler.set_epoch(compat.epoch_running(self.trainer))
        return tick_loader(loader, self.sampler, self.source, self._ticks)

    def _settled_batch(self, batch_size: int | None) -> int | None:
        """Samples of a global batch that do not follow from the number of ranks that are here, if so."""
        stored, devices = self.resume.get("global_batch_size"), self.strategy.world_size
        if self.strategy.newcomer is not None:
            return stored  # what the members have, whatever they once resumed from
        if stored or batch_size is None or self.strategy.settings_global_batch_size or len(self.alive) == devices:
            return None
        return batch_size * devices  # a rank died in an earlier fit: batches stay as large as they were then

    def _ticks(self, iterator: object) -> Iterator[Any]:
        if self.loop is None or not compat.is_train_iterator(self.trainer, iterator):
            return self._look()
        return self.loop.ticks()

    def _look(self) -> Iterator[Any]:
        """What stock DDP would show to somebody who looks at the loader: equal parts. Nothing is claimed."""
        sampler, source = self.sampler, self.source
        assert sampler is not None and source is not None
        rank, world = self.strategy.global_rank, self.strategy.world_size
        start = 0
        for end in sampler.ends:
            part = range(start + rank * (end - start) // world, start + (rank + 1) * (end - start) // world)
            yield source.look([sampler.indices[p] for p in part] or [sampler.indices[start]])
            start = end

    @property
    def global_batch_size(self) -> int | None:
        """Samples per update."""
        return None if self.sampler is None else self.sampler.order.global_batch_size

    # ---- the server -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the server and connects to it; training begins."""
        trainer, strategy = self.trainer, self.strategy
        assert self.sampler is not None and self.source is not None
        module = trainer.lightning_module
        optimizers = strategy.optimizers
        named = {id(p): (name, p) for name, p in module.named_parameters()}
        owned = {id(p): p for o in optimizers for g in o.param_groups for p in g["params"]}
        stray = [tuple(p.shape) for i, p in owned.items() if i not in named]
        if stray:
            raise ValueError(
                f"an optimizer updates {len(stray)} parameters that are not the LightningModule's (shapes"
                f" {stray[:3]}); register their module on the LightningModule"
            )
        entries = [entry for i, entry in named.items() if i in owned]
        buffers = [(name, b) for name, b in module.named_buffers()]
        layout = FlatLayout.of(entries, buffers, optimizers=optimizers, codec=strategy.server_settings.codec)
        newcomer = strategy.newcomer
        if newcomer is None and strategy.is_global_zero:
            per_node = strategy.num_processes
            near = range(per_node) if strategy.transport != "pairs" else ()
            self.server_process, self.address = start_server(
                layout=layout,
                parameters=[p for _, p in entries],
                buffers=[b for _, b in buffers],
                optimizers=optimizers,
                settings=strategy.server_settings,
                ranks=self.alive,
                near=near,
                far=[r for r in range(strategy.world_size) if r not in near],
                ahead=self.source.ahead,
                state=dict(self.state.get("coordinator") or self.resume.get("server", {})),
                host=self._host(),
                timeout=strategy.timeout or timedelta(minutes=30),
            )
            self._announce()
        if newcomer is None:
            self.address = self._broadcast(self.address)
        assert self.address is not None
        link = connect(self.address, strategy.global_rank, layout, strategy.timeout or timedelta(minutes=30))
        self.worker = Worker(
            link, layout, [p for _, p in entries], [b for _, b in buffers], optimizers,
            codec=strategy.server_settings.codec,
            # A scaler divides gradients in place after the backward pass, where no hook sees it.
            overlap=None if getattr(strategy.precision_plugin, "scaler", None) is None else False,
        )  # fmt: skip
        self.worker.attach()
        self.worker.pull()
        self._signature = self._groups()
        if not strategy.is_global_zero:
            for optimizer in optimizers:  # it lives in the server now
                optimizer.state.clear()
        if self.loop is None:
            self.loop = TickLoop(
                trainer,
                strategy,
                self.worker,
                self.sampler,
                self.source,
                before_epoch=self._before_epoch,
                resume=self.resume.get("applied") or {},
                weight=strategy.batch_weight or getattr(module, "batch_weight", None),
                sums=strategy.server_settings.divide_by is not None,
            )
            self._undo.append(compat.stop_sigterm_broadcast(trainer))
            self._undo.append(compat.skip_empty_batches(trainer))
            self._undo.append(normalise_single_samples(module))
            self._undo.append(take_over(module, optimizers, self.loop, strategy.warn_once))
        if newcomer is not None:
            strategy.newcomer = None
            dist.barrier()  # the members wait for this: from here on all is as it is for them

    def _announce(self) -> None:
        """Says where a rank that comes late, or again, finds this run."""
        assert self.address is not None
        door = self.admission.door
        if len(self.alive) == self.strategy.world_size:
            door.announce(self.address)
        elif reason := door.open(self.address):
            self.strategy.warn_once(reason)

    def _expect_newcomers(self) -> None:
        """Looks for them after every epoch once somebody is missing."""
        if self._last_point is None and len(self.alive) < self.strategy.world_size:
            callbacks = compat.trainer_callbacks(self.trainer)
            point = self._last_point = LastPoint(self)
            callbacks.append(point)
            self._undo.append(lambda: callbacks.remove(point))

    def _host(self) -> str:
        if self.strategy.num_nodes == 1:
            return "127.0.0.1"
        assert self.strategy.cluster_environment is not None
        if self.strategy.node_rank:  # rank 0 died in an earlier fit
            return socket.gethostname()
        return self.strategy.cluster_environment.main_address

    def _broadcast(self, value: Any) -> Any:
        box = [value]
        dist.broadcast_object_list(box, 0)
        return box[0]

    def _groups(self) -> tuple[Any, ...]:
        """What the server was started with: parameters of each group of each optimizer."""
        return tuple(
            tuple(tuple(id(p) for p in g["params"]) for g in o.param_groups) for o in self.strategy.optimizers
        )

    def _before_epoch(self) -> Worker:
        """A callback may have unfrozen layers by adding them to an optimizer: the server starts again with them."""
        if self._groups() != self._signature:
            self.meet("parameters were added to an optimizer")
            self._bring_home()
            self._leave()
            self.start()
        assert self.worker is not None
        return self.worker

    # ---- meeting ----------------------------------------------------------------------------------------------

    def meet(self, what: str, *, pull: bool = False) -> None:
        """Waits at the server for all live ranks; leaves the dead behind.

        Args:
            what: the purpose, the same on all ranks; a difference is an error that names both sides.
            pull: take the newest parameters, which are the same for all as nobody computes meanwhile.
        """
        if self.worker is None:
            return
        self.meetings += 1
        met = self.worker.meet(self.meetings, what)
        self.metrics = self.worker.parse_metrics(met)
        for notice in self.worker.parse_notices(met):
            self.strategy.warn_once(notice)
        if not self._advised and (advice := report.advice(self.metrics)) is not None:
            self._advised = True
            self.strategy.warn_once(advice)
        if pull:
            self.worker.pull()
        if met.generation != self._generation:
            self._generation = met.generation
            self._regroup(tuple(met.numbers))

    def logged(self) -> str:
        """Names what is reduced when an epoch ends, for `meet`: ranks that log other values would mix them up."""
        names = compat.reduced_names(self.trainer)
        return f", logged: {', '.join(names)}" if names else ""

    def _regroup(self, alive: tuple[int, ...]) -> None:
        strategy = self.strategy
        if alive == self.alive:
            return
        dead = sorted(set(self.alive) - set(alive))
        self.rebuild(alive, self._generation)
        if strategy.is_global_zero:
            self._announce()
        self._expect_newcomers()
        if dead:
            strategy.warn_once(
                f"rank {', '.join(map(str, dead))} died; the others go on without, on {len(alive)} devices, with the"
                f" same global batch; its samples were granted to them (epoch {self.trainer.current_epoch})"
                + (f"; rank {alive[0]} writes checkpoints now, loggers of rank 0 log no more" if 0 in dead else "")
            )

    def rebuild(
        self, members: tuple[int, ...], generation: int, *, meeting_s: float = 60.0, store: dist.Store | None = None
    ) -> None:
        """Makes new process groups of ``members``, all of whom call this; validation is divided among them.

        Args:
            members: ranks.
            generation: not used before with this store.
            meeting_s: how long to wait for them [s].
            store: where they meet; default the server's.
        """
        strategy = self.strategy
        strategy.members = members
        if store is None:
            assert self.address is not None
            store = dist.TCPStore(self.address.host, self.address.port, is_master=False)
        rebuild_default_group(
            store=store,
            generation=generation,
            members=members,
            rank=strategy.global_rank,
            backend=strategy.process_group_backend or "gloo",
            timeout=strategy.timeout,
            meeting_s=meeting_s,
        )
        self.channel.rebind(self._new_group())
        for loader in compat.val_loaders(self.trainer):
            if isinstance(loader, DataLoader):
                shrink_sampler(loader, members, strategy.global_rank)
        compat.count_val_batches(self.trainer)

    # ---- state ------------------------------------------------------------------------------------------------

    def fetch_state(self) -> dict[str, Any]:
        """Returns the server's state (rank 0) with the parameters of the very same version on this rank."""
        worker = self.worker
        assert worker is not None
        while True:
            state = worker.state()
            # What callbacks have put in place of the newest parameters, e.g. averages, stays.
            if (worker.version if worker.is_newest else worker.pull()) == state["version"]:
                self.state = state
                return state

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
            "global_batch_size": self.global_batch_size,
            "batch_size": self._batch_size,
            "orders": [self.sampler.order.state_dict()] if self.sampler is not None else [],
            "applied": applied,
            "server": server,
        }

    def _bring_home(self) -> None:
        """The server's optimizer state goes back into this process's optimizers (rank 0: it writes checkpoints)."""
        if self.strategy.is_global_zero:
            state = self.fetch_state()
            known = zip(self.strategy.optimizers, self._signature, state["optimizers"], strict=True)
            for optimizer, groups, own in known:
                before = dict(enumerate(i for group in groups for i in group))
                held = {before[index]: entry for index, entry in own["state"].items()}
                present = [id(p) for group in optimizer.param_groups for p in group["params"]]  # perhaps more than then
                entries = {index: held[i] for index, i in enumerate(present) if i in held}
                optimizer.load_state_dict(
                    {"state": entries, "param_groups": optimizer.state_dict()["param_groups"]}
                )

    def _leave(self) -> None:
        worker, self.worker = self.worker, None
        if worker is not None:
            worker.detach()
            worker.leave()
            worker.link.close()
        process, self.server_process = self.server_process, None
        if process is not None:
            process.stop(10.0)

    def finish(self) -> None:
        """Training is over: everything comes home, the server ends."""
        if self.worker is None:
            return
        self.meet("training ends")
        self._bring_home()
        self.meet("state is saved")
        self.admission.end()
        self._outlive_server()
        self._leave()

    def _outlive_server(self) -> None:
        """The group of the ranks that are left gets a store that does not end with the server, for what comes next."""
        if group_members() is None:  # nobody has died: it is torch's own
            return
        strategy = self.strategy
        hosted = None
        if strategy.is_global_zero:
            hosted = host_store(self._host(), strategy.timeout or timedelta(minutes=30))
        host, port = self._broadcast(None if hosted is None else (self._host(), hosted.port))
        store = dist.TCPStore(host, port, is_master=False) if hosted is None else hosted  # lives with the group
        self.rebuild(self.alive, 0, store=store)

    def abort(self, text: str) -> None:
        """This rank failed: tell the others why."""
        self.failed = True
        if self.worker is not None:
            self.worker.abort(text)

    def close(self) -> None:
        """Ends the run; after a failure without waiting for anybody."""
        if self.source is not None:
            self.source.end()
        for undo in reversed(self._undo):
            undo()
        self._undo = []
        self.admission.end()
        worker, self.worker = self.worker, None
        if worker is not None:
            worker.detach()
            worker.link.close()
        process, self.server_process = self.server_process, None
        if process is not None:
            process.stop(5.0)
        self.channel.close(destroy=not self.failed)
