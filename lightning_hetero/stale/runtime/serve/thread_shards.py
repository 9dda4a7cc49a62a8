"""Splits the server's work on parameters over threads, and optimizers with it (layer T).

A torch operation lets go of the interpreter's lock, so threads of one process share the work on large parameters. Each
parameter belongs to one thread, whose operations are those of a single thread: results do not depend on the split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import torch
from torch import optim

from lightning_hetero.transport.seqlock import cores

_LARGE = 10_000_000  # numbers; below, threads cost more than they bring

# Those whose step treats every tensor by itself. Exact classes: a subclass may do anything.
_PER_TENSOR = frozenset({
    optim.ASGD, optim.Adadelta, optim.Adafactor, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.Muon,
    optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD,
})  # fmt: skip


class ThreadShards:
    """Contiguous ranges of parameters, about equal in size, each with a thread.

    Args:
        numels: numbers in each parameter.
        shards: how many; None: 1, or for more than ten million numbers as many as there are cores, at most 8.

    Attributes:
        parts: indices of each shard's parameters; none is empty unless there is only one.
    """

    def __init__(self, numels: Sequence[int], shards: int | None = None) -> None:
        if shards is None:
            shards = min(cores(), 8) if sum(numels) > _LARGE else 1
        self.parts = _balanced(numels, shards)
        self._threads: ThreadPoolExecutor | None = None
        if len(self.parts) > 1:
            torch.set_num_threads(1)
            self._threads = ThreadPoolExecutor(
                len(self.parts) - 1,
                thread_name_prefix="shard",
                initializer=torch.set_num_threads,
                initargs=(1,),
            )

    def run(self, work: Callable[[int], None]) -> None:
        """Runs ``work(shard)`` for every shard at the same time, waits for all, and raises the first error."""
        if self._threads is None:
            work(0)
            return
        others = [self._threads.submit(work, shard) for shard in range(1, len(self.parts))]
        try:
            work(0)
        finally:
            wait(others)
        for other in others:
            other.result()

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


def step(optimizer: optim.Optimizer, shard_of: Mapping[int, int], shards: ThreadShards) -> None:
    """Steps an optimizer; one that treats every tensor separately in all shards at once.

    Args:
        shard_of: the shard of each of its parameters, by identity.
    """
    cls = type(optimizer)
    if len(shards.parts) == 1 or cls not in _PER_TENSOR:
        cls.step(optimizer)  # the class's: an instance may have a wrapped or switched off `step`
        return

    def work(shard: int) -> None:
        part = object.__new__(cls)
        part.__dict__.update(vars(optimizer))  # the very same state, defaults and hooks
        part.param_groups = [
            {**group, "params": [p for p in group["params"] if shard_of[id(p)] == shard]}
            for group in optimizer.param_groups
        ]
        cls.step(part)  # pyright: ignore[reportArgumentType] (part is of the very class)

    shards.run(work)
