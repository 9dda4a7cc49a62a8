"""Splits the server's work on parameters over threads, and optimizers with it (layer T).

A torch operation lets go of the interpreter's lock, so threads of one process share the work on large parameters. Each
parameter belongs to one thread, whose operations are those of a single thread: results do not depend on the split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch.optim import Optimizer

from lightning_hetero.transport.seqlock import cores

T = TypeVar("T")

_LARGE = 10_000_000  # numbers; below, threads cost more than they bring

# Those whose step treats every tensor by itself. Exact classes: a subclass may do anything.
_PER_TENSOR = frozenset(
    getattr(torch.optim, name)
    for name in (
        "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop",
        "Rprop", "SGD",
    )
    if hasattr(torch.optim, name)
)  # fmt: skip


class ThreadShards:
    """Contiguous ranges of parameters, about equal in size, each with a thread.

    Args:
        numels: numbers in each parameter.
        shards: how many; None: 1, or for more than ten million numbers as many as there are cores, at most 8.

    Attributes:
        parts: indices of each shard's parameters; none is empty unless there is only one.

    Raises:
        ValueError: ``shards`` is below 1.
    """

    def __init__(self, numels: Sequence[int], shards: int | None = None) -> None:
        if shards is None:
            shards = min(cores(), 8) if sum(numels) > _LARGE else 1
        if type(shards) is not int or shards < 1:
            raise ValueError(
                f"shards={shards!r} must be a whole number >= 1 (threads), or None for a choice by size"
            )
        self.parts = _balanced(numels, shards)
        self._of = {i: shard for shard, part in enumerate(self.parts) for i in part}
        self._threads: ThreadPoolExecutor | None = None
        if len(self.parts) > 1:
            torch.set_num_threads(1)
            self._threads = ThreadPoolExecutor(
                len(self.parts) - 1,
                thread_name_prefix="shard",
                initializer=torch.set_num_threads,
                initargs=(1,),
            )

    def __len__(self) -> int:
        return len(self.parts)

    def of(self, index: int) -> int:
        """Returns the shard of a parameter."""
        return self._of[index]

    def run(self, work: Callable[[int], T]) -> list[T]:
        """Runs ``work(shard)`` for every shard at the same time and returns the results in order."""
        if self._threads is None:
            return [work(0)]
        others = [self._threads.submit(work, shard) for shard in range(1, len(self.parts))]
        try:
            first = work(0)
        finally:
            results = [other.exception() for other in others]  # waits for all before anybody goes on
        for error in results:
            if error is not None:
                raise error
        return [first, *(other.result() for other in others)]

    def close(self) -> None:
        """Ends the threads; idempotent."""
        if self._threads is not None:
            self._threads.shutdown(wait=True)


def _balanced(numels: Sequence[int], shards: int) -> list[list[int]]:
    """Returns consecutive indices in at most ``shards`` parts: each boundary where its share of the sum is reached."""
    total, seen = sum(numels), 0
    parts: list[list[int]] = [[] for _ in range(shards)]
    for i, numel in enumerate(numels):
        middle = seen + numel / 2
        parts[min(shards - 1, int(shards * middle / total)) if total else 0].append(i)
        seen += numel
    return [part for part in parts if part] or [[]]


def step(optimizer: Optimizer, shard_of: Sequence[Sequence[int]], shards: ThreadShards) -> None:
    """Steps an optimizer; one that treats every tensor by itself in all shards at once.

    Args:
        shard_of: per group, the shard of each of its parameters.
    """
    cls = type(optimizer)
    if len(shards) == 1 or cls not in _PER_TENSOR:
        cls.step(optimizer)  # the class's: an instance may have a wrapped or switched off `step`
        return

    def work(shard: int) -> None:
        part = object.__new__(cls)
        part.__dict__.update(vars(optimizer))  # the very same state, defaults and hooks
        part.param_groups = [
            {**group, "params": [p for p, own in zip(group["params"], owners, strict=True) if own == shard]}
            for group, owners in zip(optimizer.param_groups, shard_of, strict=True)
        ]
        cls.step(part)

    shards.run(work)
