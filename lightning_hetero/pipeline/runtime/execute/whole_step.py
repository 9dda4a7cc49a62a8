"""One rank that computes the whole step by itself: the stage runner of a module without layers to divide (layer T)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from lightning_hetero.pipeline.runtime.execute.failures import FailureBoard
from lightning_hetero.pipeline.runtime.execute.stages import streams_kept
from lightning_hetero.pipeline.runtime.execute.straight import StraightExecution
from lightning_hetero.pipeline.runtime.execute.work import LeaderRunner, LeaderWork, Pace
from lightning_hetero.pipeline.runtime.step.random_streams import seed_streams, stream_seed


class WholeStep(LeaderRunner):
    """Stands in for `StageRunner` in a group of one rank. Used by one thread.

    Args:
        failures: of the run.
        seed: of the run's random streams: a micro-batch draws from ``stream_seed(seed, step, number)``.
        pace: emulates a device.
    """

    def __init__(self, *, failures: FailureBoard, seed: int, pace: Pace | None = None) -> None:
        super().__init__(seed)
        self._failures, self._pace = failures, pace

    def _execution(self, work: LeaderWork) -> StraightExecution:
        return StraightExecution(work, self._pace)

    def serve(self, *args: Any, **kwargs: Any) -> None:
        """Never called: there are no other ranks in the group."""
        raise AssertionError("a group of one rank has no members")

    serve_evaluation = serve

    def evaluate(
        self,
        step: int,
        bodies: Iterable[tuple[int, Callable[[], Any]]],
        *,
        samples: int,
        within: Callable[[int], AbstractContextManager[None]] = nullcontext,
    ) -> list[Any]:
        """Runs validation, test or prediction steps; see `StageRunner.evaluate`."""
        del samples
        results: list[Any] = []
        with self._leading():
            for number, body in bodies:
                seed_streams(stream_seed(self._seed, step, number))
                with within(number):
                    results.append(body())
        return results

    def close(self) -> None:
        """Nothing is open."""

    @contextmanager
    def _leading(self) -> Iterator[None]:
        try:
            with streams_kept():
                yield
        except BaseException as error:
            self._failures.report(error)
            raise
