"""What callbacks may ask of what measures a run: a strategy of ours, or a callback (layer L).

What may go wrong in a callback that only observes, without ending the training.
"""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Callable
from typing import Any, TypeVar, cast

from lightning.pytorch import Trainer

from lightning_hetero.emulate.scenario import Scenario
from lightning_hetero.lightning_compat import trainer_callbacks
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
