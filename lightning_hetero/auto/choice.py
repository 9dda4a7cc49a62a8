"""Which engine trains, and why (layer P)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn

from lightning_hetero.plan.planner import Plan, plan
from lightning_hetero.plan.setup import Setup

ChosenName = Literal["balanced", "stale", "pipeline", "sharded"]
ENGINES: tuple[ChosenName, ...] = ("balanced", "pipeline", "stale")
"""From the one that changes least of how a model trains to the one that changes most; whether a module shards itself is
known without a plan."""

_MESSAGES = 1.15  # of the others' throughput: what messages cost beside their time on the wire no plan knows


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The engine that trains.

    Attributes:
        engine: its name.
        line: which and why, for people.
        plan: what it was chosen from; None: nothing was measured.
        failed: the trial failed.
    """

    engine: ChosenName
    line: str
    plan: Plan | None = None
    failed: bool = False


def choose(setup: Setup, engines: Sequence[ChosenName], refused: Mapping[str, str]) -> Choice:
    """Returns the engine that the planner takes of those that can train this module.

    Where the planner takes stock DDP, nothing gains enough, the balanced engine trains: it is DDP while its shares are
    equal, and answers if the devices' speeds change.

    Args:
        setup: what was measured.
        engines: those in question.
        refused: why engines do not train this module, by name.

    Raises:
        ValueError: no engine is left, or none of those left can train.
    """
    able: list[ChosenName] = [name for name in ENGINES if name in engines and name not in refused]
    if not able:
        _refuse(refused)
    if len(able) > 1 and (setup.model is None or len(setup.model.layers) == 1):
        able = [name for name in able if name != "pipeline"]  # there is nothing to divide, or it was not worth a look
    found = plan(setup, ("ddp", *able), pipeline_ahead=_MESSAGES)
    chosen = found.chosen
    without = "".join(f"; not hetero_{name}: {why}" for name, why in refused.items())
    if chosen is None:
        raise ValueError(f"hetero_auto: {found.verdict}{without}")
    if chosen.engine == "ddp":
        name = "balanced" if "balanced" in able else able[0]
        return Choice(engine=name, line=f"hetero_auto takes hetero_{name}: {chosen.reasons[0]}{without}", plan=found)
    return Choice(engine=chosen.engine, line=f"hetero_auto takes {found.verdict}{without}", plan=found)


def without_measuring(
    engines: Sequence[ChosenName], refused: Mapping[str, str], why: str, *, failed: bool = False
) -> Choice:
    """Returns the first of ``engines`` that trains this module, where nothing could be measured.

    Raises:
        ValueError: no engine is left.
    """
    for name in engines:
        if name not in refused:
            return Choice(engine=name, line=f"hetero_auto takes hetero_{name} without a warm-up: {why}", failed=failed)
    _refuse(refused)


def _refuse(refused: Mapping[str, str]) -> NoReturn:
    raise ValueError(f"no engine trains this module: {'; '.join(f'{k}: {v}' for k, v in refused.items())}")
