"""Layers that belong together are planned as one."""

from __future__ import annotations

from lightning_hetero.cluster import equal_cluster
from lightning_hetero.pipeline.decide.plans import check_plan, unit_costs
from lightning_hetero.solvers.placement import place
from lightning_hetero.solvers.tied_layers import join_layers, split_again

MODEL = unit_costs([f"{i}" for i in range(8)], [float(i + 1) for i in range(8)])


def test_spans_become_layers_and_cuts_come_back() -> None:
    model, bounds = join_layers(MODEL, [(2, 3), (3, 5)])
    assert bounds == (0, 1, 2, 6, 7, 8)
    assert [layer.param_bytes for layer in model.layers] == [1, 2, 3 + 4 + 5 + 6, 7, 8]
    assert model.layers[2].name == "2..5" and model.layers[2].forward.per_sample_s == 18.0
    plan = split_again(place(model, equal_cluster(3), 6, max_groups=1), bounds)
    check_plan(plan, layers=8, ranks=3, global_batch=6)
    assert all(not 2 < cut < 6 for group in plan.groups for cut in group.cuts)


def test_without_spans_nothing_changes() -> None:
    assert join_layers(MODEL, []) == (MODEL, tuple(range(9)))
