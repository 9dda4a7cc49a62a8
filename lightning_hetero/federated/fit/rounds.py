"""Where the ranks are in an epoch and in a round: which batches this one trains, and what the plan is (layer L).

    epoch begins -> for each batch: does this rank train in it? draw it; else pass over it -> round over? next plan
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_hetero import lightning_compat as compat
from lightning_hetero.base.elastic.members import Members
from lightning_hetero.base.loaders import SharedSettings
from lightning_hetero.base.run import EventLog
from lightning_hetero.federated.decide.policy import AdaptiveSteps
from lightning_hetero.federated.decide.rounds import (
    Client,
    ClientRow,
    Course,
    RoundPlan,
    chosen_ranks,
    step_report,
)
from lightning_hetero.federated.fit.averaging import Averaging
from lightning_hetero.federated.fit.clients import Clients
from lightning_hetero.federated.fit.division import Division
from lightning_hetero.federated.fit.loaders import OwnBinder
from lightning_hetero.federated.fit.local_steps import LocalSteps
from lightning_hetero.federated.fit.settings import FederatedSettings, check_clients
from lightning_hetero.federated.runtime.own import DataPlace, OwnBatches
from lightning_hetero.transport.side_channel import SideChannel
from lightning_hetero.types import StepReport

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class Rounds:
    """Leads this rank through the batches of an epoch, and all ranks from one plan to the next.

    Args:
        trainer: the running trainer.
        channel: small collectives of all ranks.
        shared, settings: the strategy's arguments.
        members: the ranks that take part.
        steps: this rank's local steps.
        averaging: is told where an epoch begins.
        events: of this rank.

    Attributes:
        binder: this rank's train loader.
        division: what the policy divides among the ranks that are there.
        clients: where ranks may be lost; None where they may not.
        number: averages at the end of a round so far.
        course: of the epoch that runs; None before one has begun.
        batch: number of the batch that runs.
    """

    def __init__(
        self,
        trainer: Trainer,
        channel: SideChannel,
        shared: SharedSettings,
        settings: FederatedSettings,
        members: Members,
        steps: LocalSteps,
        averaging: Averaging,
        events: EventLog,
    ) -> None:
        self._trainer, self._channel, self._settings, self._members = trainer, channel, settings, members
        self._steps, self._averaging, self._events = steps, averaging, events
        self.binder = OwnBinder(
            trainer, channel, shared, opened=self._opened, epoch=self._epoch,
            size=self._size if settings.policy.resizes else None,
        )  # fmt: skip
        self.division = Division(trainer, settings, self.binder, members)
        self.clients: Clients | None = None
        self.number = 0
        self.course: Course | None = None
        self.batch = 0
        self._batches: int | None = None  # of an epoch
        self._began: int | None = None  # batch of the round's begin, of a checkpoint
        self._chosen: frozenset[int] = frozenset()

    @property
    def plan(self) -> RoundPlan:
        """The plan of the round that runs, by place among the ranks that are there; known once the loaders are."""
        return self._settings.policy.plan

    def state_dict(self) -> dict[str, Any]:
        """Returns what goes on from the last average."""
        assert self.course is not None
        policy = self._settings.policy
        return {
            "slots": self._batches,
            "rounds": self.number,
            "began": self.course.began,
            "policy_class": type(policy).__name__,
            "policy": policy.state_dict(),
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`."""
        policy = self._settings.policy
        self.number = int(state.get("rounds", 0))
        self._began = state.get("began")
        if self._members.joining:
            self._batches = state.get("slots")
        if state.get("policy_class") == type(policy).__name__ and state.get("policy"):
            policy.load_state_dict(state["policy"])

    # ---- the ranks that are there ------------------------------------------------------------------------------

    def gathered(self, what: str, value: object) -> list[Any]:
        """Returns what each rank that is there says."""
        if self.clients is None:
            return self._channel.all_gather_object(value)
        return self.clients.together(what, lambda: self._channel.all_gather_object(value))

    def _opened(self, mine: Client) -> int:
        """Opens the policy for what the ranks train on; returns the batches of an epoch. A collective."""
        self.division.mine = mine
        if self._members.joining:
            assert self.clients is not None
            check_clients([mine], automatic=True, rests=False)
            self.clients.gather("somebody comes")
        self._exchange()
        policy = self._settings.policy
        batches = {client.batches for client in self.binder.clients}
        rests = not policy.again and len(batches) > 1
        rests = rests or isinstance(policy, AdaptiveSteps) or self._settings.participation < 1.0
        automatic = self._trainer.lightning_module.automatic_optimization
        check_clients(self.binder.clients, automatic=automatic, rests=rests)
        if not (self._members.joining and self._batches):
            self._batches = max(batches)
        self.division.open()
        return self._batches

    def _exchange(self) -> None:
        """All tell what they train on."""
        mine = tuple(self.division.mine)
        self.division.heard([Client(*one) for one in self.gathered("what each rank trains on", mine)])

    def lost(self, rank: int, why: str) -> None:
        """A rank is left out."""
        self.division.why = f"rank {rank} is left out: {why}"

    def changed(self, before: tuple[int, ...], now: tuple[int, ...]) -> None:
        """Other ranks are there than before."""
        if came := sorted(set(now) - set(before)):
            self.division.why = f"rank {', '.join(map(str, came))} has come again"
        if self.division.others(before, now):
            self._divide_again()

    def _divide_again(self) -> None:
        self._chosen = self.division.again(self._chosen)
        if self.course is not None:
            self.course.rank = self._channel.rank
        self._note_plan(self.division.why)

    def _let_in(self) -> None:
        """Where a round begins: takes in the ranks that have come again."""
        clients = self.clients
        if clients is None or not clients.open or not self._members.missing:
            return
        clients.admission.look()
        clients.admission.admit()
        if self.division.outdated:
            self._exchange()
            self._divide_again()
            self._choose()

    # ---- an epoch ----------------------------------------------------------------------------------------------

    def _size(self) -> int:
        """Returns the samples of the next batch to be drawn."""
        return self.plan.sizes[self._channel.rank]

    def _epoch(self, sampler: OwnBatches, own: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Yields the batches of the epoch from where Lightning's counters stand; None: this rank rests.

        Args:
            sampler: draws and notes the batches.
            own: begins the loader's own iteration.
        """
        self._begin_epoch()
        issued = sampler.begin(self.binder.place)
        batches: Iterator[Any] | None = None
        while True:
            trains = self._begin_batch()
            if not trains and self._passes_over():
                yield None
                continue
            batches = own() if batches is None else batches
            batch = next(batches)
            note = issued.popleft()
            self._steps.samples = note.samples if trains else 0
            if trains:
                self.binder.place = note.after
            yield batch

    def _begin_epoch(self) -> None:
        trainer, again = self._trainer, self._settings.policy.again
        first = compat.upcoming_batch(trainer)
        self.course = Course(
            self._channel.rank,
            self.binder.clients,
            again=again,
            accumulate=trainer.accumulate_grad_batches,
            batches=self._batches,
        )
        self.course.began = min(first, self._began or 0)
        self._began, self._steps.trained = None, False
        if not first and not again and self.binder.place.taken:  # an epoch cut short
            self.binder.place = DataPlace(self.binder.place.passes + 1)
        self._choose()
        self._averaging.remember()

    def _choose(self) -> None:
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
        generator = np.random.default_rng([seed, self.number])
        self._chosen = chosen_ranks(self._channel.world_size, self._settings.participation, generator)

    def _begin_batch(self) -> bool:
        """The next batch is wanted; returns whether this rank trains in it, or rests."""
        course = self.course
        assert course is not None
        self.batch = compat.upcoming_batch(self._trainer)
        if self.batch == course.began and not self.division.joined:
            self._let_in()
        self.division.joined = False
        trains = course.trains(self.batch, self.plan, self._chosen)
        step, sizes = course.step_of(self.batch), self.plan.sizes
        self.binder.count(sum(sizes[r] for r in self._chosen if step < self.plan.steps[r]))
        if trains:
            self._steps.begin()
        return trains

    def _passes_over(self) -> bool:
        """Lightning passes over this batch, unless it is the last chance to log what the others do in this epoch."""
        self._steps.samples = 0
        if self.batch >= self.last and not self._steps.trained:
            return False
        compat.count_started(self._trainer)
        if self.is_step:
            compat.count_step(self._trainer)
        return True

    @property
    def last(self) -> int:
        """Number of the last batch that Lightning trains in this epoch."""
        assert self.course is not None
        limits = (self.course.batches, compat.fetch_limit(self._trainer), self._trainer.num_training_batches)
        return int(min(limits)) - 1

    @property
    def is_step(self) -> bool:
        """Whether an optimizer step ends with the batch that runs."""
        assert self.course is not None
        return self.course.steps_after(self.batch, self.last)

    @property
    def over(self) -> bool:
        """Whether the round ends with the batch that runs."""
        assert self.course is not None
        return self.course.ends_round(self.batch, self.plan, self.last)

    # ---- the next round ----------------------------------------------------------------------------------------

    def next(self, rows: Sequence[ClientRow], everyone: Sequence[ClientRow]) -> StepReport:
        """The ranks have met at the end of a round: decides on the next one and returns what this one took.

        Args:
            rows: of the ranks that are there.
            everyone: of all ranks that there were at first.
        """
        assert self.course is not None
        policy = self._settings.policy
        predicted = dict(zip(self._members.alive, policy.predict_s(), strict=False))
        report = step_report(everyone, self.division.sizes, [predicted.get(r, math.nan) for r in range(len(everyone))])
        decision = policy.decide([(row.samples, row.steps, row.compute_s) for row in rows])
        self._steps.measured = (0.0, 0.0, 0.0)
        self.number += 1
        self.course.began = self.batch + 1
        self._choose()
        if decision is not None and decision.changed:
            self._note_plan(decision.reason, predicted_s=decision.predicted_s)
        return report

    def _note_plan(self, reason: str, **more: float) -> None:
        data = {"shares": list(self.division.sizes), "steps": list(self.division.steps), **more, "reason": reason}
        self._events.note("decision", compat.epoch_running(self._trainer), self.batch, data)
