"""One rank that computes the whole step by itself: the stage runner of a module without layers to divide (layer T)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from lightning_hetero.pipeline.runtime.execute.failures import FailureBoard
from lightning_hetero.pipeline.runtime.execute.stages import streams_kept
from lightning_hetero.pipeline.runtime.execute.straight import StraightExecution
from lightning_hetero.pipeline.runtime.execute.work import LeaderWork, MicroBatch, Pace
from lightning_hetero.pipeline.runtime.step.random_streams import seed_streams, stream_seed

__all__ = ["WholeStep"]


class WholeStep:
    """Stands in for `StageRunner` in a group of one rank. Used by one thread.

    Args:
        failures: of the run.
        seed: of the run's random streams: a micro-batch draws from ``stream_seed(seed, step, number)``.
        pace: emulates a device.
    """

    def __init__(self, *, failures: FailureBoard, seed: int, pace: Pace | None = None) -> None:
        self._failures, self._seed, self._pace = failures, seed, pace

    def train(
        self,
        step: int,
        micro_batches: Sequence[MicroBatch],
        *,
        scale: Callable[[Tensor], Tensor] | None = None,
        before_last_backward: Callable[[], None] | None = None,
    ) -> list[Any]:
        """Runs forward and backward of this rank's part of a global batch, one micro-batch after the other.

        Args, returns and raises: see `StageRunner.train`.
        """
        with self._at_work():
            if not micro_batches:
                if before_last_backward is not None:
                    before_last_backward()
                return []
            work = LeaderWork(
                micro_batches=micro_batches,
                step=step,
                seed=self._seed,
                scale=scale,
                before_last_backward=before_last_backward,
            )
            execution = StraightExecution(work, self._pace)
            execution.run()
            return execution.results

    def serve(self, *args: Any, **kwargs: Any) -> None:
        """Never called: there are no other ranks in the group."""
        raise AssertionError("a group of one rank has no members")

    serve_evaluation = serve

    def evaluate(self, step: int, bodies: Iterable[tuple[int, Callable[[], Any]]], *, samples: int) -> list[Any]:
        """Runs validation, test or prediction steps; see `StageRunner.evaluate`."""
        del samples
        results: list[Any] = []
        with self._at_work():
            for number, body in bodies:
                seed_streams(stream_seed(self._seed, step, number))
                results.append(body())
        return results

    def close(self) -> None:
        """Nothing is open."""

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Keeps the caller's random streams; a failure is told to all ranks."""
        try:
            with streams_kept():
                yield
        except BaseException as error:
            self._failures.report(error)
            raise
