"""What callbacks may ask of what measures a run: a strategy of ours, or a callback (layer L).

What may go wrong in a callback that only observes, without ending the training.

How much a rank's batch is: in samples, whatever the batch is, or in the user's items, e.g. tokens.

SLURM's signal that the job is to be requeued: a checkpoint and the request, but between two batches.

Lightning's handler does both wherever the signal finds the program. Where ranks are in different batches, or a batch is
on its way through layers that ranks hold in parts, that waits for the end of a batch.

    `RequeueByOne`      the lowest rank saves, as the others' state is not on them, and waits for no other rank
    `RequeueTogether`   rank 0's signal reaches all with a batch, and all save at the end of that one
"""

from __future__ import annotations

import functools
import math
import os
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sized
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, cast

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hetero import lightning_compat as compat
from lightning_hetero.emulate.scenario import Scenario
from lightning_hetero.lightning_compat import trainer_callbacks
from lightning_hetero.lightning_compat.patches import patched
from lightning_hetero.measure.step_clock import StepProbe
from lightning_hetero.record.files import tell
from lightning_hetero.types import Event, StepReport


class EventSource:
    """Notes events of this rank; a callback of the user's may be one, too."""

    def step_events(self) -> list[Event]:
        """Returns and forgets this rank's events since the last call, for `HeteroTrace`; their times by the clock
        ``time.perf_counter``."""
        return []


class Reporting(EventSource):
    """A strategy that measures its ranks; every answer has a default, which says that nothing is known."""

    @property
    def measures(self) -> bool:
        """Whether it does so now: on one device there is nothing to compare."""
        return True

    @property
    def ranks_per_part(self) -> int:
        """Neighbouring ranks that train on the same samples, e.g. those of a tensor-parallel group: in reports one."""
        return 1

    def current_samples(self) -> int | None:
        """Samples of the batch this rank is training on; 0: a dummy that counts nothing; ``None``: not known."""
        return None

    def ask_report(self) -> None:
        """Says while a batch runs that `step_report` and `engine_metrics` are wanted at its end, so that what they need
        can travel with what the batch sends anyway; without it they may communicate. Other ranks need not be asked."""

    def step_report(self) -> StepReport | None:
        """Samples, own work and waiting of all ranks; ``None`` if nothing (new) is known."""
        return None

    @property
    def meets(self) -> bool:
        """Whether all ranks end a step together and each holds the whole model, so that what they wait for one another
        can be separated from all else that is no work."""
        return True

    def take_reports(self) -> list[StepReport] | None:
        """Returns and forgets reports of steps since the last call, in which ranks' seconds per item can be compared;
        empty: no reports, or they cannot be. ``None``: `step_report` is all there is, and they can."""
        return None

    def engine_metrics(self) -> dict[str, float]:
        """The engine's own numbers, logged as ``hetero/<name>``."""
        return {}

    def summary(self) -> str | None:
        """One line on the fit so far; ``None`` before anything was measured."""
        return None

    def about(self) -> dict[str, Any]:
        """Returns what a trace begins with: ``engine``, and what its figures are read against, plain."""
        return {}

    def pause_too(self, probe: StepProbe) -> None:
        """Called by a `ThrottleCallback`: in a step the strategy waits for peers, which is no work of the device's."""

    def find_sizes(self, finder: Any) -> bool:
        """Asked by a `HeteroBatchSizeFinder` when set-up begins: whether the strategy will."""
        return False

    def emulate(self, scenario: Scenario) -> bool:
        """Asked by a `ThrottleCallback` when set-up begins: whether the strategy itself sleeps for the scenario."""
        return False


def reporting_of(trainer: Trainer) -> Reporting | None:
    """Returns the trainer's strategy if it measures its ranks; stock strategies do not, nor do ours on one device."""
    strategy = trainer.strategy
    return strategy if isinstance(strategy, Reporting) and strategy.measures else None


def event_source(trainer: Trainer) -> EventSource | None:
    """Returns what notes events: the strategy, else the first callback that does, if any."""
    candidates = (reporting_of(trainer), *trainer_callbacks(trainer))
    return next((c for c in candidates if isinstance(c, EventSource)), None)


RAISES = "LIGHTNING_HETERO_OBSERVERS_RAISE"
"""The environment variable with which such errors are raised, e.g. by our tests."""

_WRONG = "_gone_wrong"
Method = TypeVar("Method", bound=Callable[..., Any])


def never_raises(method: Method) -> Method:
    """Lets a method of an observer go wrong: that is reported once, with its traceback, and the method returns None.

    Such methods of this observer are not called again until `watch_again`. Not for what other ranks wait for. A
    ``RuntimeError`` or ``ConnectionError`` passes: with these torch and the engines say that a rank or device is lost.
    """

    @functools.wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        if vars(self).get(_WRONG):
            return None
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            if isinstance(error, RuntimeError | ConnectionError) or os.environ.get(RAISES):
                raise
            vars(self)[_WRONG] = True
            told = f"{type(self).__name__} observes no more, and training goes on without it. Unless the error is in"
            tell(f"{told} your own logger or batch, please report it to lightning_hetero:\n{traceback.format_exc()}")
            return None

    return cast(Method, guarded)


def watch_again(observer: object) -> None:
    """Lets an observer try again, when a fit begins."""
    vars(observer).pop(_WRONG, None)


BatchCost = Callable[[Any], float]


def check_batch_cost(given: object) -> None:
    """Checks the argument ``batch_cost``.

    Raises:
        TypeError: it is neither a function nor None.
    """
    if not (given is None or callable(given)):
        raise TypeError(
            f"batch_cost={given!r} must be a function of the batch that returns its work, e.g. its tokens, or None"
        )


def cost_in(module: nn.Module, given: BatchCost | None) -> BatchCost | None:
    """Returns what counts a batch's work, as given or the module's own method; None: nothing does."""
    return given or getattr(module, "batch_cost", None)


def count_work(cost: BatchCost, batch: Any, rank: int) -> float:
    """Returns the work of this rank's batch.

    Raises:
        ValueError: ``cost`` returns no finite number above 0.
    """
    work = float(cost(batch))
    if not (math.isfinite(work) and work > 0):
        raise ValueError(
            f"batch_cost returned {work!r} on rank {rank}; it must be a finite number > 0, the work of this rank's"
            " batch, e.g. its tokens, padding included"
        )
    return work


class CountedOnHost:
    """Asks a user's function of a batch before the batch is moved, where the answer does not wait for the device.

    Not where a hook may make another batch of it on its way, and no more once a function could not do with the host's.

    Args:
        trainer: the running trainer.
        count: asks the function.
    """

    def __init__(self, trainer: Trainer, count: Callable[[Any], None]) -> None:
        self._count = count
        owners = trainer.lightning_module, getattr(trainer, "datamodule", None)
        hooks = "transfer_batch_to_device", "on_after_batch_transfer"
        self._same = not any(is_overridden(hook, owner) for hook in hooks for owner in owners)

    def moved(self, batch: Any, move: Callable[[Any], Any]) -> Any:
        """Returns the batch, moved to the device by ``move``, once it is counted."""
        counted = self._same
        if counted:
            try:
                self._count(batch)
            except Exception:  # whatever it is, the device's batch will show it, too
                counted = self._same = False
        batch = move(batch)
        if not counted:
            self._count(batch)
        return batch


def count_samples(trainer: Trainer, batch: Any, *, whole: bool = True) -> int:
    """Returns the number of samples of the training batch that is about to run, or has just run, on this rank.

    In this order: a strategy that decides the shares says so itself (`Reporting.current_samples`); the train loader's
    ``batch_size``, less in its last batch, because a tensor found in a graph or another object may count nodes; the
    first tensor's first dimension, as Lightning itself counts.

    Args:
        whole: False: ``batch`` is a piece of that batch, of which neither strategy nor loader knows.

    Raises:
        lightning.pytorch.utilities.exceptions.MisconfigurationException: nothing tells, and the batch has no tensor.
    """
    reporting = reporting_of(trainer) if whole else None
    if reporting is not None and (known := reporting.current_samples()) is not None:
        return known
    loader = trainer.train_dataloader
    if whole and isinstance(loader, DataLoader) and loader.batch_size is not None and isinstance(loader.sampler, Sized):
        done = (compat.upcoming_batch(trainer) - 1) * loader.batch_size
        return max(1, min(loader.batch_size, len(loader.sampler) - done))
    # extract_batch_size walks every element of the batch; the first tensor is all it takes from an ordinary one.
    first = batch
    while isinstance(first, list | tuple | Mapping) and len(first) > 0:
        first = next(iter(first.values() if isinstance(first, Mapping) else first))
    if isinstance(first, Tensor) and first.ndim > 0:
        return int(first.size(0))
    return extract_batch_size(batch)


class _Requeue:
    """Has a callback among the user's, as the last, from the signal until it is answered.

    Args:
        trainer: has not set its signal handlers yet.
        told: called in the signal handler with the signal's number.
    """

    def __init__(self, trainer: Trainer, told: Callable[[int], None]) -> None:
        self._trainer = trainer
        self._due: deque[int] = deque()
        self._carry_out, self._undo = compat.defer_requeue(trainer, told)
        self._callbacks = compat.trainer_callbacks(trainer)
        hooks = ("on_train_batch_end", "on_validation_batch_end", "on_train_end")  # also of a batch that is None
        self._ends = LambdaCallback(**dict.fromkeys(hooks, lambda *_, **__: self._save()))

    def _owe(self, number: int) -> None:
        """Answers the signal at the end of the batch."""
        self._due.append(number)
        if self._ends not in self._callbacks:
            self._callbacks.append(self._ends)

    def _around(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _save(self) -> None:
        # Within a window of accumulation the checkpoint would lack its gradients.
        while self._due and not compat.accumulates_now(self._trainer):
            number = self._due.popleft()
            if not self._due:
                self._leave()  # before the checkpoint, which holds the callbacks' state
            with self._around():
                self._carry_out(number)

    def _leave(self) -> None:
        if self._ends in self._callbacks:
            self._callbacks.remove(self._ends)

    def close(self) -> None:
        """From here on the handler is Lightning's own."""
        self._undo()
        self._leave()


class RequeueByOne(_Requeue):
    """See the module.

    Args:
        trainer: has not set its signal handlers yet.
        mine: whether this rank saves; None: it is not training with others now, so the handler runs at once.
    """

    def __init__(self, trainer: Trainer, mine: Callable[[], bool | None]) -> None:
        self._mine = mine
        super().__init__(trainer, self._told)

    def _told(self, number: int) -> None:
        if (mine := self._mine()) is None:
            self._carry_out(number)
        elif mine:
            self._owe(number)

    def _around(self) -> AbstractContextManager[None]:
        return patched(self._trainer.strategy, "barrier", lambda *_, **__: None)


class RequeueTogether(_Requeue):
    """See the module.

    Args:
        trainer: has not set its signal handlers yet.
        rank: this one.
    """

    def __init__(self, trainer: Trainer, rank: int) -> None:
        self._rank, self._asked = rank, 0
        super().__init__(trainer, self._told)

    def _told(self, number: int) -> None:
        self._asked = number

    def take(self) -> float:
        """Returns what this rank adds to a sum over all: the number of rank 0's signal, or 0."""
        asked = self._asked
        if asked:  # else a signal that comes just now would be forgotten
            self._asked = 0
        return float(asked if self._rank == 0 else 0)

    def hear(self, total: float) -> None:
        """Takes in that sum, in the same batch on all ranks."""
        if total:
            self._owe(int(total))

    def finish(self, total: float) -> None:
        """As `hear`, behind the last batch: answered at once."""
        self.hear(total)
        self._save()
