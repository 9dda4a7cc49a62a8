"""The pipeline at work: one rank of one group, step by step (layer T).

    leader                                               the other ranks of the group
    outputs = runner.train(step, micro_batches)          runner.serve(step, samples)
    outputs = runner.evaluate(step, bodies, samples=n)   runner.serve_evaluation(step)
    runner.close()                                       runner.close()

The group's schedule is generated, the same on all of its ranks, from times that the caller models. What a run computes
depends on it and on the plan in the order of sums only: random streams are seeded by step, micro-batch and layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from lightning_hetero.controller.messages import LinkTime
from lightning_hetero.pipeline.decide.schedule import Schedule
from lightning_hetero.pipeline.runtime.execute.direct_ways import DirectWay
from lightning_hetero.pipeline.runtime.execute.evaluation import Evaluation
from lightning_hetero.pipeline.runtime.execute.execution import Execution, LeaderExecution, LocalStage
from lightning_hetero.pipeline.runtime.execute.pace import BusyTime
from lightning_hetero.pipeline.runtime.execute.stage_links import ClockOf, StageLinks
from lightning_hetero.pipeline.runtime.execute.stages import Stage, streams_kept
from lightning_hetero.pipeline.runtime.execute.straight import StraightExecution
from lightning_hetero.pipeline.runtime.execute.work import LeaderWork, MicroBatch
from lightning_hetero.pipeline.runtime.measure.layer_clock import LayerClock
from lightning_hetero.pipeline.runtime.step.cut import BackboneCut
from lightning_hetero.transport.failures import FailureBoard
from lightning_hetero.types import GroupPlan

__all__ = ["MicroBatch", "RunnerSettings", "ScheduleOf", "StageRunner"]

ScheduleOf = Callable[[tuple[int, ...]], Schedule]
"""From the samples of each micro-batch to what is due."""

_SCHEDULES = 64  # kept; batches of other sizes are rare


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerSettings:
    """What is fixed for a whole run, under all of its plans.

    Attributes:
        rank: this process, global.
        device: of this rank's layers.
        seed: of the run's random streams.
        failures: of the run.
        wire: gloo process group with the group's ranks in it, see `StageLink`; all groups of a run may share one. None:
            there are no other ranks.
        ways, clock: see `StageLinks`.
        timeout_s: how long a rank waits for another at most.
        pace: learns of each computation.
        checkpoint_layers: compute each layer once more in backward instead of keeping its activations.
        time_layers: for `StageRunner.measured`.
    """

    rank: int
    device: torch.device
    seed: int
    failures: FailureBoard
    wire: dist.ProcessGroup | None = None
    ways: Mapping[int, DirectWay] = field(default_factory=dict)
    clock: ClockOf | None = None
    timeout_s: float = 1800.0
    pace: BusyTime = field(default_factory=BusyTime)
    checkpoint_layers: bool = False
    time_layers: bool = False


class StageRunner:
    """One rank of one group; what its leader trains goes through the stages. Used by one thread.

    Args:
        settings: of the run.
        layers: of the backbone, all of them, in order; used are those of this rank.
        group: the plan of its group; ranks and cuts count.
        cut: of the backbone; the leader's, None on the other ranks. A leader without one has a module without layers to
            divide: it computes whole steps.
        schedule: see `ScheduleOf`; with c calls, of c passes through the S stages, one after another:
            ``devices = (0, ..., S - 1) * c``. The same on all ranks of the group; asked once per batch shape.
        calls: of the backbone in a training step.
    """

    def __init__(
        self, settings: RunnerSettings, layers: Sequence[nn.Module], *, group: GroupPlan, cut: BackboneCut | None,
        schedule: ScheduleOf, calls: int = 1,
    ) -> None:  # fmt: skip
        self._seed = settings.seed
        self._group, self._cut, self._calls = group, cut, calls
        self._position = position = group.ranks.index(settings.rank)
        self._failures = settings.failures
        self.follow(schedule)
        self._has_trained = self._closed = self._failed = False
        first, end = group.cuts[position : position + 2]
        timed = settings.time_layers and (cut is not None or position > 0)
        self._clock = LayerClock(range(first, end), settings.device) if timed else None
        stage = Stage(
            {i: layers[i] for i in range(first, end)}, last=end == len(layers), seed=settings.seed,
            checkpoint_layers=settings.checkpoint_layers, device=settings.device, clock=self._clock,
        )  # fmt: skip
        neighbours = {group.ranks[position - 1], group.ranks[(position + 1) % len(group.ranks)]} - {settings.rank}
        links = StageLinks(
            settings.wire, settings.rank, neighbours, device=settings.device, failures=settings.failures,
            timeout_s=settings.timeout_s, ways=settings.ways, clock=settings.clock,
        )  # fmt: skip
        self._local = LocalStage(ranks=group.ranks, position=position, stage=stage, links=links, pace=settings.pace)

    def follow(self, schedule: ScheduleOf) -> None:
        """Goes by other schedules from now on; between two steps, on all ranks of the group."""
        self._schedule = lru_cache(maxsize=_SCHEDULES)(schedule)

    # ---- training --------------------------------------------------------------------------------------------------

    def train(
        self, step: int, micro_batches: Sequence[MicroBatch], *, scale: Callable[[Tensor], Tensor] | None = None,
        before_last_backward: Callable[[], None] | None = None,
    ) -> list[Any]:  # fmt: skip
        """Runs forward and backward of this group's part of a global batch; on the leader.

        To the parameters' ``.grad`` is added the sum over micro-batches of weight * gradient.

        Args:
            step: number of the training step, of the random streams.
            micro_batches: in order, one or more.
            scale: applied to each weighted loss before its backward, e.g. ``GradScaler.scale``.
            before_last_backward: called immediately before the last backward through this rank's layers, when the
                gradients of all else that this rank computes are complete except what lies before the backbone.

        Returns:
            What the bodies returned, detached.

        Raises:
            RuntimeError: another rank has failed; a body called the backbone another number of times than expected.
            BaseException: what a body raises.
        """
        with self._at_work(leader=True) as steps, self._cut or nullcontext():
            work = LeaderWork(
                micro_batches=micro_batches, step=step, seed=self._seed, scale=scale,
                before_last_backward=before_last_backward,
            )  # fmt: skip
            execution = self._execution(work, steps)
            execution.run()
            return execution.results

    def _execution(self, work: LeaderWork, steps: ExitStack) -> LeaderExecution | StraightExecution:
        """Returns what runs the leader's part of a training step.

        The first one goes the way of a pipeline even where there is one stage: so what a pipeline cannot do is refused
        whatever the plan, and not when another one comes.
        """
        if self._cut is None:
            return StraightExecution(work, self._local.pace)
        alone = len(self._group.ranks) == 1 and self._calls == 1 and self._cut.is_one_module
        if alone and self._has_trained:
            return StraightExecution(work, self._local.pace, stage=self._local.stage, cut=self._cut)
        self._has_trained = True  # or has failed, and runs nothing any more
        schedule = self._schedule(tuple([micro_batch.samples for micro_batch in work.micro_batches]))
        return LeaderExecution(self._local, schedule, work, steps=steps, calls=self._calls)

    def serve(
        self, step: int, samples: Sequence[int], *, before_last_backward: Callable[[], None] | None = None
    ) -> None:
        """Does this rank's part of `train`; on the other ranks of the group.

        Args:
            step: as the leader's.
            samples: of each of the leader's micro-batches.
            before_last_backward: see `train`.

        Raises:
            RuntimeError: another rank has failed.
        """
        with self._at_work(leader=False):
            Execution(
                self._local, self._schedule(tuple(samples)), step=step, samples=samples,
                before_last_backward=before_last_backward,
            ).run()  # fmt: skip

    def time_layers(self, now: bool) -> None:
        """Whether the layers of the passes from here on are timed one by one, by a stage runner that can."""
        self._local.stage.timed = now

    def measured(self) -> tuple[list[LinkTime], list[float]]:
        """Returns what was timed since it was last asked: messages to this rank, and its layers [s]; or nothing."""
        return self._local.links.times(), [] if self._clock is None else self._clock.take()

    # ---- evaluation ------------------------------------------------------------------------------------------------

    def evaluate(
        self, step: int, bodies: Iterable[tuple[int, Callable[[], Any]]], *, samples: int,
        within: Callable[[int], AbstractContextManager[None]] = nullcontext,
    ) -> list[Any]:  # fmt: skip
        """Runs validation, test or prediction steps, in flight behind one another; on the leader.

        Each may call the backbone any number of times.

        Args:
            step: of the random streams.
            bodies: number and step; called without arguments, under the caller's ``no_grad`` or ``inference_mode``. The
                number tells random streams apart. Drawn one by one, while those before are on their way.
            samples: of each.
            within: entered by number around what runs of a body, as often as it is resumed.

        Returns:
            What the bodies returned, in order.

        Raises:
            RuntimeError: another rank has failed; or the backbone was called with gradients enabled.
            BaseException: what a body raises.
        """
        with self._at_work(leader=True) as steps:
            evaluation = Evaluation(self._local, step=step, samples=samples, within=within)
            if len(self._group.ranks) == 1:  # nothing to cut at
                return evaluation.alone(bodies, seed=self._seed)
            assert self._cut is not None
            with self._cut:
                return evaluation.lead(bodies, steps=steps, seed=self._seed)

    def serve_evaluation(self, step: int) -> None:
        """Does this rank's part of `evaluate`; on the other ranks of the group.

        Raises:
            RuntimeError: another rank has failed.
        """
        with self._at_work(leader=False), torch.no_grad():
            Evaluation(self._local, step=step).serve()

    # ---- life ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends links and threads; on all ranks of the group, which wait for one another. Idempotent.

        Raises:
            RuntimeError: another rank has failed.
        """
        if self._closed:
            return
        self._closed = True
        self._local.links.close()

    @contextmanager
    def _at_work(self, *, leader: bool) -> Iterator[ExitStack]:
        """Keeps the caller's random streams, and yields what closes suspended steps.

        A failure is sent to all ranks, and ends this stage runner.
        """
        if self._closed or self._failed:
            raise RuntimeError(f"this stage runner {'is closed' if self._closed else 'has failed'}: make a new one")
        assert leader == (self._position == 0), self._position
        steps = ExitStack()
        try:
            with streams_kept():
                yield steps
            self._local.links.settle()
        except BaseException as error:
            self._failed = True
            self._failures.report(error)  # before anybody notices a closed connection
            with suppress(Exception), streams_kept():  # the first error counts
                steps.close()
            self._local.links.abort()
            raise

