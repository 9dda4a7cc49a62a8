"""Where the ranks are in an epoch and in a round: which batches this one trains, and what the plan is (layer L).

    epoch begins -> for each batch: does this rank train in it? draw it; else pass over it -> round over? next plan
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from lightning.pytorch import Trainer
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_hetero import lightning_compat as compat
from lightning_hetero.base.arguments import SharedSettings
from lightning_hetero.base.elastic.members import Members
from lightning_hetero.base.elastic.run_meetings import RunMeetings
from lightning_hetero.base.run import EventLog
from lightning_hetero.data.own_stream import read_together
from lightning_hetero.data.stream import raise_unknown_place
from lightning_hetero.federated.decide.policy import AdaptiveSteps, FedAvg
from lightning_hetero.federated.decide.rounds import Client, ClientRow, Course, RoundPlan, spread, step_report
from lightning_hetero.federated.fit.averaging import Averaging
from lightning_hetero.federated.fit.loaders import OwnBinder, Reading
from lightning_hetero.federated.fit.local_steps import LocalSteps
from lightning_hetero.federated.fit.settings import FederatedSettings, check_data
from lightning_hetero.federated.runtime.own import ClientStream, DataPlace
from lightning_hetero.transport.side_channel import SideChannel
from lightning_hetero.types import StepReport


class Rounds:
    """Leads this rank through the batches of an epoch, and all ranks from one plan to the next.

    Args:
        trainer: the running trainer.
        channel: small collectives of all ranks.
        shared, settings: the strategy's arguments.
        members: the ranks that take part.
        steps: this rank's local steps.
        averaging: learns where an epoch begins.
        events: of this rank.

    Attributes:
        binder: this rank's train loader.
        clients: where ranks may be lost; None where they may not.
        number: averages at the end of a round so far.
        course: of the epoch that runs; None before one has begun.
        fresh: whether this rank has just come, with the round that begins.
    """

    def __init__(
        self, trainer: Trainer, channel: SideChannel, shared: SharedSettings, settings: FederatedSettings,
        members: Members, steps: LocalSteps, averaging: Averaging, events: EventLog,
    ) -> None:  # fmt: skip
        self._trainer, self._channel, self._settings, self._members = trainer, channel, settings, members
        self._steps, self._averaging, self._events = steps, averaging, events
        size = self._size if settings.policy.resizes else None
        self.binder = OwnBinder(
            trainer, channel, shared, settings.stream, opened=self._opened, epoch=self._epoch, size=size
        )
        self.clients: RunMeetings | None = None
        self.number = 0
        self.course: Course | None = None
        self.fresh = False
        self._batches: int | None = None  # of an epoch
        self._began: int | None = None  # batch of the round's begin, of a checkpoint
        self._ranks: tuple[int, ...] = ()  # among which the policy divides, ascending; empty before it does
        self._looked: tuple[RoundPlan, tuple[int, ...]] | None = None  # for which streams are read ahead

    @property
    def plan(self) -> RoundPlan:
        """The plan of the round that runs, by place among the ranks that are there; known once the loaders are."""
        return self._settings.policy.plan

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples of each rank's batch in a local step: 0 of one that is not there; empty before they are known."""
        return spread(self.plan.sizes, self._ranks, self._trainer.world_size) if self._ranks else ()

    @property
    def local_steps(self) -> tuple[int, ...]:
        """Local steps of each rank in a round; 0 of one that is not there."""
        return spread(self.plan.steps, self._ranks, self._trainer.world_size)

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
        self.binder.clients, policy = {self._members.rank: mine}, self._settings.policy
        again = isinstance(policy, FedAvg) and policy.again
        if self._members.joining:
            assert self.clients is not None
            check_data([mine], joining=True, again=again)
            self.clients.admission.come_in()
        self._exchange()
        clients = self.binder.clients.values()
        streams = check_data(list(clients), again=again)
        batches = {client.batches for client in clients}
        rests = streams or (not policy.again and len(batches) > 1) or isinstance(policy, AdaptiveSteps)
        if rests and not self._trainer.lightning_module.automatic_optimization:
            raise ValueError(
                "with manual optimization no rank can rest, because only user code counts its steps: here ranks rest"
                " (by policy='adaptive_steps', or because data of different lengths are through at different times)."
                " Use map-style datasets with policy='lb-bsp' or FedAvg(again=True), in which all ranks make all steps"
            )
        if not (self._members.joining and self._batches):
            self._batches = max(batches)
        self._divide()
        return self._batches

    def _exchange(self) -> None:
        """All say what they train on."""
        mine = tuple(self.binder.clients[self._members.rank])
        everyone = [Client(*one) for one in self.gathered("what each rank trains on", mine)]
        self.binder.regroup(dict(zip(self._members.alive, everyone, strict=True)))

    def changed(self, why: str) -> None:
        """Other ranks are there than before: the policy divides among them, once it is known what they have."""
        alive = self._members.alive
        self.binder.regroup({rank: client for rank, client in self.binder.clients.items() if rank in alive})
        if self._ranks and len(self.binder.clients) == len(alive):
            self._divide_again(why)

    def _divide(self) -> None:
        """Opens the policy for the ranks that are there.

        Raises:
            ValueError: the bounds admit no batches.
        """
        settings, self._ranks = self._settings, self._members.alive
        bounds = [settings.min_samples, settings.max_samples]
        for i, given in enumerate(bounds):  # per rank, as the fit began
            if isinstance(given, Sequence) and len(given) == self._trainer.world_size:
                bounds[i] = [given[rank] for rank in self._ranks]
        settings.policy.start(
            list(self.binder.clients.values()), local_steps=settings.local_steps, lower=bounds[0], upper=bounds[1],
            total=self.binder.asked_batch,
            least=self._least,
        )  # fmt: skip

    def _divide_again(self, why: str) -> None:
        """Divides among others than before, in the middle of a run; who takes part in the round stays."""
        old, now = self._ranks, self._members.alive
        self._settings.policy.keep([old.index(rank) if rank in old else None for rank in now])
        self._divide()
        if self.course is not None:
            self.course.rank, self.course.ends = self._channel.rank, self._ends()
        self._note_plan(why)

    @property
    def _least(self) -> int:
        """Samples that any batch has."""
        return 2 if any(isinstance(layer, _BatchNorm) for layer in self._trainer.lightning_module.modules()) else 1

    def _ends(self) -> list[float]:
        """Returns by rank before which batch it is through; streams say it later."""
        window, clients = self._trainer.accumulate_grad_batches, self.binder.clients.values()
        again = self._settings.policy.again
        return [math.inf if again else -(-client.batches // window) * window for client in clients]

    def _let_in(self) -> None:
        """Where a round begins: takes in the ranks that have come again."""
        clients = self.clients
        if clients is None or not clients.open or not self._members.missing:
            return
        clients.admission.look()
        clients.admission.admit()
        if came := sorted(set(self._members.alive) - set(self._ranks)):
            self._exchange()
            self._divide_again(f"rank {', '.join(map(str, came))} has come again")

    # ---- an epoch ----------------------------------------------------------------------------------------------

    def _size(self) -> int:
        """Returns the samples of the next batch to be drawn."""
        return self.plan.sizes[self._channel.rank]

    def _epoch(self, read: Reading) -> Iterator[Any]:
        """Yields the batches of the epoch from where Lightning's counters stand; None: this rank is idle.

        Args:
            read: begins the reading, which ends, and the loader's workers with it, with the last batch.
        """
        course, stream = self._begin_epoch(), self.binder.stream
        drawn, over = read(self.binder.place), False
        while not over:
            trains, batch = self._begin_batch(course), None
            if course.batch > course.last:  # nothing is left of any stream
                return
            if trains:
                batch, (self._steps.samples, self.binder.place) = next(drawn)
            elif not self._passes_over(course):
                batch = next(drawn)[0] if stream is None else stream.dummy(self._least)
            if over := course.batch >= course.last:
                drawn = iter(())
                if stream is not None:
                    compat.last_is_fetched(self._trainer)
            yield batch

    def _begin_epoch(self) -> Course:
        trainer, again = self._trainer, self._settings.policy.again
        assert self._batches is not None
        batches = int(min(self._batches, compat.fetch_limit(trainer), trainer.num_training_batches))
        accumulate = trainer.accumulate_grad_batches
        self.course = course = Course(self._channel.rank, self._ends(), batches, accumulate=accumulate)
        first, stream = compat.upcoming_batch(trainer), self.binder.stream
        # Behind the last batch of an epoch without a length Lightning goes on counting.
        fresh = not first or (stream is not None and compat.last_batch_done(trainer))
        course.began = first if fresh else min(first, self._began or 0)
        self._began, self._steps.trained, self._looked = None, False, None
        if fresh and (stream is not None or not again) and self.binder.place.taken:  # an epoch cut short
            self.binder.place = DataPlace(self.binder.place.passes + 1)
        if not (fresh or stream is None or self.binder.placed):
            raise_unknown_place(first)
        self._averaging.remember()
        return course

    def _look(self, course: Course, stream: ClientStream) -> None:
        """Reads ahead for the plan, unless that is done; the ranks exchange what is left. A collective."""
        gather = partial(self.gathered, "what is left of each stream")
        while self._looked != (now := (self.plan, self._ranks)):
            told = read_together(self._members.rank, gather, partial(self._read, stream, begins=self._looked is None))
            self._looked = now
            if 0 in told:  # perhaps it has no sample for its dummy batch
                stream.share_dummy(partial(self.gathered, "a sample for a dummy batch"))
            if now == (self.plan, self._ranks):
                course.hear(now[0], course.batch, told)

    def _read(self, stream: ClientStream, *, begins: bool) -> int:
        """Reads what this rank's part in a round needs; returns how many batches are left."""
        plan, policy = self.plan, self._settings.policy
        if begins:
            stream.begin(self.binder.place.taken)
        batches = self._trainer.accumulate_grad_batches * plan.steps[self._channel.rank]
        return stream.look(batches, self._size(), self._least if policy.resizes else 1)

    def hear(self, rows: Sequence[ClientRow]) -> None:
        """The ranks have met, and have told what is left of their streams."""
        if self.binder.stream is not None and self.course is not None and self._looked == (self.plan, self._ranks):
            self.course.hear(self.plan, self.course.batch + 1, [int(row.left) for row in rows])

    def _begin_batch(self, course: Course) -> bool:
        """The next batch is wanted; returns whether this rank trains in it."""
        course.batch = compat.upcoming_batch(self._trainer)
        if course.batch == course.began and not self.fresh:
            self._let_in()
        if self.binder.stream is not None:
            self._look(course, self.binder.stream)
        self.fresh, plan = False, self.plan
        self.binder.count(sum(size for rank, size in enumerate(plan.sizes) if course.trains(plan, rank)))
        if trains := course.trains(plan, course.rank):
            self._steps.watch.resume()
        return trains

    def _passes_over(self, course: Course) -> bool:
        """Lightning passes over this batch, unless it is the last chance to log what the others do in this epoch."""
        self._steps.samples = 0
        if course.batch >= course.last and not self._steps.trained:
            return False
        compat.count_started(self._trainer)
        if course.ends_step:
            compat.count_step(self._trainer)
        return True

    def batch_over(self) -> bool:
        """The batch that ran is over; returns whether the round is."""
        assert self.course is not None
        self._steps.end(self.course.batch, is_step=self.course.ends_step or self.course.cuts_step)
        return self.course.ends_round(self.plan)

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
        report = step_report(everyone, self.sizes, [predicted.get(r, math.nan) for r in range(len(everyone))])
        decision = policy.decide([(row.samples, row.steps, row.compute_s) for row in rows])
        self._steps.measured = (0.0, 0.0, 0.0)
        self.number += 1
        self.course.began = self.course.batch + 1
        if decision is not None and decision.changed:
            self._note_plan(decision.reason, predicted_s=decision.predicted_s)
        return report

    def _note_plan(self, reason: str, **more: float) -> None:
        batch = 0 if self.course is None else self.course.batch
        data = {"shares": list(self.sizes), "steps": list(self.local_steps), **more, "reason": reason}
        self._events.note("decision", compat.epoch_running(self._trainer), batch, data)
