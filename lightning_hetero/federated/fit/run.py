"""State of one federated fit on one rank (layer L).

    slot begins [loaders] -> local step, nothing sent -> slot ends [meetings] -> round over? all ranks meet:
        rows of numbers -> weighted average of parameters, buffers, optimizer states -> server -> plan of the next round
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lightning_hetero import lightning_compat as compat
from lightning_hetero.base.elastic.ddp import ElasticRun
from lightning_hetero.base.elastic.join import Invitation
from lightning_hetero.base.elastic.members import Members
from lightning_hetero.base.loaders import SharedSettings
from lightning_hetero.callbacks.requeue import RequeueTogether
from lightning_hetero.callbacks.work import CountedOnHost
from lightning_hetero.federated.decide.policy import AdaptiveSteps
from lightning_hetero.federated.decide.report import engine_metrics, step_report
from lightning_hetero.federated.decide.rounds import (
    Client,
    ClientRow,
    Course,
    RoundPlan,
    chosen_ranks,
    digest_of,
    disagreement,
    of_all,
)
from lightning_hetero.federated.fit.clients import Clients, ClientSettings
from lightning_hetero.federated.fit.common import CommonState
from lightning_hetero.federated.fit.division import Division
from lightning_hetero.federated.fit.loaders import OwnBinder
from lightning_hetero.federated.fit.meetings import meeting_points
from lightning_hetero.federated.fit.refusals import check_clients
from lightning_hetero.federated.fit.settings import FederatedSettings
from lightning_hetero.federated.runtime.own import Place
from lightning_hetero.measure.compiles import CompileWatch, NewSizes
from lightning_hetero.measure.device import device_of
from lightning_hetero.measure.step_clock import Stopwatch
from lightning_hetero.types import StepReport

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["FederatedRun"]


class FederatedRun(ElasticRun[OwnBinder]):
    """One fit on one rank: its own batches, its clock, and what it averages with the others.

    Args:
        trainer: the running trainer.
        shared, settings: the strategy's arguments.
        ddp_arguments: likewise, of `DistributedDataParallel`.
        timeout: of collectives.
        device: of this rank.
        members: who takes part.
        elastic: how the fit goes on without ranks that are lost; None: it does not.
        invitation: into a run of others.

    Attributes:
        clients: where ranks may be lost; None where they may not.
        samples: of the batch that runs, or ran last; 0: it counts nothing; None: none has run.
        rounds: averages at the end of a round so far.
    """

    def __init__(
        self,
        trainer: Trainer,
        shared: SharedSettings,
        settings: FederatedSettings,
        *,
        ddp_arguments: Mapping[str, Any],
        timeout: timedelta | None,
        device: torch.device,
        members: Members,
        elastic: ClientSettings | None = None,
        invitation: Invitation | None = None,
    ) -> None:
        settings.check(shared)
        agreed = settings.agreed(shared, ddp_arguments) if invitation is None else None
        super().__init__(trainer, timeout=timeout if elastic is None else elastic.timeout, settings=agreed)
        self.members = members
        self.clients: Clients | None = None
        if elastic is not None:
            self.clients = Clients(
                trainer, members, self.channel, elastic, invitation, changed=self._clients_changed, lost=self._lost
            )
        self._places = {rank: (0, 0) for rank in range(trainer.world_size)}  # in their data, where all met last
        self._slots: int | None = None  # of an epoch
        self._why = ""  # others are there than before
        self.policy = settings.policy
        self.samples: int | None = None
        self.rounds = 0
        self.binder = OwnBinder(trainer, self.channel, shared, self, resizes=self.policy.resizes)
        self.undo.callback(compat.watch_train_source(trainer, self.binder.announce))
        self.weigh_logs(self.current_samples)
        self._settings, self._device = settings, device_of(device)
        self._automatic = self.module.automatic_optimization
        if settings.proximal and not self._automatic:
            raise ValueError(
                "proximal > 0 with manual optimization: only user code knows which gradients belong to a step; add the"
                " term to your losses there"
            )
        self._weight_of = shared.weight_in(self.module)
        self.counts = CountedOnHost(trainer, self.open)
        self._division = Division(trainer, settings, self.binder, members)
        self._mine = Client(0, 0, 0)  # what this rank trains on
        self._course: Course | None = None
        self._slot = 0
        self._began: int | None = None  # slot of the round's begin, of a checkpoint
        self._chosen: frozenset[int] = frozenset()
        self._trained = False  # in this epoch
        self._open = False  # something was trained since the ranks met
        self._weight = 0.0  # since then
        self._made = 0  # local steps since then
        self._measured = [0.0, 0.0, 0.0]  # samples, batches and seconds since the last decision
        self._warm = False
        self._watch = Stopwatch(self._device)
        self._timed: deque[tuple[int, int, int, bool]] = deque()  # epoch, slot, samples; is it to be believed?
        self._sizes = NewSizes(self._device)
        self._compiles = CompileWatch()
        self.undo.callback(self._compiles.close)
        self._wait_s = 0.0
        self._stop = False
        self._joined = False  # just now, with the round that begins
        self._common = CommonState(trainer, settings, self.channel)
        self._rows: list[ClientRow] = []
        self._report: StepReport | None = None
        self._reports: list[StepReport] = []
        self.undo.callback(compat.replace_sigterm_broadcast(trainer, self._any_told))
        self._requeue = RequeueTogether(trainer, self.channel.rank)
        self.undo.callback(self._requeue.close)
        self.undo.callback(compat.skip_empty_batches(trainer))
        callbacks, point = compat.trainer_callbacks(trainer), meeting_points(self)
        callbacks.insert(0, point)
        self.undo.callback(callbacks.remove, point)

    # ---- what others may ask ----------------------------------------------------------------------------------

    def current_samples(self) -> int | None:
        return self.samples

    @property
    def plan(self) -> RoundPlan:
        """Of the round that runs; known once the loaders are."""
        return self.policy.plan

    @property
    def shares(self) -> tuple[int, ...]:
        return self._division.sizes if self._division.ranks else ()

    def step_report(self) -> StepReport | None:
        return self._report

    def take_reports(self) -> list[StepReport]:
        reports, self._reports = self._reports, []
        return reports

    def engine_metrics(self) -> dict[str, float]:
        return engine_metrics(self.rounds, self._rows, len(self.present)) if self._rows else {}

    def summary(self) -> str | None:
        """One line on the rounds; ``None`` before the first."""
        if not self._rows:
            return None
        sizes = "/".join(map(str, self._division.sizes))
        steps = "/".join(map(str, self._division.steps))
        return f"hetero_federated: {self.rounds} rounds; batches {sizes}, local steps {steps} at the end"

    def state_dict(self) -> dict[str, Any]:
        """Returns what goes on from the average that the ranks made last."""
        state = self.binder.state_dict()
        if self._course is None:
            return state
        return {
            **state,
            "clients": [list(self._places[rank]) for rank in range(self.trainer.world_size)],
            "slots": self._slots,
            "rounds": self.rounds,
            "began": self._course.began,
            "policy_class": type(self.policy).__name__,
            "policy": self.policy.state_dict(),
            **self._common.state_dict(),
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        self.binder.resume(state)
        if state.get("engine") != "federated":
            return
        self.rounds = int(state.get("rounds", 0))
        self._began = state.get("began")
        self._rows = []
        places = state.get("clients", ())
        if len(places) == self.trainer.world_size:
            self._places = {rank: (int(passes), int(taken)) for rank, (passes, taken) in enumerate(places)}
        if self.members.joining:
            self._slots = state.get("slots")
        if state.get("policy_class") == type(self.policy).__name__ and state.get("policy"):
            self.policy.load_state_dict(state["policy"])
        self._common.load_state_dict(state)

    # ---- an epoch, see `Rounds` -------------------------------------------------------------------------------

    def started(self, mine: Client) -> int:
        """Opens the policy for what the ranks train on; returns the slots of an epoch."""
        self._mine = mine
        if self.members.joining:
            assert self.clients is not None
            check_clients([mine], automatic=True, rests=False)
            self.clients.gather("somebody comes")
        self._exchange()
        batches = {client.batches for client in self.binder.clients}
        rests = not self.policy.again and len(batches) > 1
        rests = rests or isinstance(self.policy, AdaptiveSteps) or self._settings.participation < 1.0
        check_clients(self.binder.clients, automatic=self._automatic, rests=rests)
        if not (self.members.joining and self._slots):
            self._slots = max(batches)
        self._division.open()
        return self._slots

    def _exchange(self) -> None:
        """All tell what they train on."""
        mine = tuple(self._mine)
        self._division.heard([Client(*one) for one in self._gathered("what each rank trains on", mine)])

    # ---- ranks that are lost, or come again, see `Clients` ------------------------------------------------------

    @property
    def present(self) -> tuple[int, ...]:
        """The ranks that are there."""
        return self.members.alive

    def gather(self, what: str) -> None:
        """Meets all who live, where ranks may be lost."""
        if self.clients is not None and self.clients.open:
            self.clients.gather(what)

    def _gathered(self, what: str, value: object) -> list[Any]:
        """Returns what each of those who are there says."""
        if self.clients is None:
            return self.channel.all_gather_object(value)
        return self.clients.together(what, lambda: self.channel.all_gather_object(value))

    def by_rank(self, what: str, value: object) -> list[Any]:
        """Returns what each rank says that there was at first; None for one that is not there."""
        said = dict(zip(self.present, self._gathered(what, value), strict=True))
        return [said.get(rank) for rank in range(self.trainer.world_size)]

    def _lost(self, rank: int, why: str) -> None:
        self._why = f"rank {rank} is left out: {why}"

    def _clients_changed(self, before: tuple[int, ...], now: tuple[int, ...]) -> None:
        if came := sorted(set(now) - set(before)):
            self._why = f"rank {', '.join(map(str, came))} has come again"
        if self._division.others(before, now):
            self._divide_again()

    def _divide_again(self) -> None:
        self._chosen = self._division.again(self._chosen)
        if self._course is not None:
            self._course.rank = self.channel.rank
        self._note_plan(self._why)

    def _let_in(self) -> None:
        """Where a round begins: takes in who has come again."""
        clients = self.clients
        if clients is None or not clients.open or not self.members.missing:
            return
        clients.admission.look()
        clients.admission.admit()
        if self._division.outdated:
            self._exchange()
            self._divide_again()
            self._choose()

    def size(self) -> int:
        return self.plan.sizes[self.channel.rank]

    def begin_pass(self) -> None:
        trainer = self.trainer
        slot = compat.upcoming_batch(trainer)
        course = Course(
            self.channel.rank,
            self.binder.clients,
            again=self.policy.again,
            accumulate=trainer.accumulate_grad_batches,
            slots=self._slots,
        )
        course.began = min(slot, self._began or 0)
        self._course, self._began, self._trained = course, None, False
        if not slot and not self.policy.again and self.binder.place.taken:  # an epoch cut short
            self.binder.place = Place(self.binder.place.passes + 1)
        self._choose()
        self._common.remember()

    def _choose(self) -> None:
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
        generator = np.random.default_rng([seed, self.rounds])
        self._chosen = chosen_ranks(self.channel.world_size, self._settings.participation, generator)

    def begin_slot(self) -> bool:
        assert self._course is not None
        self._slot = compat.upcoming_batch(self.trainer)
        if self._slot == self._course.began and not self._joined:
            self._let_in()
        self._joined = False
        trains = self._course.trains(self._slot, self.plan, self._chosen)
        step, sizes = self._course.step_of(self._slot), self.plan.sizes
        self.binder.count(sum(sizes[r] for r in self._chosen if step < self.plan.steps[r]))
        if trains:
            self._watch.resume()
        return trains

    def took(self, samples: int, after: Place) -> None:
        self.samples = samples
        if samples:
            self.binder.place = after

    def rests(self) -> bool:
        """Lightning passes over this batch, unless it is the last chance to log what the others do in this epoch."""
        assert self._course is not None
        self.samples = 0
        last = self._last_slot()
        if self._slot >= last and not self._trained:
            return True
        compat.count_started(self.trainer)
        if self._course.steps_after(self._slot, last):
            compat.count_step(self.trainer)
        return False

    def _last_slot(self) -> int:
        """Number of the last batch that Lightning trains in this epoch."""
        assert self._course is not None
        trainer = self.trainer
        limits = (self._course.slots, compat.fetch_limit(trainer), trainer.num_training_batches)
        return int(min(limits)) - 1

    # ---- a local step -----------------------------------------------------------------------------------------

    def open(self, batch: Any) -> None:
        """What does the batch count."""
        if self.samples:
            self._weight += self.samples if self._weight_of is None else self._counted(batch)

    def _counted(self, batch: Any) -> float:
        assert self._weight_of is not None
        weight = float(self._weight_of(batch))
        if not (np.isfinite(weight) and weight >= 0):
            raise ValueError(f"batch_weight returned {weight!r}; it must be a finite number >= 0, e.g. a token count")
        return weight

    @property
    def counts_nothing(self) -> bool:
        """Whether the batch that runs is there only so that this rank logs what the others do."""
        return self.samples == 0

    def dummy_guard(self) -> AbstractContextManager[Any]:
        """Around ``training_step``: no metric and no logged mean counts a batch of weight 0."""
        if not self.counts_nothing:
            return nullcontext()
        stack = ExitStack()
        stack.enter_context(compat.metrics_frozen(self.module))
        stack.enter_context(compat.dummy_batch_unlogged(self.trainer))
        return stack

    def pull(self) -> None:
        """Behind a backward pass: FedProx's term, once per local step."""
        if self._settings.proximal and not self.counts_nothing and not compat.accumulates_now(self.trainer):
            self._common.pull()

    @contextmanager
    def scaled(self, optimizer: Any) -> Iterator[None]:
        """Around an optimizer's step: the learning rate of this rank's local step."""
        factor = self.plan.lr_factors[self.channel.rank]
        if factor == 1.0:
            yield
            return
        groups = optimizer.param_groups
        before = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * factor
        try:
            yield
        finally:
            for group, lr in zip(groups, before, strict=True):
                group["lr"] = lr

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a collective that user code asks for: waiting for peers is not this rank's work."""
        running = self._watch.running
        self._watch.pause()
        try:
            yield
        finally:
            if running:
                self._watch.resume()

    def end_slot(self) -> None:
        course = self._course
        assert course is not None
        last, self._open = self._last_slot(), True
        if self.samples:
            self._watch.close()
            new = self._sizes.first(self.samples)
            believed = self._warm and not self._compiles.ask() and not new
            self._timed.append((compat.epoch_running(self.trainer), self._slot, self.samples, believed))
            self._warm = self._trained = True
            self._made += course.steps_after(self._slot, last)
            self._take_times()
        else:
            self._watch.reset()
        if course.ends_round(self._slot, self.plan, last):
            self._meet(over=True)

    def _take_times(self) -> None:
        """Takes in the steps whose times are known: on an accelerator, of those before."""
        while (seconds := self._watch.take()) is not None:
            epoch, slot, samples, believed = self._timed.popleft()
            if believed:
                for i, value in enumerate((float(samples), 1.0, seconds)):
                    self._measured[i] += value
            self.events.note("step", epoch, slot, {"samples": samples, "compute_s": seconds, "wait_s": self._wait_s})
            self._wait_s = 0.0

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
        if self._open:
            self._meet(over=False)
        if logged is None:
            return
        names: list[tuple[str, ...]] = self._gathered("names that are logged", logged)
        if len(set(names)) > 1:
            by_rank = {rank: list(one) for rank, one in zip(self.present, names, strict=True)}
            raise RuntimeError(
                f"the ranks have logged other names in this epoch, which could not be reduced over them: {by_rank}. Log"
                " the same names on all ranks"
            )

    def _meet(self, *, over: bool) -> None:
        self._watch.wait()  # the work of this round belongs to this rank's time
        self._take_times()
        began_s = time.perf_counter()
        clients = self.clients
        if clients is None:
            rows, wait_s = self._average(began_s)
        else:
            back: list[Callable[[], None]] = []

            def made() -> tuple[list[ClientRow], float]:
                back[:] = [self._common.copied()]
                return self._average(began_s)

            rows, wait_s = clients.together("average", made, lambda: back[0]() if back else None)
        if said := disagreement(rows, self.present):
            raise RuntimeError(said)
        self._common.take(rows)
        self._places |= {r: (int(row.passes), int(row.taken)) for r, row in zip(self.present, rows, strict=True)}
        self._rows = everyone = of_all(rows, self.present, self.trainer.world_size)
        self._stop = any(row.sigterm for row in rows)
        self._requeue.hear(sum(row.requeue for row in rows))
        self._open, self._weight, self._made, self._wait_s = False, 0.0, 0, wait_s
        if over:
            self._next_round(rows, everyone)
        self._common.remember()

    def _average(self, began_s: float) -> tuple[list[ClientRow], float]:
        """Averages over those who are there, unless they disagree; returns their rows, and how long they came late."""
        tensors = self._common.tensors()
        rows = [ClientRow(*row) for row in self.channel.all_gather_row(self._row(tensors))()]
        wait_s = time.perf_counter() - began_s
        if disagreement(rows) is None:
            self._common.average(tensors, rows)
        return rows, wait_s

    def _row(self, tensors: Sequence[Tensor]) -> ClientRow:
        samples, batches, seconds = self._measured
        place = self.binder.place
        return ClientRow(
            epoch=float(compat.epoch_running(self.trainer)),
            slot=float(self._slot),
            weight=self._counts(),
            made=float(self._made),
            samples=samples,
            steps=batches,
            compute_s=seconds,
            wait_s=self._wait_s,
            passes=float(place.passes),
            taken=float(place.taken),
            digest=digest_of(self.plan, [(tuple(t.shape), str(t.dtype)) for t in tensors]),
            states=self._common.states_digest(),
            sigterm=float(bool(getattr(self.trainer, "received_sigterm", False))),
            requeue=self._requeue.take(),
        )

    def _counts(self) -> float:
        """What this rank's parameters count in the average: nothing, if it has trained nothing since the last."""
        if self._settings.weight_by == "owned":
            return float(self.binder.clients[self.channel.rank].samples) if self._weight else 0.0
        return self._weight

    def _next_round(self, rows: Sequence[ClientRow], everyone: Sequence[ClientRow]) -> None:
        assert self._course is not None
        predicted = dict(zip(self.present, self.policy.predict_s(), strict=False))
        predicted_s = [predicted.get(rank, math.nan) for rank in range(len(everyone))]
        self._report = step_report(everyone, self._division.sizes, predicted_s)
        self._reports = [*self._reports[-63:], self._report]
        decision = self.policy.decide([(row.samples, row.steps, row.compute_s) for row in rows])
        self._measured = [0.0, 0.0, 0.0]
        self.rounds += 1
        self._course.began = self._slot + 1
        self._choose()
        if decision is not None and decision.changed:
            self._note_plan(decision.reason, predicted_s=decision.predicted_s)

    def _note_plan(self, reason: str, **more: float) -> None:
        data = {
            "shares": list(self._division.sizes),
            "steps": list(self._division.steps),
            **more,
            "reason": reason,
        }
        self.events.note("decision", compat.epoch_running(self.trainer), self._slot, data)

    # ---- begin and end ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Training begins."""
        if self.clients is not None:
            self._joined, self.members.joining = self.members.joining, False
            self.clients.start()

    def finish(self) -> None:
        """Training is over, on all ranks."""
        if self.clients is not None:
            self.clients.finish()

    def fail(self, error: BaseException) -> None:
        """This rank failed: where others would go on without it, they are told why."""
        super().fail(error)
        if self.clients is not None:
            self.clients.fail(f"rank {self.members.rank} failed: {type(error).__name__}: {error}")

    def close(self) -> None:
        if self.clients is not None:
            self.clients.close()
        super().close()

    def _any_told(self, told: bool) -> bool:
        """In the place of Lightning's broadcast before every batch: what was known when the ranks met."""
        del told
        return self._stop
