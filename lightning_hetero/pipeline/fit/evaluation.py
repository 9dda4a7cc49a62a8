"""Validation, test and prediction batches through the pipelines: each rank reads its own, as under DDP (layer L).

    rank 0, leads     batch 0 ──► step ─┐  stages, in flight behind one another  ┌─► output 0
    rank 1, member    batch 1 ──► step ─┘  (rank 0's steps, on rank 0 and 1)     └─► output 1, sent back

Every rank has the batches that stock DDP would give it, and gets the outputs of them: what its hooks see and
``trainer.predict`` returns is the same. The steps run on the leader of its group, which alone has what is around the
layers; an idle rank is a guest of some group. So as many batches are in flight as the group has ranks.

Ranks may have different numbers of batches to predict: one that has no more says so, and goes on to serve the others.

What a step leaves on the module, e.g. in a list, it leaves on the module of the rank whose batch it is: the leader runs
it with separate attributes, and sends what has changed in them with the output.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch import Tensor

from lightning_hetero import lightning_compat as compat
from lightning_hetero.pipeline.decide.plans import resting
from lightning_hetero.pipeline.fit.leader_step import acting_as
from lightning_hetero.pipeline.fit.logs import StepLogs
from lightning_hetero.pipeline.fit.wires import RunOnRank
from lightning_hetero.pipeline.runtime.execute.stage_runner import StageRunner
from lightning_hetero.pipeline.runtime.step.attributes import (
    Buffers,
    Change,
    Path,
    Shadow,
    apply_changes,
    name_of,
    numbers_of,
    value_at,
    values_of,
)
from lightning_hetero.transport.objects import packed, receive, send
from lightning_hetero.types import PipelinePlan


class _Answer(NamedTuple):
    """What the leader sends back for one turn.

    Attributes:
        output: of the rank's step.
        changes: what the step has left on the module.
        over: no rank of the group had a batch in this turn.
    """

    output: Any
    changes: list[Change]
    over: bool


_Call = tuple[str, tuple[Any, ...], dict[str, Any]]
"""The name of the module's method, and its arguments, the batch first."""
_Request = tuple[str, tuple[Any, ...], dict[str, Any], dict[Path, Any]]
"""What another rank asks for: a call, and those of its module's attributes that may decide what the step does."""


class EvaluationBatches:
    """Runs evaluation steps of one run on one rank.

    Args:
        run: of this rank.
        logs: collects what the steps log.

    Attributes:
        leader: the rank that runs the steps of this one.
        others: the other ranks whose steps it runs.
    """

    leader: int
    others: list[int]

    def __init__(self, run: RunOnRank, logs: StepLogs) -> None:
        self._module, self._channel, self._logs = run.module, run.channel, logs
        self._wait, self._device = run.failures.wait_for_peer, run.settings.device
        self._turn = 0
        self._unfinished = False
        self._shadows: dict[int, Shadow] = {}  # on the leader, of an evaluation: by the rank whose steps they are for
        self._buffers: Buffers | None = None
        self._begun = False  # this rank has had a step of this evaluation run by its leader
        self._exchanged: set[Path] = set()  # attributes that steps for this rank have set

    def settle(self, plan: PipelinePlan, runner: StageRunner | None) -> None:
        """Takes the plan that is in force from now on; not during an evaluation.

        Args:
            plan: the same on all ranks.
            runner: this rank's stage; None for an idle rank.
        """
        assert not self._unfinished
        self._exchanged = set()
        rank, self._runner = self._channel.rank, runner
        at_rest = resting(plan, self._channel.world_size)
        # Each group's ranks, its leader first, and its guests behind them.
        parties = [[*group.ranks, *at_rest[i :: len(plan.groups)]] for i, group in enumerate(plan.groups)]
        self._party = next(party for party in parties if rank in party)
        self.leader, *self.others = self._party

    def expect(self) -> None:
        """An evaluation begins, on all ranks: `finish` is due, even if this rank has no batch."""
        self._unfinished = len(self._party) > 1

    def run(self, name: str, args: Sequence[Any], kwargs: dict[str, Any], *, last: bool) -> Any:
        """Runs one step; returns its output.

        Args:
            name: of the module's method.
            args, kwargs: of its call; the first is the batch.
            last: of this rank's batches.

        Raises:
            TypeError: the batch or the output cannot be sent to the rank that needs it.
            RuntimeError: another rank has failed.
        """
        self._unfinished = len(self._party) > 1
        output = self._take_turn((name, tuple(args), kwargs)).output
        if name != "predict_step":
            self._logs.publish()
        elif last:  # now: what hooks do when the loop has ended may wait for the other ranks
            self.finish()
        return output

    def finish(self) -> None:
        """Serves, when this rank has no batch left, until no rank of the group has; nothing, if that has been done.

        Raises:
            RuntimeError: another rank still validates or tests.
        """
        while self._unfinished:
            self._unfinished = not self._take_turn(None).over
        self._shadows, self._buffers, self._begun = {}, None, False

    def _take_turn(self, call: _Call | None) -> _Answer:
        self._turn += 1
        if self.leader == self._channel.rank:
            return self._lead(call)
        told: dict[Path, Any] = {}
        if call is not None:
            values = (numbers_of if self._begun else values_of)(self._module, compat.module_attributes())
            told = {**values, **{path: value_at(self._module, path) for path in self._exchanged}}
            self._begun = True
        self.send(self.leader, call and (*call, told), "the batch of an evaluation")
        if self._runner is not None:
            self._runner.serve_evaluation(-self._turn)
        answer: _Answer = self.receive(self.leader)
        self._take(answer.changes, told)
        return answer

    def _take(self, changes: Sequence[Change], told: Collection[Path]) -> None:
        """Makes the changes of this rank's step here.

        Args:
            changes: as the leader found them.
            told: attributes that it had as this rank has them.
        """
        for change in changes:
            if change.kind == "set" and change.path not in told:
                self._exchanged.add(change.path)
                if not _alike(change.before, value_at(self._module, change.path)):
                    raise RuntimeError(
                        f"{name_of(change.path)} has been changed by an evaluation step on rank {self.leader}, which"
                        f" runs those of rank {self._channel.rank} in a pipeline, and was another value there than on"
                        f" rank {self._channel.rank}. Keep it as an attribute of the LightningModule itself, or use"
                        " strategy='hetero_balanced'"
                    )
        apply_changes(self._module, changes)

    def _lead(self, call: _Call | None) -> _Answer:
        assert self._runner is not None
        clients: list[int] = []
        if not self._shadows and len(self._party) > 1:
            self._shadows = {rank: Shadow(self._module, compat.module_attributes()) for rank in self.others}
            self._buffers = Buffers(self._module)

        def bodies() -> Iterator[tuple[int, Callable[[], Any]]]:
            for rank in self._party:
                asked: _Request | None = call and (*call, {})
                if rank != self.leader and (asked := self.receive(rank)) is not None:
                    self._shadows[rank].take(asked[-1])
                if asked is None:
                    continue
                if call is None and asked[0] != "predict_step":
                    raise RuntimeError(
                        f"rank {rank} has more batches for {asked[0]} than rank {self.leader}: all ranks need as many."
                        " Use a dataset with a length, or limit_val_batches and limit_test_batches"
                    )
                clients.append(rank)
                yield rank, self._body(*asked[:3], rank=rank)

        outputs = self._runner.evaluate(-self._turn, bodies(), samples=1, within=self._within)
        found = dict(zip(clients, outputs, strict=True))
        self._check_buffers()
        for rank in self.others:
            changes = self._shadows[rank].changes() if rank in found else []
            left = "".join(f", or what it has left in {name}," for name in {name_of(c.path): 0 for c in changes})
            answer = _Answer(found.get(rank), changes, not clients)
            self.send(rank, answer, f"the output of an evaluation step{left}")
        return _Answer(found.get(self.leader), [], not clients)

    def _check_buffers(self) -> None:
        if self._buffers is not None and (name := self._buffers.changed()) is not None:
            raise RuntimeError(
                f"an evaluation step has changed the buffer {name} on rank {self.leader}, which in a pipeline runs the"
                f" steps of the ranks {self._party}: the others would not have it, and here it is of all their batches."
                " Use a torchmetrics object or a list, which belong to the rank whose batch it is; or"
                " strategy='hetero_balanced'"
            )

    def _within(self, rank: int) -> AbstractContextManager[None]:
        """Inside, the module has the attributes of the rank whose step runs."""
        return nullcontext() if rank == self.leader else self._shadows[rank].worn()

    def _body(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, rank: int) -> Callable[[], Any]:
        def body() -> Any:
            logged_for = None if rank == self.leader or not args else args[0]
            with acting_as(rank, name), self._logs.collecting(None, logged_for):
                return getattr(self._module, name)(*args, **kwargs)

        return body

    # ---- between ranks ---------------------------------------------------------------------------------------------

    def send(self, rank: int, value: Any, what: str) -> None:
        """Sends a value to a rank; ``what`` it is, for an error."""
        try:
            data = packed(move_data_to_device(value, torch.device("cpu")))
        except Exception as error:
            raise TypeError(
                f"{what} cannot be sent to rank {rank}, because it cannot be pickled ({error}): in a pipeline of"
                " several ranks the leader runs the steps for all of them. Return tensors, numbers or nests of them,"
                " and use batches of such"
            ) from error
        send(data, rank, self._channel.group, self._wait)

    def receive(self, rank: int) -> Any:
        """Returns what a rank sends, on this rank's device."""
        return move_data_to_device(receive(rank, self._channel.group, self._wait), self._device)


def _alike(before: Any, now: Any) -> bool:
    """Whether a number or a tensor was the same; other values are not compared."""
    if isinstance(before, Tensor):
        return isinstance(now, Tensor) and before.shape == now.shape and torch.equal(before.to(now.device), now)
    return not isinstance(before, int | float) or before == now
