"""What training steps keep on the module: shared out among the ranks of a group, and counted as under DDP (layer L).

    an epoch     training_step, on the leader, once per micro-batch:   self.kept.append(...)      16 entries
    its end      before its hooks run:                                 leader 8, member 8         all together 16

So ``torch.cat(self.kept)`` at an epoch's end, and a collective over all ranks behind it, are what they are under DDP,
where each rank has the entries of its own batches. Sums over samples are right as sums over all ranks. A number that
counts calls is not, and is refused; one that is computed from its batch, as a running mean, is of micro-batches.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby, pairwise
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn

from lightning_hetero import lightning_compat as compat
from lightning_hetero.pipeline.fit.evaluation import EvaluationBatches
from lightning_hetero.pipeline.runtime.step.attributes import (
    Attributes,
    Change,
    Path,
    apply_changes,
    name_of,
    numbers_of,
    value_at,
)


class MemberOutputs(dict[str, Any]):
    """What ``training_step`` has returned, on a rank that has not run it: the loss of the global batch."""

    def __init__(self, outputs: Mapping[str, Any], *, rank: int, leader: int) -> None:
        super().__init__(outputs)
        self._rank, self._leader = rank, leader

    def __missing__(self, key: str) -> Any:
        raise RuntimeError(
            f"outputs[{key!r}] of training_step is on rank {self._leader}, which runs the step for the group of rank"
            f" {self._rank} in a pipeline; here is outputs['loss'] only. Use it where"
            " trainer.strategy.current_samples() is not 0, keep it by self.log, or use strategy='hetero_balanced'"
        )

    def get(self, key: str, default: Any = None) -> Any:
        return self[key]


class KeptBySteps:
    """Looks after the attributes of one module on one rank.

    Args:
        module: that is trained.
        rank: this process.
        layers: of the backbone, which run once per micro-batch on whichever rank holds them.

    Attributes:
        epoch_begins: with the next batch.
        counts_batches: a number counts the steps, and is right only as long as they run once per batch on every rank.
    """

    def __init__(self, module: LightningModule, rank: int, layers: Sequence[nn.Module]) -> None:
        self._module, self._rank, self._layers = module, rank, layers
        self._attributes = Attributes(module, compat.module_attributes(), without=layers)
        self._counted: set[Path] = set()
        self._seen: list[dict[Path, float]] | None = None  # numbers as the micro-batches' steps find and leave them
        self._batches, self._generation = 0, -1
        self.epoch_begins, self.counts_batches = True, False

    def note(self) -> None:
        """What the module has now, no step of the epoch has left there."""
        self._attributes.note()

    # ---- lists -----------------------------------------------------------------------------------------------------

    def share_out(self, group: EvaluationBatches) -> None:
        """Gives each rank of a group its part of what the leader's steps have appended in an epoch; collective in it.

        Args:
            group: of this rank, and those at rest that it serves.
        """
        self.epoch_begins = True
        changes = self._attributes.changes()
        others, kept = group.others, "what training_step keeps on the module"
        if not others:
            return
        if group.leader != self._rank:
            group.send(group.leader, [change.path for change in changes], kept)
            apply_changes(self._module, group.receive(group.leader))
            return
        known = {path for rank in others for path in group.receive(rank)}
        parts: dict[int, list[Change]] = {rank: [] for rank in others}
        for change in changes:
            if isinstance(change.value, list) and change.path not in known and _can_be_sent(change.value):
                self._divide(change, parts)
        for path in self._counted - known:  # a step per batch, as on every rank under DDP
            if (value := value_at(self._module, path)) is not None:
                for part in parts.values():
                    part.append(Change(path, "set", value))
        for rank, part in parts.items():
            group.send(rank, part, kept)

    def _divide(self, change: Change, parts: dict[int, list[Change]]) -> None:
        entries: list[Any] = value_at(self._module, change.path)
        before = len(entries) - len(change.value)
        count, ranks = len(change.value), len(parts) + 1
        ends = [before + count * (i + 1) // ranks for i in range(ranks)]
        for i, part in enumerate(parts.values()):
            part.append(change._replace(value=entries[ends[i] : ends[i + 1]]))
        del entries[ends[0] :]

    # ---- numbers ---------------------------------------------------------------------------------------------------

    def watch(self, generation: int, *, leads: bool) -> None:
        """A batch begins; the numbers are looked at on a leader where an epoch or a plan does, and in the first two.

        Args:
            generation: of the plan in force.
            leads: whether this rank runs steps.
        """
        due = self.epoch_begins or generation != self._generation or self._batches < 2
        self._generation = generation
        if leads and due and self._seen is None:
            self._seen = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the step of one micro-batch."""
        if self._seen is None:
            yield
            return
        self._look()
        yield
        self._look()

    def _look(self) -> None:
        assert self._seen is not None
        numbers = numbers_of(self._module, compat.module_attributes(), without=self._layers)
        self._seen.append({path: float(value) for path, value in numbers.items()})

    def check(self, samples: int, micro_batches: int) -> None:
        """The steps of a batch have run: looks at what they have counted, where that is due.

        Args:
            samples: of this rank's batch; numbers that grow by these count samples.
            micro_batches: steps that it took.

        Raises:
            RuntimeError: they count their calls, and there are several per batch.
        """
        if self._batches or micro_batches > 1:  # of a single step it takes two batches to see
            total = samples * (1 if micro_batches > 1 else 2)
            seen, self._seen = self._seen or [], None
            counters = [
                path
                for path in (seen[-1] if seen else ())
                if counts_calls([numbers[path] for numbers in seen if path in numbers], total)
            ]
            self._counted.update(counters)
            if counters and micro_batches > 1:
                raise RuntimeError(
                    f"training_step on rank {self._rank} counts its calls in {name_of(counters[0])}: in a pipeline it"
                    f" runs once per micro-batch, {micro_batches} times per batch here, and on the first rank of each"
                    " group only. Count in on_train_batch_start or on_train_batch_end, which run once per batch on all"
                    " ranks, or use strategy='hetero_balanced'"
                )
            self.counts_batches = bool(counters)
        self.epoch_begins = False
        self._batches += 1


def _can_be_sent(entries: list[Any]) -> bool:
    """Whether another rank can be given entries of a list: of other ones the leader keeps all."""
    try:
        pickle.dumps(entries[:1])
    except Exception:
        return False
    return True


def counts_calls(values: Sequence[float], samples: int) -> bool:
    """Whether a number grew, or shrank, by the same each time, and not by the samples.

    >>> counts_calls([0, 1, 1, 2, 3], 12), counts_calls([1.0, 0.5, 0.25], 12)
    (True, True)
    >>> counts_calls([0, 4, 8, 12], 12), counts_calls([0, 4, 7, 12], 8), counts_calls([0, 1, 1], 12)
    (False, False, False)
    """
    found = [value for value, _ in groupby(values)]
    if len(found) < 3 or found[-1] - found[0] == samples:
        return False
    steps = [b - a for a, b in pairwise(found)]
    factors = [b / a for a, b in pairwise(found) if a]
    return any(len(x) == len(steps) and all(math.isclose(x[0], y, rel_tol=1e-5) for y in x) for x in (steps, factors))
