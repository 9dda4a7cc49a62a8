"""The pipeline at work: one rank of one group, step by step (layer T).

    leader                                               the other ranks of the group
    outputs = runner.train(step, micro_batches)          runner.serve(step, samples, numbers)
    outputs = runner.evaluate(step, bodies, samples=n)   runner.serve_evaluation(step)
    runner.close()                                       runner.close()

The group's schedule is generated, the same on all of its ranks, from times that the caller models. What a run computes
depends on it and on the plan in the order of sums only: random streams are seeded by step, micro-batch and layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from lightning_hetero.controller.messages import LinkTime
from lightning_hetero.pipeline.decide.generate import SchedulePolicy, generate
from lightning_hetero.pipeline.decide.schedule import PipelineTimes, Schedule
from lightning_hetero.pipeline.runtime.execute.direct_ways import DirectWay
from lightning_hetero.pipeline.runtime.execute.evaluation import Evaluation
from lightning_hetero.pipeline.runtime.execute.execution import Execution, LeaderExecution, LocalStage
from lightning_hetero.pipeline.runtime.execute.failures import FailureBoard
from lightning_hetero.pipeline.runtime.execute.stage_links import ClockOf, StageLinks, link_clock
from lightning_hetero.pipeline.runtime.execute.stages import Stage, streams_kept
from lightning_hetero.pipeline.runtime.execute.straight import InPlaceExecution
from lightning_hetero.pipeline.runtime.execute.work import LeaderRunner, LeaderWork, MicroBatch, Pace
from lightning_hetero.pipeline.runtime.measure.layer_clock import LayerClock
from lightning_hetero.pipeline.runtime.step.cut import BackboneCut
from lightning_hetero.pipeline.runtime.step.resumable import Carrier
from lightning_hetero.types import GroupPlan

__all__ = ["MicroBatch", "Pace", "RunnerSettings", "StageRunner", "TimesOf"]

TimesOf = Callable[[tuple[int, ...], int], PipelineTimes]
"""From the samples of each micro-batch and the backbone's calls per step to the times of a pipeline."""

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
        timeout_s: how long a rank waits for another at most; > 0.
        pace: is told of each computation.
        checkpoint_layers: compute each layer once more in backward instead of keeping its activations.
        time_layers: for `StageRunner.measured`.

    Raises:
        ValueError: a timeout out of its range.
    """

    rank: int
    device: torch.device
    seed: int
    failures: FailureBoard
    wire: dist.ProcessGroup | None = None
    ways: Mapping[int, DirectWay] = field(default_factory=dict)
    clock: ClockOf = link_clock
    timeout_s: float = 1800.0
    pace: Pace | None = None
    checkpoint_layers: bool = False
    time_layers: bool = False

    def __post_init__(self) -> None:
        if not self.timeout_s > 0.0:
            raise ValueError(f"timeout_s={self.timeout_s!r} must be > 0 (seconds)")


class StageRunner(LeaderRunner):
    """One rank of one group; what its leader trains goes through the stages. Used by one thread.

    Args:
        settings: of the run.
        layers: of the backbone, all of them, in order; used are those of this rank.
        group: the plan of its group; ranks and cuts count.
        cut: of the backbone; the leader's, None on the other ranks.
        times: see `TimesOf`; with c calls, of c passes through the S stages, one after another: tables of c * S stages,
            ``devices = (0, ..., S - 1) * c``. The same on all ranks of the group; asked once per batch shape.
        policy: of the schedule, from its times.
        calls: of the backbone in a training step.

    Raises:
        ValueError: a rank that is not of the group, cuts that do not fit the layers, a cut on another rank than the
            leader or none on it, or a number out of its range.
    """

    def __init__(
        self,
        settings: RunnerSettings,
        layers: Sequence[nn.Module],
        *,
        group: GroupPlan,
        cut: BackboneCut | None,
        times: TimesOf,
        policy: Callable[[PipelineTimes], SchedulePolicy],
        calls: int = 1,
    ) -> None:
        rank, wire = settings.rank, settings.wire
        _check(group, rank, len(layers), cut)
        if calls < 1:
            raise ValueError(f"calls={calls!r} must be >= 1 (calls of the backbone per training step)")
        if wire is None and len(group.ranks) > 1:
            raise ValueError(f"wire=None, but the group {group.ranks} has several ranks: give it a process group")
        self._group = group
        self._position = group.ranks.index(rank)
        self._cut = cut
        self._failures = settings.failures
        self._times = times
        super().__init__(settings.seed)
        self._calls = calls
        self._policy = policy
        self._schedules: dict[tuple[int, ...], Schedule] = {}
        self._has_trained = self._closed = self._failed = False
        first, end = group.cuts[self._position : self._position + 2]
        self._clock = LayerClock(range(first, end), settings.device) if settings.time_layers else None
        stage = Stage(
            {i: layers[i] for i in range(first, end)},
            last=end == len(layers),
            seed=settings.seed,
            checkpoint_layers=settings.checkpoint_layers,
            device=settings.device,
            clock=self._clock,
        )
        self._carrier = Carrier() if self._position == 0 else None
        links = None
        if wire is not None and len(group.ranks) > 1:
            links = StageLinks(
                wire,
                rank,
                {group.ranks[self._before], group.ranks[self._behind]},
                device=settings.device,
                failures=settings.failures,
                timeout_s=settings.timeout_s,
                ways=settings.ways,
                clock=settings.clock,
            )
        self._local = LocalStage(
            ranks=group.ranks, position=self._position, stage=stage, links=links, pace=settings.pace
        )

    @property
    def _before(self) -> int:
        return (self._position - 1) % len(self._group.ranks)

    @property
    def _behind(self) -> int:
        return (self._position + 1) % len(self._group.ranks)

    def schedule(self, samples: Sequence[int]) -> Schedule:
        """Returns what the ranks of the group execute for micro-batches of so many samples.

        Raises:
            ValueError: the given times are not those of such a pipeline.
        """
        samples = tuple(samples)
        if samples not in self._schedules:
            while len(self._schedules) >= _SCHEDULES:
                del self._schedules[next(iter(self._schedules))]
            times = self._times(samples, self._calls)
            devices = tuple(range(len(self._group.ranks))) * self._calls
            if (times.devices, times.micro_batches) != (devices, len(samples)):
                raise ValueError(
                    f"the times of micro-batches {samples} are of devices {times.devices}, {times.micro_batches}"
                    f" micro-batches; need devices {devices}, {len(samples)}"
                )
            self._schedules[samples] = generate(times, self._policy(times))
        return self._schedules[samples]

    def follow(self, times: TimesOf, policy: Callable[[PipelineTimes], SchedulePolicy]) -> None:
        """Makes schedules from other times from now on; between two steps, on all ranks of the group."""
        self._times, self._policy = times, policy
        self._schedules.clear()

    # ---- training --------------------------------------------------------------------------------------------------

    @contextmanager
    def _leading(self) -> Iterator[None]:
        with self._at_work(leader=True), self._entered():
            yield

    def _execution(self, work: LeaderWork) -> LeaderExecution | InPlaceExecution:
        """Returns what runs the leader's part of a training step.

        The first one goes the way of a pipeline even where there is one stage: so what a pipeline cannot do is refused
        whatever the plan, and not when another one comes.
        """
        assert self._carrier is not None and self._cut is not None
        alone = len(self._group.ranks) == 1 and self._calls == 1 and self._cut.is_one_module
        if alone and self._has_trained:
            return InPlaceExecution(work, self._local.pace, stage=self._local.stage, cut=self._cut)
        self._has_trained = True  # or has failed, and runs nothing any more
        schedule = self.schedule([micro_batch.samples for micro_batch in work.micro_batches])
        return LeaderExecution(self._local, schedule, work, carrier=self._carrier, calls=self._calls)

    def serve(
        self,
        step: int,
        samples: Sequence[int],
        numbers: Sequence[int],
        *,
        before_last_backward: Callable[[], None] | None = None,
    ) -> None:
        """Does this rank's part of `train`; on the other ranks of the group, with what the leader's micro-batches have.

        Raises:
            ValueError: another number of samples than of numbers.
            RuntimeError: another rank has failed.
        """
        with self._at_work(leader=False):
            if len(samples) != len(numbers):
                raise ValueError(f"{len(samples)} samples for {len(numbers)} numbers: one each per micro-batch")
            if not samples:
                if before_last_backward is not None:
                    before_last_backward()
                return
            Execution(
                self._local,
                self.schedule(samples),
                step=step,
                samples=samples,
                numbers=numbers,
                before_last_backward=before_last_backward,
            ).run()

    def time_layers(self, now: bool) -> None:
        """Whether the layers of the passes from here on are timed one by one, by a stage runner that can."""
        self._local.stage.timed = now

    def measured(self) -> tuple[list[LinkTime], list[float]]:
        """Returns what was timed since it was last asked: messages to this rank, and its layers [s]; or nothing."""
        links = self._local.links
        return [] if links is None else links.times(), [] if self._clock is None else self._clock.take()

    # ---- evaluation ------------------------------------------------------------------------------------------------

    def evaluate(
        self,
        step: int,
        bodies: Iterable[tuple[int, Callable[[], Any]]],
        *,
        samples: int,
        within: Callable[[int], AbstractContextManager[None]] = nullcontext,
    ) -> list[Any]:
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
        with self._at_work(leader=True):
            assert self._carrier is not None
            evaluation = Evaluation(self._local, step=step, samples=samples, within=within)
            if len(self._group.ranks) == 1:  # nothing to cut at
                return evaluation.alone(bodies, carrier=self._carrier, seed=self._seed)
            with self._entered():
                return evaluation.lead(bodies, carrier=self._carrier, seed=self._seed)

    def serve_evaluation(self, step: int) -> None:
        """Does this rank's part of `evaluate`; on the other ranks of the group.

        Raises:
            RuntimeError: another rank has failed.
        """
        with self._at_work(leader=False), torch.no_grad():
            Evaluation(self._local, step=step).serve()

    # ---- life ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends links, threads and suspended steps; on all ranks of the group, which wait for one another. Idempotent.

        Raises:
            RuntimeError: another rank has failed.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if self._carrier is not None:
                self._carrier.close()
        finally:
            if self._local.links is not None:
                self._local.links.close()

    @contextmanager
    def _at_work(self, *, leader: bool) -> Iterator[None]:
        """Keeps the caller's random streams; a failure is told to all ranks, and ends this stage runner."""
        if self._closed or self._failed:
            raise RuntimeError(f"this stage runner {'is closed' if self._closed else 'has failed'}: make a new one")
        if leader != (self._position == 0):
            raise RuntimeError(
                f"rank {self._group.ranks[self._position]} is stage {self._position} of its group: the leader trains"
                " and evaluates, the others serve"
            )
        try:
            with streams_kept():
                yield
            if self._local.links is not None:
                self._local.links.settle()
        except BaseException as error:
            self._failed = True
            self._failures.report(error)  # before anybody notices a closed connection
            if self._carrier is not None:
                with suppress(Exception), streams_kept():  # the first error counts
                    self._carrier.close()
            if self._local.links is not None:
                self._local.links.abort()
            raise

    @contextmanager
    def _entered(self) -> Iterator[None]:
        assert self._cut is not None
        with self._cut:
            yield


def _check(group: GroupPlan, rank: int, layers: int, cut: BackboneCut | None) -> None:
    if rank not in group.ranks:
        raise ValueError(f"rank={rank} is not of the group {group.ranks}")
    cuts = group.cuts
    if len(cuts) != len(group.ranks) + 1 or cuts[0] != 0 or cuts[-1] != layers or list(cuts) != sorted(set(cuts)):
        raise ValueError(
            f"cuts={cuts} must be {len(group.ranks) + 1} increasing numbers from 0 to {layers}, the number of layers"
        )
    if (cut is None) == (rank == group.ranks[0]):
        raise ValueError(f"cut={cut!r} on rank {rank}: the leader, rank {group.ranks[0]}, needs one, and no other")
