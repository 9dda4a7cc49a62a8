"""Plans of up to 64 devices stay as they were recorded: what is done for many devices must not change those of few.

``python -m tests.pure.plan.test_same_plans`` records them again, where a change of plans is meant.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_hetero.cluster.spec import cluster_from_plain
from lightning_hetero.plan.formula import model_from_formula
from lightning_hetero.plan.pipelines import pipeline, plan_override
from lightning_hetero.plan.setup import Setup

pytestmark = pytest.mark.pure
GOLDENS = Path(__file__).parents[2] / "goldens" / "plan" / "pipelines.json"
# Devices; few kinds of them, or all different; whether memory is short.
SETUPS = [
    *((devices, kinds, short) for devices in (2, 3, 4, 64) for kinds in (True, False) for short in (True, False)),
    (9, True, True),
    (9, False, False),
    (12, True, False),
    (33, False, True),
    (40, True, True),
    (48, False, False),
]


def drawn(devices: int, kinds: bool, short: bool) -> Setup:
    """Returns a set-up that its arguments seed: cards of one to four kinds on nodes, and a GPT of drawn size."""
    rng = np.random.default_rng([devices, kinds, short])
    layers, width = int(rng.integers(6, 20)), 128 * int(rng.integers(2, 6))
    sizes: dict[str, Any] = {
        "kind": "transformer", "layers": layers, "width": width, "window": 512, "flops_per_s": 5e13,
    }  # fmt: skip
    model = model_from_formula(sizes)
    parts = (model.before, *model.layers, model.head)
    whole = math.fsum(part.state_bytes + part.activation_bytes for part in parts)
    speeds = np.round(rng.uniform(0.2, 1.0, int(rng.integers(2, 5)) if kinds else devices), 2)
    caps = np.round(whole * rng.uniform(0.3, 0.9, len(speeds)) if short else np.full(len(speeds), 20 * whole))
    cards = [{"speed": float(speeds[i % len(speeds)]), "mem": float(caps[i % len(speeds)])} for i in range(devices)]
    node = {"bandwidth": "20 GB/s", "latency": "5 us"}
    nodes = [{"name": f"n{at}", "devices": cards[at : at + 8], "link": node} for at in range(0, devices, 8)]
    net = {"bandwidth": f"{int(rng.integers(1, 12))} GB/s", "latency": "20 us"}
    return Setup(cluster=cluster_from_plain({"nodes": nodes, "link": net}), model=model, global_batch=4 * devices)


def planned(devices: int, kinds: bool, short: bool) -> dict[str, Any]:
    found = pipeline(drawn(devices, kinds, short))
    plan = None if found.plan is None else plan_override(found.plan)
    return {"plan": plan, "step_s": found.step_s if found.ok else None, "bound_s": found.bound_s}


def _names() -> Iterator[str]:
    for devices, kinds, short in SETUPS:
        yield f"{devices} devices, {'few kinds' if kinds else 'all different'}, {'short' if short else 'ample'} memory"


@pytest.mark.parametrize(("name", "case"), list(zip(_names(), SETUPS, strict=True)))
def test_plans_of_few_devices_stay(name: str, case: tuple[int, bool, bool]) -> None:
    expected, found = json.loads(GOLDENS.read_text())[name], planned(*case)
    assert found["plan"] == expected["plan"]
    assert found["step_s"] == (expected["step_s"] and pytest.approx(expected["step_s"], rel=1e-9))
    assert found["bound_s"] == pytest.approx(expected["bound_s"], rel=1e-9)


def write_goldens() -> None:
    GOLDENS.parent.mkdir(parents=True, exist_ok=True)
    found = {name: planned(*case) for name, case in zip(_names(), SETUPS, strict=True)}
    GOLDENS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_goldens()
