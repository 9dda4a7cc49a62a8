"""How often the host waits for its device, per step: a budget by engine, in tests/goldens/gpu_syncs.json.

A number that rises fails, with the places; one that falls is written down: python -m tests.simgpu.test_budget
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

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


def _told(places: Places) -> str:
    return "\n".join(f"{n:6.2f}  {place}" for place, n in places.items())


def _row(name: str) -> dict[str, Any]:
    places, beside = measured(name)
    return {"per_step": total(places), "beside": total(beside), "places": places, "places_beside": beside}


@pytest.mark.parametrize("name", ENGINES)
def test_the_host_waits_no_more_often_than_it_did(name: str) -> None:
    golden, found = json.loads(GOLDEN.read_text())[name], _row(name)
    for number, places in (("per_step", "places"), ("beside", "places_beside")):
        assert found[number] <= golden[number], (
            f"{name}: the host waits {found[number]} times a step ({number}), it was {golden[number]}\n"
            f"{_told(found[places])}\nit was\n{_told(golden[places])}\n"
            "if it must be so: python -m tests.simgpu.test_budget"
        )


@pytest.mark.parametrize("name", ["balanced", "federated"])
def test_the_host_waits_no_more_often_than_with_stock_ddp(name: str) -> None:
    assert total(measured(name)[0]) <= total(measured("ddp")[0]), _told(measured(name)[0])


@pytest.mark.parametrize("name", ["stale", "pipeline 1x2", "pipeline 2x1", "pipeline 2x2"])
def test_the_host_waits_at_most_four_times_a_step(name: str) -> None:
    assert total(measured(name)[0]) <= 4, _told(measured(name)[0])


if __name__ == "__main__":
    # Not this module's functions: ranks import them by their module's name.
    from tests.simgpu import test_budget

    rows = {name: test_budget._row(name) for name in ENGINES}
    GOLDEN.write_text(json.dumps(rows, indent=2) + "\n")
    print("\n".join(f"{row['per_step']:6.2f} {row['beside']:6.2f}  {name}" for name, row in rows.items()))
