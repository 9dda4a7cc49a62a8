"""A step that a leader runs, for which rank and without the others: what it may do, and what it leaves (layer L)."""

from __future__ import annotations

import math
import pickle
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import LightningModule, Trainer
from torch import nn

from lightning_hetero import lightning_compat as compat
from lightning_hetero.lightning_compat.patches import patched
from lightning_hetero.pipeline.runtime.step.attributes import (
    Attributes,
    Change,
    apply_changes,
    name_of,
    numbers_of,
    value_at,
)
from lightning_hetero.pipeline.runtime.step.attributes import Path as AttributePath
from lightning_hetero.transport.alone import run_alone

# For whom which step runs; each suspended step has its own context.
_ACTS: ContextVar[tuple[int | None, str | None]] = ContextVar("acts", default=(None, None))


@contextmanager
def acting_as(rank: int, step: str) -> Iterator[None]:
    """Inside, which is the body of a user's step, this process runs it as ``rank`` would under DDP, and alone.

    Rank 0 is the only one that prints and draws.

    Args:
        rank: for which the step runs.
        step: name of the module's method.
    """
    token = _ACTS.set((rank, step))
    try:
        with leader_runs(step):
            yield
    except RuntimeError as error:
        if NO_GRAPH in str(error):
            add_hint(error)
        raise
    finally:
        _ACTS.reset(token)


def acting_rank() -> int | None:
    """Returns the rank for which a step runs here; None: none does."""
    return _ACTS.get()[0]


def acting_step() -> str | None:
    """Returns the name of the step that runs here; None: none does."""
    return _ACTS.get()[1]


def leader_runs(step: str) -> AbstractContextManager[None]:
    """Inside, which is the body of a user's step, communication with other ranks is refused: they do not run it.

    Args:
        step: name of the module's method.
    """
    return run_alone(
        f"in {step}, but in a pipeline only the first rank of each group runs it: the others would never take part."
        " self.log(..., sync_dist=True) and torchmetrics work in it, and on_train_batch_end and the hooks at the end of"
        " an epoch run on all ranks; or use strategy='hetero_balanced'"
    )


def rank_zero_acts(rank: int) -> AbstractContextManager[None]:
    """Inside, what is decorated with ``rank_zero_only`` is executed where a step runs for rank 0.

    Args:
        rank: this process.
    """
    return patched(rank_zero_only, "rank", _Rank(rank))


class _Rank(int):
    """The number in ``rank_zero_only.rank``, which is compared with 0."""

    def __eq__(self, other: Any) -> bool:
        acts = acting_rank()
        return int(self if acts is None else acts) == other

    __hash__ = int.__hash__

    def __gt__(self, other: Any) -> bool:  # a logger asks so before it opens its files
        acts = acting_rank()
        if acts == 0 and int(self) != 0:
            raise RuntimeError(
                f"logger.experiment is open on rank 0 only, and in this pipeline rank {int(self)} runs this step: log"
                " with self.log, or use the experiment in on_train_batch_end; or pass a plan= whose first group begins"
                " with rank 0, or use strategy='hetero_balanced'"
            )
        return int(self if acts is None else acts) > other


@contextmanager
def same_settings(trainer: Trainer) -> Iterator[None]:
    """Refuses changes that training steps make to optimizers of which other ranks have their own; inside is a batch.

    Raises:
        RuntimeError: a step has changed settings of an optimizer.
    """
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    before = [group.copy() for group in groups]
    yield
    for index, (was, now) in enumerate(zip(before, groups, strict=True)):
        if was != now:  # what is the same object is not compared
            name = next(name for name, value in now.items() if name not in was or value != was[name])
            raise RuntimeError(
                f"training_step on rank {trainer.global_rank} has changed {name!r} of parameter group {index} from"
                f" {was.get(name)} to {now[name]}: in a pipeline only the first rank of each group runs it, and the"
                " optimizers of the others keep theirs. Change it in on_train_batch_start or by a scheduler that"
                " Lightning steps, or use strategy='hetero_balanced'"
            )


# ---- what may help with its errors ------------------------------------------------------------------------------

NO_GRAPH = "to not have been used in the graph"
"""Torch's words, of torch.autograd.grad."""

_OURS = str(Path(__file__).parents[2])
_LIBRARIES = sysconfig.get_path("purelib")


def add_hint(error: Exception) -> None:
    """Adds to an error of the user's step what may help; nothing, if it is no such error."""
    if len(error.args) != 1 or not isinstance(error.args[0], str):
        return
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    if NO_GRAPH in str(error):
        hint = (
            "In a pipeline the backbone's layers are on several ranks, so torch.autograd.grad cannot go through it,"
            " neither to its input nor to its parameters; use strategy='hetero_balanced'"
        )
    elif not files[-1].startswith(_OURS) and any(not name.startswith((_OURS, _LIBRARIES)) for name in files):
        hint = (
            "In a pipeline training_step is tried before training, when on_fit_start, on_train_start and"
            " on_train_epoch_start have not run: make what it needs in __init__, setup or configure_model; or say"
            " plan=, or use strategy='hetero_balanced'"
        )
    else:
        return
    error.args = (f"{str(error).rstrip('.')}. {hint}",)


# ---- what training steps keep on the module ----------------------------------------------------------------------
#
#     an epoch     training_step, on the leader, once per micro-batch:   self.kept.append(...)      16 entries
#     its end      before its hooks run:                                 leader 8, member 8         all together 16
#
# So ``torch.cat(self.kept)`` at an epoch's end, and a collective over all ranks behind it, are what they are under DDP,
# where each rank has the entries of its own batches. Sums over samples are right as sums over all ranks. A number that
# counts calls is not, and is refused; one that is computed from its batch, as a running mean, is of micro-batches.


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
        self._module, self._rank = module, rank
        self.follow(layers)
        self._counted: set[AttributePath] = set()
        self._seen: list[dict[AttributePath, float]] | None = None  # numbers as each step finds and leaves them
        self._batches, self._generation = 0, -1
        self.epoch_begins, self.counts_batches = True, False

    def follow(self, layers: Sequence[nn.Module]) -> None:
        """The layers are others from now on; not within an epoch."""
        self._layers = layers
        self._attributes = Attributes(self._module, compat.module_attributes(), without=layers)

    def note(self) -> None:
        """What the module has now, no step of the epoch has left there."""
        self._attributes.note()

    # ---- lists -----------------------------------------------------------------------------------------------------

    def share_out(
        self, leader: int, others: Sequence[int], send: Callable[[int, Any, str], None], receive: Callable[[int], Any]
    ) -> None:
        """Gives each rank of a group its part of what the leader's steps have appended in an epoch; collective in it.

        Args:
            leader: rank that runs the steps.
            others: ranks of the group besides, and idle ones that it serves; on the leader.
            send, receive: to and from a rank, see `EvaluationBatches`.
        """
        self.epoch_begins = True
        changes = self._attributes.changes()
        kept = "what training_step keeps on the module"
        if not others:
            return
        if leader != self._rank:
            send(leader, [change.path for change in changes], kept)
            apply_changes(self._module, receive(leader))
            return
        known = {path for rank in others for path in receive(rank)}
        parts: dict[int, list[Change]] = {rank: [] for rank in others}
        for change in changes:
            if isinstance(change.value, list) and change.path not in known and _can_be_sent(change.value):
                self._divide(change, parts)
        for path in self._counted - known:  # a step per batch, as on every rank under DDP
            if (value := value_at(self._module, path)) is not None:
                for part in parts.values():
                    part.append(Change(path, "set", value))
        for rank, part in parts.items():
            send(rank, part, kept)

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
