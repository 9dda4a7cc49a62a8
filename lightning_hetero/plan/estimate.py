"""What one engine would take, and why (layer P)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_hetero.checked import finite_or_none
from lightning_hetero.plan.setup import Setup
from lightning_hetero.solvers.plans import plan_to_plain
from lightning_hetero.types import PipelinePlan

EngineName = Literal["ddp", "balanced", "stale", "pipeline", "sharded"]


_NUMBERS = ("step_s", "bound_s", "samples_per_s", "idle", "exchange_s")


def strategy_name(engine: str) -> str:
    """Returns an engine's name as the Trainer and the command take it."""
    return engine if engine == "ddp" else f"hetero_{engine}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """One engine on one set-up.

    Attributes:
        engine: its name.
        step_s: time of an update in the steady state; ``inf``: it cannot train this, see ``reasons`` [s].
        bound_s: nothing that the engine may decide is faster [s].
        work_s: own work by rank per update [s].
        shares: samples by rank per update, means where they change.
        memory_bytes: by rank, of the model's state and activations; 0: not known.
        exchange_s: part of the step for gradients on wires.
        reasons: what decides, in sentences.
        arguments: of the strategy's constructor, as plain values.
        batch_size: of the loader, per device, where the strategy has no global one; None: any.
        plan: of the pipeline engine.
    """

    engine: EngineName
    step_s: float
    bound_s: float = 0.0
    work_s: tuple[float, ...] = ()
    shares: tuple[float, ...] = ()
    memory_bytes: tuple[float, ...] = ()
    exchange_s: float = 0.0
    reasons: tuple[str, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    batch_size: int | None = None
    plan: PipelinePlan | None = None

    @property
    def strategy(self) -> str:
        """The strategy's name, as the Trainer and the command take it."""
        return strategy_name(self.engine)

    @property
    def ok(self) -> bool:
        """Whether it can train this at all."""
        return math.isfinite(self.step_s)

    @property
    def resting(self) -> tuple[int, ...]:
        """Ranks that are given no work."""
        return tuple(rank for rank, seconds in enumerate(self.work_s) if seconds == 0.0)

    @property
    def idle(self) -> float:
        """Part of all device-seconds in which a device does no work, in [0, 1]."""
        if not self.ok or not self.work_s:
            return math.nan
        return max(0.0, 1.0 - math.fsum(self.work_s) / (len(self.work_s) * self.step_s))

    @property
    def samples_per_s(self) -> float:
        """Its throughput; 0 if it cannot train."""
        return math.fsum(self.shares) / self.step_s if self.ok else 0.0

    def as_plain(self, setup: Setup) -> dict[str, Any]:
        """Returns strict JSON values; what is not known or infinite is None."""
        return {
            "engine": self.strategy,
            "ok": self.ok,
            **{name: finite_or_none(getattr(self, name)) for name in _NUMBERS},
            "devices": [
                {"rank": rank, "name": device.name, "samples": self.shares[rank], "work_s": self.work_s[rank],
                 "memory_bytes": self.memory_bytes[rank] or None,
                 "memory_limit_bytes": finite_or_none(device.mem_bytes)}
                for rank, device in enumerate(setup.cluster.devices) if self.ok
            ],
            "plan": None if self.plan is None else plan_to_plain(self.plan),
            "reasons": list(self.reasons),
        }


def impossible(engine: EngineName, *reasons: str) -> Estimate:
    """Returns the estimate of an engine that cannot train this, and why."""
    return Estimate(engine=engine, step_s=math.inf, reasons=reasons)
