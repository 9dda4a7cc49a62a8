"""One rank that computes the whole step by itself: the stage runner of a module without layers to divide (layer T)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from lightning_hetero.pipeline.decide.schedule import Kind
from lightning_hetero.pipeline.runtime.execute.execution import MicroBatch, Pace
from lightning_hetero.pipeline.runtime.execute.failures import FailureBoard
from lightning_hetero.pipeline.runtime.execute.stages import streams_kept
from lightning_hetero.pipeline.runtime.step.tensor_trees import detached, weighted_loss
from lightning_hetero.pipeline.runtime.step.torch_state import (
    seed_host_streams,
    seed_torch_streams,
    stream_seed,
)

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
        results: list[Any] = []
        with self._at_work():
            for i, micro_batch in enumerate(micro_batches):
                start_s = self._began()
                self._seed_streams(step, micro_batch.number)
                output = micro_batch.body()
                loss = weighted_loss(output, micro_batch.weight, scale)
                results.append(detached(output))
                del output
                start_s = self._paced(Kind.FORWARD, micro_batch.samples, start_s)
                if i == len(micro_batches) - 1 and before_last_backward is not None:
                    before_last_backward()
                loss.backward()
                del loss
                self._paced(Kind.BACKWARD, micro_batch.samples, start_s)
            if not micro_batches and before_last_backward is not None:
                before_last_backward()
        return results

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
                self._seed_streams(step, number)
                results.append(body())
        return results

    def close(self) -> None:
        """Nothing is open."""

    def _seed_streams(self, step: int, number: int) -> None:
        seed = stream_seed(self._seed, step, number)
        seed_torch_streams(seed)
        seed_host_streams(seed)

    def _paced(self, kind: Kind, samples: int, start_s: float) -> float:
        """Tells the pace of a computation that began at ``start_s``; returns when the next one begins."""
        if self._pace is not None:
            self._pace.computed(kind, 0, samples, time.perf_counter() - start_s)
        return self._began()

    def _began(self) -> float:
        if self._pace is not None:
            self._pace.began()
        return time.perf_counter()

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Keeps the caller's random streams; a failure is told to all ranks."""
        try:
            with streams_kept():
                yield
        except BaseException as error:
            self._failures.report(error)
            raise
