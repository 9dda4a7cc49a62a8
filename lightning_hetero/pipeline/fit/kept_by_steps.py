"""What training steps keep on the module: shared out among the ranks of a group, and counted as under DDP (layer L).

    an epoch     training_step, on the leader, once per micro-batch:   self.kept.append(...)      16 entries
    its end      before its hooks run:                                 leader 8, member 8         all together 16

So ``torch.cat(self.kept)`` at an epoch's end, and a collective over all ranks behind it, are what they are under DDP,
where each rank has the entries of its own batches. A number that adds up is not: which part of it is whose, and whether
it counts calls, cannot be known. One that has grown by the samples is right in the sum of all ranks; others are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule

from lightning_hetero.pipeline.runtime.step.attributes import (
    Attributes,
    Change,
    Path,
    apply_changes,
    name_of,
    numbers_of,
    value_at,
)

if TYPE_CHECKING:
    from lightning_hetero.pipeline.fit.evaluation import EvaluationBatches

__all__ = ["MACHINERY", "KeptBySteps", "MemberOutputs"]

MACHINERY = frozenset(vars(LightningModule()))
"""Attributes of Lightning's."""


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
    """

    def __init__(self, module: LightningModule, rank: int) -> None:
        self._module, self._rank = module, rank
        self._attributes = Attributes(module, MACHINERY)
        self._of_samples: set[Path] = set()  # numbers that grow by the samples
        self._seen: list[dict[Path, float]] | None = None  # numbers as the micro-batches' steps find and leave them

    def note(self) -> None:
        """What the module has now, no step of the epoch has left there."""
        self._attributes.note()

    # ---- lists -----------------------------------------------------------------------------------------------------

    def share_out(self, group: EvaluationBatches) -> None:
        """Gives each rank of a group its part of what the leader's steps have appended in an epoch; collective in it.

        Args:
            group: of this rank, and those at rest that it serves.
        """
        changes = self._attributes.changes()
        others = group.others
        if not others:
            return
        if not group.leads:
            group.tell([change.path for change in changes])
            apply_changes(self._module, group.hear())
        else:
            known = {path for rank in others for path in group.hear(rank)}
            parts: dict[int, list[Change]] = {rank: [] for rank in others}
            for change in changes:
                if isinstance(change.value, list) and change.path not in known:
                    self._divide(change, parts)
            for rank, part in parts.items():
                group.tell(part, rank)

    def _divide(self, change: Change, parts: dict[int, list[Change]]) -> None:
        entries: list[Any] = value_at(self._module, change.path)
        before = len(entries) - len(change.value)
        count, ranks = len(change.value), len(parts) + 1
        ends = [before + count * (i + 1) // ranks for i in range(ranks)]
        for i, part in enumerate(parts.values()):
            part.append(change._replace(value=entries[ends[i] : ends[i + 1]]))
        del entries[ends[0] :]

    # ---- numbers ---------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """The numbers are looked at in the batch that comes."""
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
        self._seen.append({path: float(value) for path, value in numbers_of(self._module, MACHINERY, whole=True).items()})

    def changing(self, samples: int, micro_batches: int) -> list[str]:
        """Returns numbers that the steps of the batch have changed, by name; none where they are not looked at.

        Args:
            samples: of the batch, here.
            micro_batches: that they were in.

        Raises:
            RuntimeError: several steps have changed one, one after the other, and not by the samples.
        """
        seen, self._seen = self._seen, None
        changed: list[str] = []
        for path in seen[-1] if seen else ():
            values = [found[path] for found in seen or () if path in found]
            if len(set(values)) > 1:
                changed.append(name_of(path))
            counts = path[0] == "" or all(map(float.is_integer, values))  # or else a statistic, such as BatchNorm's
            if len(set(values)) > 2 and values[-1] - values[0] == samples:
                self._of_samples.add(path)
            elif len(set(values)) > 2 and counts and path not in self._of_samples:
                raise RuntimeError(
                    f"training_step on rank {self._rank} has changed {name_of(path)} from {values[0]:g} to"
                    f" {values[-1]:g} in one batch: in a pipeline it runs once per micro-batch, {micro_batches} times"
                    " here, on the first rank of each group only. Change it in on_train_batch_start or"
                    " on_train_batch_end, which run once per batch on all ranks; log means by self.log; or use"
                    " strategy='hetero_balanced'"
                )
        return changed
