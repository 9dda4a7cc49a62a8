"""One federated fit on one rank: rounds, local steps and averages inside Lightning's loop (layer L).

    batch begins [rounds] -> local step, nothing sent [local_steps] -> batch ends -> round over? all ranks meet:
        average [averaging] -> plan of the next round [rounds]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_hetero import lightning_compat as compat
from lightning_hetero.base.elastic.ddp import ElasticDDPStrategy
from lightning_hetero.base.elastic.join import Invitation
from lightning_hetero.base.elastic.run_meetings import COLLECTIVE_S, MeetingPoints, MeetingRun, RunMeetings
from lightning_hetero.callbacks.reporting import CountedOnHost, RequeueTogether
from lightning_hetero.federated.decide.rounds import ClientRow, digest_of, engine_metrics, of_all
from lightning_hetero.federated.fit.averaging import Averaging
from lightning_hetero.federated.fit.loaders import OwnBinder
from lightning_hetero.federated.fit.local_steps import LocalSteps
from lightning_hetero.federated.fit.rounds import Rounds
from lightning_hetero.federated.fit.settings import FederatedSettings
from lightning_hetero.measure.device import device_of
from lightning_hetero.types import StepReport


class FederatedRun(MeetingRun[OwnBinder]):
    """Lets the ranks meet where a round ends, before a validation, and when an epoch or the fit ends.

    Args:
        trainer: the running trainer.
        strategy: that of the trainer; with its arguments, and the ranks that take part.
        settings: the arguments that only this engine has.
        invitation: into a run of others.

    Attributes:
        steps: this rank's local steps.
        rounds: where the ranks are in the epoch and in the round.
        counts: counts batches on the host, where it can.
    """

    def __init__(
        self, trainer: Trainer, strategy: ElasticDDPStrategy[Any], settings: FederatedSettings,
        invitation: Invitation | None,
    ) -> None:  # fmt: skip
        shared, self.members = strategy.shared, strategy.members
        settings.check(shared)
        agreed = settings.agreed(shared, strategy.agreed) if invitation is None else None
        store = None if invitation is None else invitation.store
        timeout = strategy.timeout
        if settings.min_clients is not None:  # of some that have just met
            timeout = min(timeout or timedelta(minutes=30), timedelta(seconds=max(COLLECTIVE_S, settings.liveness_s)))
        super().__init__(trainer, timeout=timeout, settings=agreed, store=store)
        if settings.proximal and not self.module.automatic_optimization:
            raise ValueError(
                "proximal > 0 with manual optimization: only user code knows which gradients belong to a step; add the"
                " term to your losses there"
            )
        device, weight_of = device_of(strategy.root_device), shared.weight_in(self.module)
        self.steps = LocalSteps(trainer, device, weight_of, self.events)
        self.undo.callback(self.steps.compiles.close)
        self._averaging = Averaging(trainer, settings, self.channel)
        self.rounds = Rounds(
            trainer, self.channel, shared, settings, self.members, self.steps, self._averaging, self.events
        )
        if settings.min_clients is not None:
            self.clients = self.rounds.clients = RunMeetings(
                trainer, strategy, self, least=settings.min_clients, asked_by="min_clients",
                liveness_s=settings.liveness_s, changed=self.rounds.changed,
            )  # fmt: skip
        self.binder = self.rounds.binder
        self.undo.callback(compat.watch_train_source(trainer, self.binder.announce))
        self.weigh_logs(self.current_samples)
        self.counts = CountedOnHost(trainer, self.steps.count)
        self._settings = settings
        self._places = {rank: (0, 0) for rank in range(trainer.world_size)}  # in their data, where all met last
        self._rows: list[ClientRow] = []
        self._reports: deque[StepReport] = deque(maxlen=64)
        self._last_report: StepReport | None = None
        self._stop = False
        self.undo.callback(compat.replace_sigterm_broadcast(trainer, lambda _: self._stop))
        self._requeue = RequeueTogether(trainer, self.channel.rank)
        self.undo.callback(self._requeue.close)
        self.undo.callback(compat.skip_empty_batches(trainer))
        self.undo.callback(_MeetingPoints(trainer, self).close)

    # ---- what others may ask ----------------------------------------------------------------------------------

    def current_samples(self) -> int | None:
        return self.steps.samples

    @property
    def shares(self) -> tuple[int, ...]:
        return self.rounds.sizes

    def step_report(self) -> StepReport | None:
        return self._last_report

    @property
    def meets(self) -> bool:
        return False

    def take_reports(self) -> list[StepReport]:
        reports = list(self._reports)
        self._reports.clear()
        return reports

    def engine_metrics(self) -> dict[str, float]:
        return engine_metrics(self.rounds.number, self._rows, len(self.present)) if self._rows else {}

    def summary(self) -> str | None:
        """One line on the rounds; ``None`` before the first."""
        if not self._rows:
            return None
        sizes, steps = ("/".join(map(str, numbers)) for numbers in (self.rounds.sizes, self.rounds.local_steps))
        return f"hetero_federated: {self.rounds.number} rounds; batches {sizes}, local steps {steps} at the end"

    def state_dict(self) -> dict[str, Any]:
        """Returns what goes on from the average that the ranks made last."""
        state = self.binder.state_dict()
        if self.rounds.course is None:
            return state
        places = [list(self._places[rank]) for rank in range(self.trainer.world_size)]
        more: dict[str, Any] = {} if self.binder.stream is None else {"used": [taken for _, taken in places]}
        if self._settings.server is not None:
            more["server"] = self._settings.server.state_dict()
        return {**state, "clients": places, **self.rounds.state_dict(), **more}

    def resume(self, state: Mapping[str, Any]) -> None:
        self.binder.resume(state)
        if state.get("engine") != "federated":
            return
        self._rows = []
        places = state.get("clients", ())
        if len(places) == self.trainer.world_size:
            self._places = {rank: (int(passes), int(taken)) for rank, (passes, taken) in enumerate(places)}
        self.rounds.resume(state)
        if self._settings.server is not None and state.get("server"):
            self._settings.server.load_state_dict(state["server"])

    # ---- a local step -----------------------------------------------------------------------------------------

    def dummy_guard(self) -> AbstractContextManager[Any]:
        """Around ``training_step``: no metric and no logged mean counts a batch of weight 0."""
        stack = ExitStack()
        if self.steps.counts_nothing:
            stack.enter_context(compat.metrics_frozen(self.module))
            stack.enter_context(compat.dummy_batch_unlogged(self.trainer))
        return stack

    def pull(self) -> None:
        """Behind a backward pass: FedProx's term, once per local step."""
        steps = self.cuts_step or not compat.accumulates_now(self.trainer)
        if self._settings.proximal and not self.steps.counts_nothing and steps:
            self._averaging.pull()

    @property
    def cuts_step(self) -> bool:
        """Whether the batch that runs is the last of this rank's stream, within an accumulation window."""
        return self.rounds.course is not None and self.rounds.course.cuts_step

    @contextmanager
    def scaled(self, optimizer: Any) -> Iterator[None]:
        """Around an optimizer's step: the learning rate of this rank's local step."""
        factor = self.rounds.plan.lr_factors[self.channel.rank]
        groups = optimizer.param_groups if factor != 1.0 else []
        before = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * factor
        try:
            yield
        finally:
            for group, lr in zip(groups, before, strict=True):
                group["lr"] = lr

    def waiting(self) -> AbstractContextManager[None]:
        """Around a collective that user code asks for: waiting for peers is not this rank's work."""
        return self.steps.watch.paused()

    def batch_over(self) -> None:
        """A batch of Lightning's loop is over; the ranks meet, if the round is."""
        if self.rounds.batch_over():
            self._meet(over=True)

    # ---- all ranks --------------------------------------------------------------------------------------------

    def meet(self, logged: tuple[str, ...] | None = None) -> None:
        """Averages what was trained since the ranks met last, if anything was, within a round or at its end.

        Args:
            logged: names that are about to be reduced over ranks; compared, because ranks would wait for each other.

        Raises:
            RuntimeError: the ranks have logged other names.
        """
        if self.failed:
            return
        if self.steps.unaveraged:
            self._meet(over=False)
        if logged is None:
            return
        names: list[tuple[str, ...]] = self.rounds.gathered("names that are logged", logged)
        if len(set(names)) > 1:
            by_rank = {rank: list(one) for rank, one in zip(self.present, names, strict=True)}
            raise RuntimeError(
                f"the ranks have logged other names in this epoch, which could not be reduced over them: {by_rank}. Log"
                " the same names on all ranks"
            )

    def _meet(self, *, over: bool) -> None:
        self.steps.settle()
        rows, wait_s = self._averaging.meet(self._row, self.members, self.clients)
        self._places |= {r: (int(row.passes), int(row.taken)) for r, row in zip(self.present, rows, strict=True)}
        self._rows = everyone = of_all(rows, self.present, self.trainer.world_size)
        self._stop = any(row.sigterm for row in rows)
        self._requeue.hear(sum(row.requeue for row in rows))
        self.steps.averaged(wait_s)
        if over:
            self._last_report = self.rounds.next(rows, everyone)
            self._reports.append(self._last_report)
        self.rounds.hear(rows)
        self._averaging.remember()

    def _row(self, states: float, tensors: object) -> ClientRow:
        """Returns what this rank tells the others when they meet; see `Averaging.meet`."""
        course, steps = self.rounds.course, self.steps
        assert course is not None
        told_to_stop = bool(getattr(self.trainer, "received_sigterm", False))
        where = compat.epoch_running(self.trainer), course.batch
        did = steps.weight, steps.made, *steps.measured, steps.wait_s
        digest = digest_of(self.rounds.plan, tensors)
        left = 0 if self.binder.stream is None else self.binder.stream.left
        numbers = *where, *did, *self.binder.place, digest, states, left, told_to_stop, self._requeue.take()
        return ClientRow._make(map(float, numbers))

    def start(self) -> None:
        if self.clients is not None:
            self.rounds.fresh = self.members.joining
        super().start()


class _MeetingPoints(MeetingPoints, Callback):
    """All other callbacks see the average; called on ranks that rest, too."""

    def __init__(self, trainer: Trainer, run: FederatedRun) -> None:
        super().__init__(trainer, run.gather_ranks, lambda: run.present)
        self._run = run

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._run.batch_over()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._run.meet()
        super().on_validation_start(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._run.meet(tuple(compat.reduced_names(trainer)))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._run.meet()
