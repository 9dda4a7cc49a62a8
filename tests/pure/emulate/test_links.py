"""What an emulation charges for links, against the planner's and the controller's formulas."""

from __future__ import annotations

import pytest

from lightning_hetero.controller.migration import MigrationModel
from lightning_hetero.emulate.links import parcels_s, sums_s
from lightning_hetero.pipeline.decide.plans import unit_costs
from lightning_hetero.solvers.placement.pipes import Pipe, Problem
from lightning_hetero.solvers.placement.sync import sync_loads_s
from lightning_hetero.types import Cluster, Device, Link

RANKS = range(4)
CLUSTER = Cluster(
    devices=tuple(Device(name=f"{r}") for r in RANKS),
    links=tuple(
        tuple(Link(bandwidth_bytes_per_s=100.0 + 30 * a + 7 * b, latency_s=0.01 * (1 + a)) for b in RANKS)
        for a in RANKS
    ),
)
SIZES = [100.0, 200.0, 300.0, 400.0, 500.0, 600.0]
PROBLEM = Problem(unit_costs([f"{i}" for i in range(6)], SIZES), CLUSTER, 8, (8,))


def test_sums_take_what_the_planner_says() -> None:
    pipes = [Pipe((2, 0), (0, 2, 6)), Pipe((1, 3), (0, 4, 6))]
    sizes = {(2, 1): 300.0, (0, 1): 700.0, (0, 3): 1100.0}  # layers 0 and 1, 2 and 3, 4 and 5
    assert [sums_s(CLUSTER, sizes, rank) for rank in RANKS] == pytest.approx(sync_loads_s(PROBLEM, pipes).tolist())


def test_sums_of_three_by_hand() -> None:
    link = Link(bandwidth_bytes_per_s=10.0, latency_s=1.0)
    cluster = Cluster(devices=CLUSTER.devices, links=((link,) * 4,) * 4)
    assert sums_s(cluster, {(0, 2, 3): 30.0, (0,): 90.0, (1, 2): 0.0}, 2) == pytest.approx(2 * 2 * (30 / 3 / 10 + 1))
    assert sums_s(cluster, {(0, 2, 3): 30.0}, 1) == 0.0


def test_layers_move_as_long_as_the_controller_expects() -> None:
    old, new = [Pipe((0, 1), (0, 1, 6))], [Pipe((0, 1), (0, 4, 6))]
    expected = MigrationModel().pause_s(PROBLEM, old, new) - 0.05  # what it takes to agree is real
    assert parcels_s(CLUSTER, {(1, 0): 200.0 + 300.0 + 400.0}) == pytest.approx(expected)
