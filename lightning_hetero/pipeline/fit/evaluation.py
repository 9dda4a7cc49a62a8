"""Validation, test and prediction batches through the pipelines: each rank reads its own, as under DDP (layer L).

    rank 0, leads     batch 0 ──► step ─┐  stages, in flight behind one another  ┌─► output 0
    rank 1, member    batch 1 ──► step ─┘  (rank 0's steps, on rank 0 and 1)     └─► output 1, sent back

Every rank has the batches that stock DDP would give it, and gets the outputs of them: what its hooks see and
``trainer.predict`` returns is the same. The steps run on the leader of its group, which alone has what is around the
layers; a rank at rest is a guest of some group. So as many batches are in flight as the group has ranks.

Ranks may have different numbers of batches to predict: one that has no more says so, and goes on to serve the others.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import LightningModule

from lightning_hetero.pipeline.decide.plans import resting
from lightning_hetero.pipeline.fit.acting import acting_as
from lightning_hetero.pipeline.fit.logs import StepLogs
from lightning_hetero.pipeline.runtime.execute.failures import FailureBoard
from lightning_hetero.pipeline.runtime.execute.stage_runner import StageRunner
from lightning_hetero.pipeline.runtime.execute.whole_step import WholeStep
from lightning_hetero.types import PipelinePlan

if TYPE_CHECKING:
    from lightning_hetero.transport.side_channel import SideChannel

__all__ = ["EvaluationBatches"]


class _Answer(NamedTuple):
    """What the leader sends back for one turn.

    Attributes:
        output: of the rank's step.
        over: nobody of the group had a batch in this turn.
    """

    output: Any
    over: bool


_Request = tuple[str, tuple[Any, ...], dict[str, Any]]
"""What a rank asks for: the name of the module's method, and its arguments, the batch first."""


class EvaluationBatches:
    """Runs evaluation steps of one run on one rank.

    Args:
        module: whose steps they are.
        channel: over all ranks.
        failures: of the run.
        logs: collects what the steps log.
        device: of this rank.
    """

    def __init__(
        self,
        module: LightningModule,
        *,
        channel: SideChannel,
        failures: FailureBoard,
        logs: StepLogs,
        device: torch.device,
    ) -> None:
        self._module, self._channel = module, channel
        self._failures, self._logs, self._device = failures, logs, device
        self._turn = 0
        self._unfinished = False

    def settle(self, plan: PipelinePlan, runner: StageRunner | WholeStep | None) -> None:
        """Takes the plan that is in force from now on; not during an evaluation.

        Args:
            plan: the same on all ranks.
            runner: this rank's stage; None for a rank at rest.
        """
        assert not self._unfinished
        rank, self._runner = self._channel.rank, runner
        at_rest = resting(plan, self._channel.world_size)
        # Each group's ranks, its leader first, and its guests behind them.
        parties = [[*group.ranks, *at_rest[i :: len(plan.groups)]] for i, group in enumerate(plan.groups)]
        self._party = next(party for party in parties if rank in party)
        self._leader = self._party[0]

    @property
    def _leads(self) -> bool:
        return self._leader == self._channel.rank

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
        """Serves until no rank of the group has a batch left, when this rank has none; nothing, if that has been done.

        Raises:
            RuntimeError: another rank still validates or tests.
        """
        while self._unfinished:
            self._unfinished = not self._take_turn(None).over

    def _take_turn(self, request: _Request | None) -> _Answer:
        self._turn += 1
        if self._leads:
            return self._lead(request)
        self._send(self._leader, request, "the batch of an evaluation")
        if self._runner is not None:
            self._runner.serve_evaluation(-self._turn)
        answer: _Answer = self._receive(self._leader)
        return answer

    def _lead(self, request: _Request | None) -> _Answer:
        assert self._runner is not None
        clients: list[int] = []

        def bodies() -> Iterator[tuple[int, Callable[[], Any]]]:
            for rank in self._party:
                asked: _Request | None = request if rank == self._leader else self._receive(rank)
                if asked is None:
                    continue
                if request is None and asked[0] != "predict_step":
                    raise RuntimeError(
                        f"rank {rank} has more batches for {asked[0]} than rank {self._leader}: all ranks need as many."
                        " Use a dataset with a length, or limit_val_batches and limit_test_batches"
                    )
                clients.append(rank)
                yield rank, self._body(*asked, rank=rank)

        outputs = self._runner.evaluate(-self._turn, bodies(), samples=1)
        found = dict(zip(clients, outputs, strict=True))
        for rank in self._party[1:]:
            self._send(rank, _Answer(found.get(rank), not clients), "the output of an evaluation step")
        return _Answer(found.get(self._leader), not clients)

    def _body(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, rank: int
    ) -> Callable[[], Any]:
        own = rank == self._leader

        def body() -> Any:
            with acting_as(rank), self._logs.collecting(None, None if own or not args else args[0]):
                return getattr(self._module, name)(*args, **kwargs)

        return body

    # ---- between ranks ---------------------------------------------------------------------------------------------

    def _send(self, rank: int, value: Any, what: str) -> None:
        try:
            buffer = io.BytesIO()
            pickle.dump(move_data_to_device(value, torch.device("cpu")), buffer, protocol=5)
        except Exception as error:
            raise TypeError(
                f"{what} cannot be sent to rank {rank}, because it cannot be pickled ({error}): in a pipeline of"
                " several ranks the leader runs the steps for all of them. Return tensors, numbers or nests of them,"
                " and use batches of such"
            ) from error
        data = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
        for tensor in (torch.tensor([data.numel()]), data):
            self._wait(dist.isend(tensor, rank, group=self._channel.group))

    def _receive(self, rank: int) -> Any:
        size = torch.zeros(1, dtype=torch.int64)
        self._wait(dist.irecv(size, rank, group=self._channel.group))
        data = torch.empty(int(size), dtype=torch.uint8)
        self._wait(dist.irecv(data, rank, group=self._channel.group))
        return move_data_to_device(pickle.loads(data.numpy().tobytes()), self._device)

    def _wait(self, work: dist.Work | None) -> None:
        assert work is not None
        self._failures.wait_for_peer(work)

