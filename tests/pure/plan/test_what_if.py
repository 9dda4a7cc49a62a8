"""Changes of a set-up: what they change, what they keep, what they refuse."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_hetero.plan.parallel import ddp
from lightning_hetero.plan.what_if import changed
from lightning_hetero.types import AffineCost
from tests.pure.plan.kit import layered, lines

pytestmark = pytest.mark.pure
NODES = [{"name": "fast", "count": 2, "mem": "24 GiB"}, {"name": "old", "speed": 0.25, "mem": "8 GiB"}]
LINK = {"bandwidth": "10 GB/s", "latency": "10 us"}


def test_a_device_less() -> None:
    setup = layered(NODES, LINK, prices=(2.0, 2.0, 0.5))
    title, other = changed(setup, {"without": "old"})
    assert title == "without rank 2 (old)" and other.prices == (2.0, 2.0)
    assert [device.name for device in other.cluster.devices] == ["fast:0", "fast:1"]
    assert other.cluster.links[0][1] == setup.cluster.links[0][1] and other.global_batch == setup.global_batch
    assert changed(setup, {"without": 0})[1].prices == (2.0, 0.5)
    with pytest.raises(ValueError, match="leaves no device: the cluster has 1"):
        changed(lines((1.0,)), {"without": 0})


def test_a_device_more_is_linked_as_badly_as_any_unless_said() -> None:
    setup = layered(NODES, LINK, prices=(2.0, 2.0, 0.5))
    title, other = changed(setup, {"add": {"name": "new", "speed": 2.0, "mem": "80 GiB"}})
    assert title == "with new" and other.prices == (2.0, 2.0, 0.5, 0.5) and other.ranks == 4
    assert other.cluster.devices[3].speed == 2.0 and other.cluster.links[3][0] == setup.cluster.links[0][1]
    _, linked = changed(setup, {"add": {"name": "new", "count": 2}, "link": {"bandwidth": "1 Gbit/s"}, "price": 3.0})
    assert (
        linked.cluster.links[3][4].bandwidth_bytes_per_s == linked.cluster.links[0][4].bandwidth_bytes_per_s == 125e6
    )
    assert linked.cluster.links[0][1] == setup.cluster.links[0][1] and linked.prices[3:] == (3.0, 3.0)


def test_a_device_more_costs_by_its_speed_where_only_lines_are_known() -> None:
    _, other = changed(lines((1.0, 0.5)), {"add": {"speed": 2.0}})
    assert other.costs[2] == AffineCost(fixed_s=0.0, per_sample_s=1.5e-3)


def test_links_batch_speed_and_price() -> None:
    setup = layered(NODES, LINK)
    _, slow = changed(setup, {"links": [{"between": ["fast", "old"], "bandwidth": "1 MB/s"}]})
    assert slow.cluster.links[0][2].bandwidth_bytes_per_s == slow.cluster.links[2][1].bandwidth_bytes_per_s == 1e6
    assert slow.cluster.links[0][1] == setup.cluster.links[0][1] and slow.cluster.links[0][
        2
    ].latency_s == pytest.approx(1e-5)
    assert changed(setup, {"batch": 2})[1].global_batch == 96
    _, faster = changed(setup, {"speed": {"old": 2}})
    assert [device.speed for device in faster.cluster.devices] == [1.0, 1.0, 0.5]
    _, sped = changed(lines((1.0, 0.5)), {"speed": {"1": 2}})
    assert ddp(sped).step_s == pytest.approx(ddp(lines((1.0, 1.0))).step_s)
    assert changed(setup, {"price": {"fast": 0.4}})[1].prices == (0.4, 0.4, 0.0)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({}, ValueError, "must hold one of the keys"),
        ({"without": 0, "batch": 2}, ValueError, "must hold one of the keys"),
        ({"drop": 0}, ValueError, "must hold one of the keys"),
        ({"without": 7}, ValueError, r"what_if.without=7 must be a rank in 0..2"),
        ({"without": "new"}, ValueError, "is no device and no node: choose one of fast, fast:0, fast:1, old"),
        ({"batch": 0}, ValueError, "what_if.batch=0 must be a finite number > 0"),
        ({"speed": {"old": "slow"}}, ValueError, "what_if.speed.old='slow' must be"),
        ({"price": 3}, TypeError, "what_if.price=3 must be a mapping"),
        (["without"], TypeError, r"what_if=\['without'\] must be a mapping"),
        ({"links": [{"between": [0, 1]}]}, ValueError, "changes nothing: give bandwidth, latency or both"),
    ],
)
def test_what_cannot_be_is_refused(change: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        changed(layered(NODES, LINK), change)
