"""Where all live ranks meet, at the server, and what follows if one is missing: new process groups (layer L).

    before Lightning or torchmetrics reduce over ranks:   meet -> who lives, the same version for all
    somebody died since the last meeting:                 process group of those left; validation is divided again
    somebody joins between two epochs [join]:             process group with the newcomer
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint
from torch.utils.data import DataLoader

from lightning_hetero import lightning_compat as compat
from lightning_hetero.stale import report
from lightning_hetero.stale.regroup import rebuild_default_group, shrink_sampler
from lightning_hetero.stale.start import Address

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_hetero.stale.run import StaleRun

__all__ = ["MeetingPoints", "Meetings", "side_group"]


def side_group(timeout: timedelta | None) -> dist.ProcessGroup:
    """Returns a gloo group of the default group's members, for exchanges beside training."""
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    return group


class MeetingPoints(Callback):
    """Before anything of Lightning or torchmetrics reduces over ranks, all live ranks meet at the server.

    Then they hold the same version, and a rank that died meanwhile is out of the group. First among the callbacks.
    """

    def __init__(self, run: StaleRun) -> None:
        self._run = run
        self._validating = set[int]()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        run, ranks = self._run, self._run.alive
        run.meetings.meet("validation starts", pull=True)
        run.agree_on_averages()
        if run.alive != ranks:
            compat.count_val_batches(trainer, begin=True)
        self._validating = set(run.alive)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._run.meetings.meet(f"validation ends{self._run.meetings.logged()}")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._validating - set(self._run.alive):
            self._run.strategy.warn_once(
                "a rank died during this validation: the metrics leave out the samples it was to validate; the next"
                " validation covers all samples again"
            )

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._run.meetings.meet(f"epoch ends{self._run.meetings.logged()}", pull=True)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Before anybody's hook: a newcomer goes through all hooks of its first epoch."""
        self._run.admission.admit()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Before callbacks put their averages in place of the parameters."""
        self._run.meetings.meet("last batch trained", pull=True)
        self._run.agree_on_averages()


class LastPoint(Checkpoint):
    """Saves what a newcomer resumes from, after all hooks of an epoch's end: Lightning puts checkpoints last."""

    def __init__(self, run: StaleRun) -> None:
        self._run = run

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._run.admission.look()


class Meetings:
    """Keeps the ranks of a run together.

    Args:
        run: the fit on this rank; has strategy, trainer, session and the newcomers' admission.
        count: meetings there were before this rank came.

    Attributes:
        count: meetings so far.
        metrics: what the server had counted at the last one, see `stale.meters.Meters`; empty before.
    """

    def __init__(self, run: StaleRun, count: int = 0) -> None:
        self._run = run
        self.count = count
        self.metrics: dict[str, Any] = {}
        self._generation = 0
        self._advised = False
        self._callbacks = compat.trainer_callbacks(run.trainer)
        self._points: list[Callback] = [MeetingPoints(run)]
        self._callbacks.insert(0, self._points[0])
        self._expect_newcomers()

    def meet(self, what: str, *, pull: bool = False) -> None:
        """Waits at the server for all live ranks; leaves the dead behind. Without a server nobody is waited for.

        Args:
            what: the purpose, the same on all ranks; a difference is an error that names both sides.
            pull: take the newest parameters, which are the same for all as nobody computes meanwhile.
        """
        worker, strategy = self._run.worker, self._run.strategy
        if worker is None:
            return
        self.count += 1
        met = worker.meet(self.count, what)
        self.metrics = worker.parse_metrics(met)
        for notice in worker.parse_notices(met):
            strategy.warn_once(notice)
        if not self._advised and (advice := report.advice(self.metrics)) is not None:
            self._advised = True
            strategy.warn_once(advice)
        if pull:
            worker.pull()
        if met.generation != self._generation:
            self._generation = met.generation
            self._regroup(tuple(met.numbers))

    def logged(self) -> str:
        """Names what is reduced when an epoch ends, for `meet`: ranks that log other values would mix them up."""
        names = compat.reduced_names(self._run.trainer)
        return f", logged: {', '.join(names)}" if names else ""

    def _regroup(self, alive: tuple[int, ...]) -> None:
        run, strategy = self._run, self._run.strategy
        if alive == run.alive:
            return
        dead = sorted(set(run.alive) - set(alive))
        self.rebuild(alive, self._generation)
        if strategy.is_global_zero:
            self.announce(run.address)
        self._expect_newcomers()
        if dead:
            strategy.warn_once(
                f"rank {', '.join(map(str, dead))} died; the others go on without, on {len(alive)} devices, with the"
                f" same global batch; its samples were granted to them (epoch {run.trainer.current_epoch})"
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
        run, strategy = self._run, self._run.strategy
        strategy.members = members
        if store is None:
            store = dist.TCPStore(run.address.host, run.address.port, is_master=False)
        rebuild_default_group(
            store=store,
            generation=generation,
            members=members,
            rank=strategy.global_rank,
            backend=strategy.process_group_backend or "gloo",
            timeout=strategy.timeout,
            meeting_s=meeting_s,
        )
        run.channel.rebind(side_group(strategy.timeout))
        for loader in compat.val_loaders(run.trainer):
            if isinstance(loader, DataLoader):
                shrink_sampler(loader, members, strategy.global_rank)
        compat.count_val_batches(run.trainer)

    # ---- those who are missing --------------------------------------------------------------------------------

    def announce(self, address: Address) -> None:
        """Says where a rank that comes late, or again, finds this run; called on the lowest of the ranks."""
        strategy, door = self._run.strategy, self._run.admission.door
        if len(self._run.alive) == strategy.world_size:
            door.announce(address)
        elif reason := door.open(address):
            strategy.warn_once(reason)

    def _expect_newcomers(self) -> None:
        """Looks for them after every epoch once somebody is missing."""
        if len(self._points) == 1 and len(self._run.alive) < self._run.strategy.world_size:
            self._points.append(LastPoint(self._run))
            self._callbacks.append(self._points[1])

    def close(self) -> None:
        """Takes the callbacks out again; idempotent."""
        for point in self._points:
            self._callbacks.remove(point)
        self._points = []
