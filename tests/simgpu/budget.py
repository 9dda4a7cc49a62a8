"""Measures how often the host waits for its device, by engine; writes tests/goldens/gpu_syncs.json.

    python -m tests.simgpu.budget
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from tests.simgpu import kit
from tests.simgpu.harness import run_sim_ranks

GOLDEN = Path(__file__).resolve().parents[1] / "goldens" / "gpu_syncs.json"
STEPS = kit.CountSyncs.SKIPPED + kit.CountSyncs.COUNTED + 1

# Name in the golden file: engine, number of ranks, options. All log a value with sync_dist=True in each step.
ENGINES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "ddp": ("ddp", 2, {}),
    "balanced": ("balanced", 2, {}),
    "stale": ("stale", 2, {"policy": "bsp"}),
    "federated": ("federated", 2, {"local_steps": 2}),
    "pipeline 1x2": ("pipeline", 2, {"plan": "1x2"}),
    "pipeline 2x1": ("pipeline", 2, {"plan": "2x1"}),
    "pipeline 2x2": ("pipeline", 4, {"plan": "2x2"}),
}


Places = dict[str, float]  # how often per step


def _counts(rank: int, world: int, engine: str, options: dict[str, Any]) -> tuple[Places, Places]:
    module = kit.DeepPlain() if engine == "pipeline" else kit.WithNorm()
    count = kit.CountSyncs()
    trainer = kit.trainer_on_gpus(world, kit.strategy_of(engine, "nccl", **options), max_steps=STEPS, callbacks=[count])
    kit.fit_quietly(trainer, module, kit.loader(world, pin_memory=True))
    assert count.steps == count.COUNTED
    return count.per_step(), count.per_step(beside=True)


@lru_cache
def measured(name: str) -> tuple[Places, Places]:
    """Returns how often the host waits per step, by place, on the rank where it waits most.

    First where threads wait that train, then where others do, which hold up nobody.
    """
    engine, world, options = ENGINES[name]
    return max(run_sim_ranks(world, _counts, engine, options, nccl=True), key=lambda two: tuple(map(total, two)))


def total(places: Places) -> float:
    return round(sum(places.values()), 2)


def told(places: Places) -> str:
    return "\n".join(f"{n:6.2f}  {place}" for place, n in places.items())


def row(name: str) -> dict[str, Any]:
    places, beside = measured(name)
    return {"per_step": total(places), "beside": total(beside), "places": places, "places_beside": beside}


if __name__ == "__main__":
    from tests.simgpu import budget  # not this module's functions: ranks import them by their module's name

    rows = {name: budget.row(name) for name in ENGINES}
    GOLDEN.write_text(json.dumps(rows, indent=2) + "\n")
    print("\n".join(f"{found['per_step']:6.2f} {found['beside']:6.2f}  {name}" for name, found in rows.items()))
