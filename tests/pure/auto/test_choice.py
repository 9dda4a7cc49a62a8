"""Which engine is taken, from what was measured."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_hetero.auto.choice import ENGINES, choose, without_measuring
from lightning_hetero.cluster.spec import equal_cluster
from lightning_hetero.plan.setup import Setup
from lightning_hetero.types import AffineCost, LayerCost, ModelCost


def setup_of(speeds: list[float], *, spells: float = 0.0, exchange_s: float = 0.001, seed: int = 0) -> Setup:
    """Devices of these speeds, ``spells``: part of the steps that take 8 times as long."""
    rng = np.random.default_rng(seed)
    slowness = tuple(tuple(float(x) for x in 1.0 + 7.0 * (rng.random(64) < spells)) for _ in speeds)
    return Setup(
        cluster=equal_cluster(len(speeds)),
        global_batch=64,
        costs=tuple(AffineCost(fixed_s=0.002 / v, per_sample_s=0.001 / v) for v in speeds),
        exchange_s=exchange_s,
        slowness=slowness,
    )


def test_equal_devices_train_as_ddp_does_under_the_balanced_engine() -> None:
    choice = choose(setup_of([1.0] * 4), ENGINES, {})
    assert choice.engine == "balanced" and "equally fast" in choice.line


def test_lasting_differences_are_the_balanced_engines() -> None:
    choice = choose(setup_of([1.0, 1.0, 0.5, 0.25]), ENGINES, {})
    assert choice.engine == "balanced" and "times as fast as stock DDP" in choice.line
    assert choice.plan is not None and choice.plan.gain > 2.0


def test_spells_that_nobody_can_predict_are_the_stale_engines() -> None:
    spells = setup_of([1.0] * 4, spells=0.15)
    assert choose(spells, ENGINES, {}).engine == "stale"
    assert choose(spells, ("balanced", "pipeline"), {}).engine == "balanced"
    refused = choose(spells, ENGINES, {"stale": "no optimizer"})
    assert refused.engine == "balanced" and "not hetero_stale: no optimizer" in refused.line


def test_who_is_refused_and_who_is_left() -> None:
    assert without_measuring(("balanced", "stale"), {"balanced": "LBFGS"}, "so").engine == "stale"
    with pytest.raises(ValueError, match="no engine trains this module: balanced: LBFGS"):
        without_measuring(("balanced",), {"balanced": "LBFGS"}, "so")
    with pytest.raises(ValueError, match="no engine trains this module: stale: LBFGS"):
        choose(setup_of([1.0, 1.0]), ("stale",), {"stale": "LBFGS"})


def layered(exchange_s: float) -> Setup:
    """Four equal devices with free links, and a model of eight equal layers."""
    cost = AffineCost(fixed_s=0.0, per_sample_s=0.001 / 16)
    free = AffineCost(fixed_s=0.0, per_sample_s=0.0)
    layers = tuple(LayerCost(name=f"layer {i}", forward=cost, backward=cost, param_bytes=4e6) for i in range(8))
    ends = [LayerCost(name=name, forward=free, backward=free) for name in ("before", "head")]
    model = ModelCost(layers=layers, before=ends[0], head=ends[1])
    costs = tuple(AffineCost(fixed_s=0.0, per_sample_s=0.001) for _ in range(4))
    return Setup(cluster=equal_cluster(4), global_batch=64, model=model, costs=costs, exchange_s=exchange_s)


@pytest.mark.parametrize(("exchange_s", "taken"), [(0.001, "balanced"), (0.1, "pipeline")])
def test_a_pipeline_is_taken_only_where_it_gains_what_its_messages_may_cost(exchange_s: float, taken: str) -> None:
    assert choose(layered(exchange_s), ("balanced", "pipeline"), {}).engine == taken
