"""Emulated devices, what is trained on them, and by whom; no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from lightning_hetero import Scenario
from lightning_hetero.cluster.spec import equal_cluster
from lightning_hetero.types import Cluster, Link

PER_RANK = 16
LAYERS = 8
WORK: dict[str, Any] = {"sample_s": 4e-3, "step_s": 8e-3}  # an equal share takes 72 ms on a device of speed 1
SPELLS = {"probability": 1 / 30, "factor": 6.0, "steps": 8}
SLOW = Link(bandwidth_bytes_per_s=5e6, latency_s=1e-4)
WIDTH = 128  # 0.53 MB of gradients: a ring of four takes 0.16 s over slow links
STATIC = ("balanced", "stale", "pipeline")


@dataclass(frozen=True, kw_only=True)
class Case:
    """Devices and a model.

    Attributes:
        name: for people.
        scenario: emulates the devices; a speed for each.
        link: between any two devices; None: what processes of this machine have.
        engines: that train it; ``auto`` may take any of them.
    """

    name: str
    scenario: Scenario
    link: Link | None = None
    engines: tuple[str, ...] = STATIC

    @property
    def ranks(self) -> int:
        return len(self.scenario.speeds)

    @property
    def cluster(self) -> Cluster | None:
        """Devices and links, where the links are emulated."""
        if self.link is None:
            return None
        return replace(equal_cluster(self.ranks), links=((self.link,) * self.ranks,) * self.ranks)


def _mix(*speeds: float, **more: Any) -> Scenario:
    return Scenario(speeds=speeds, **WORK, **more)


CASES = (
    Case(name="equal", scenario=_mix(1.0, 1.0, 1.0, 1.0)),
    Case(name="2:1", scenario=_mix(1.0, 0.5)),
    Case(name="1:1:1/2:1/4", scenario=_mix(1.0, 1.0, 0.5, 0.25)),
    Case(name="1:1:1:1/8", scenario=_mix(1.0, 1.0, 1.0, 0.125)),
    Case(name="spells", scenario=_mix(1.0, 1.0, 1.0, 1.0, spells=SPELLS)),
    Case(name="slow link", scenario=_mix(1.0, 1.0, 1.0, 1.0), link=SLOW, engines=("balanced", "pipeline")),
)
QUICK = ("1:1:1/2:1/4", "slow link")
