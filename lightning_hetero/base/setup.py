"""What a strategy is to Lightning before and around a fit: names, checkpoint key (layer L)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_hetero import lightning_compat as compat
from lightning_hetero.callbacks.reporting import never_raises
from lightning_hetero.callbacks.straggler import StragglerMonitor
from lightning_hetero.types import StepReport

if TYPE_CHECKING:
    from lightning_hetero.base.run import EngineRun

CHECKPOINT_KEY = "lightning_hetero"
"""The one top-level key that a strategy adds to a checkpoint; stock Lightning ignores it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LastFit:
    """What a strategy says of its last fit when that is over; see `HeteroStrategy`'s properties of the same names."""

    global_batch_size: int | None = None
    effective_batch_size: int | None = None
    shares: tuple[int, ...] = ()
    report: StepReport | None = None


@never_raises
def sum_up(run: EngineRun[Any], last_report: Callable[[], StepReport | None], *, told: bool) -> None:
    """Asks for a fit's last report, while there is somebody to ask, and tells in one line who did what.

    We add no callback: a user's callbacks, hooks and loggers see what they see under stock DDP.

    Args:
        run: the fit, which ends.
        last_report: of the strategy, which keeps it.
        told: whether this rank tells it, unless the user's own `StragglerMonitor` does.
    """
    last_report()
    monitored = any(isinstance(callback, StragglerMonitor) for callback in compat.trainer_callbacks(run.trainer))
    if told and not monitored and (summary := run.summary()):
        rank_zero_info(summary)
