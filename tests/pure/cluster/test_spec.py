"""Clusters from plain values: units, names, links, errors; as text and back; and what is shipped."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from lightning_hetero.cluster import (
    cluster_from_plain,
    cluster_to_plain,
    describe_cluster,
    equal_cluster,
    override_cluster,
)  # fmt: skip
from lightning_hetero.cluster.units import as_bytes, as_rate, as_seconds, bytes_text, rate_text, seconds_text
from lightning_hetero.types import Cluster, Device, Link

CONF = Path(__file__).resolve().parents[3] / "conf" / "hetero" / "cluster"
GIB = 2.0**30


def read(text: str) -> Cluster:
    return cluster_from_plain(OmegaConf.to_container(OmegaConf.create(text)))  # pyright: ignore


def rates(cluster: Cluster) -> list[list[float]]:
    return [[link.bandwidth_bytes_per_s for link in row] for row in cluster.links]


def waits(cluster: Cluster) -> list[list[float]]:
    return [[link.latency_s for link in row] for row in cluster.links]


# ---- units -------------------------------------------------------------------------------------------------------


READ = [
    (as_bytes, {"24 GiB": 24 * GIB, "2.0 GB": 2e9, "512MiB": 512 * 2.0**20, "1e9": 1e9, 4096: 4096.0, None: math.inf}),
    (as_rate, {"25 Gbit/s": 3.125e9, "100 Mbps": 12.5e6, "3 GB/s": 3e9, "1 GiB/s": GIB, "inf": math.inf}),
    # µ is the micro sign, μ the Greek letter.
    (as_seconds, {"50 us": 50e-6, "50 \u00b5s": 50e-6, "50 \u03bcs": 50e-6, ".2 ms": 2e-4, 0: 0.0}),
]
REFUSED = [
    (as_bytes, ["24 gib", 0, "-1 GiB", True, "24 Gbit/s"], "must be a size > 0 such as"),
    (as_rate, ["10 Gb/s", "fast"], 'must be a bandwidth > 0 such as "25 Gbit/s", "3 GB/s"'),  # bits or bytes?
    (as_seconds, [-1e-6, "inf", None, [1]], "must be a time >= 0"),
]


@pytest.mark.parametrize(("read", "expected"), READ)
def test_quantities_are_read(read: Any, expected: dict[Any, float]) -> None:
    assert {value: read("x", value) for value in expected} == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize(("read", "values", "words"), REFUSED)
def test_wrong_quantities_are_refused_with_what_is_allowed(read: Any, values: list[Any], words: str) -> None:
    for value in values:
        with pytest.raises(ValueError, match=re.escape(words)) as caught:
            read("links[2].x", value)
        assert f"links[2].x={value!r}" in str(caught.value)


@given(st.floats(1.0, 1e14))
def test_texts_say_the_same_again(value: float) -> None:
    assert as_bytes("x", bytes_text(value)) == pytest.approx(value, rel=6e-3)
    assert as_rate("x", rate_text(value)) == pytest.approx(value, rel=6e-3)
    assert as_seconds("x", seconds_text(value * 1e-9)) == pytest.approx(value * 1e-9, rel=6e-3)


# ---- devices and their names ---------------------------------------------------------------------------------


def test_devices_are_counted_named_and_ranked_in_order() -> None:
    cluster = read(
        """
        devices:
          - {name: fast, speed: 2, mem: 24 GiB, count: 2}
          - {speed: 0.5}
          - {name: fast, speed: 2, count: 1}
          - {name: old, mem: 2 GB}
          - {}
        """
    )
    assert cluster.devices == (
        Device(name="fast:0", speed=2.0, mem_bytes=24 * GIB),
        Device(name="fast:1", speed=2.0, mem_bytes=24 * GIB),
        Device(name="device:0", speed=0.5),
        Device(name="fast:2", speed=2.0),
        Device(name="old", mem_bytes=2e9),
        Device(name="device:1"),
    )
    assert {link for row in cluster.links for link in row} == {Link()}


def test_nodes_repeat_with_their_own_link_inside_and_the_outer_one_between() -> None:
    cluster = read(
        """
        nodes:
          - name: box
            count: 2
            devices: [{name: gpu, count: 2}]
            link: {bandwidth: 100, latency: 1}
          - devices: [{}, {}]
        link: {bandwidth: 10, latency: 5}
        """
    )
    assert [d.name for d in cluster.devices] == [
        "box:0/gpu:0", "box:0/gpu:1", "box:1/gpu:0", "box:1/gpu:1", "node:0/device:0", "node:0/device:1",
    ]  # fmt: skip
    inf, i, o = math.inf, 100.0, 10.0
    # The last node has no link of its own inside: the outer one.
    expected = [[o] * a + [inf] + [o] * (5 - a) for a in range(6)]
    for a, b in ((0, 1), (1, 0), (2, 3), (3, 2)):
        expected[a][b] = i
    assert rates(cluster) == expected
    assert waits(cluster)[0] == [0.0, 1.0, 5.0, 5.0, 5.0, 5.0]


LINKED = """
devices: [{name: fast, count: 2}, {name: slow, count: 2}]
link: {bandwidth: 8, latency: 1}
"""


def test_later_links_hold_and_change_only_what_they_name() -> None:
    cluster = read(
        LINKED
        + """
links:
  - {between: [fast, slow], bandwidth: 4}
  - {from: 0, to: "slow:1", latency: 9}
  - {between: [2, 3], bandwidth: null, latency: 0}
"""
    )
    inf = math.inf
    assert rates(cluster) == [[inf, 8, 4, 4], [8, inf, 4, 4], [4, 4, inf, inf], [4, 4, inf, inf]]
    assert waits(cluster) == [[0, 1, 1, 9], [1, 0, 1, 1], [1, 1, 0, 0], [1, 1, 0, 0]]


def test_a_matrix_comes_last_and_null_leaves_what_holds() -> None:
    cluster = cluster_from_plain(
        {
            "devices": [{"count": 2}],
            "link": {"bandwidth": 8, "latency": "1 s"},
            "links": [{"between": [0, 1], "bandwidth": 5}],
            "matrix": {"bandwidth": [[None, "1 kB/s"], [None, None]]},
        }
    )
    assert rates(cluster) == [[math.inf, 1000.0], [5.0, math.inf]] and waits(cluster) == [[0, 1], [1, 0]]


def test_hydra_s_own_mappings_and_ready_clusters_are_taken() -> None:
    config = OmegaConf.create(LINKED)
    cluster = cluster_from_plain(config)  # pyright: ignore[reportArgumentType]
    assert cluster == read(LINKED) and cluster_from_plain(cluster) is cluster


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ([1], TypeError, "cluster=[1] must be a mapping with some of the keys devices, nodes, link"),
        ({}, ValueError, "give either devices or nodes"),
        ({"devices": [{}], "nodes": []}, ValueError, "give either devices or nodes"),
        ({"device": [{}]}, ValueError, "unknown keys ['device']: it takes devices, nodes"),
        ({"devices": []}, ValueError, "devices is empty: name at least one"),
        ({"devices": {}}, TypeError, "devices={} must be a list"),
        ({"devices": ["fast"]}, TypeError, "devices[0]='fast' must be a mapping"),
        ({"devices": [{"sped": 1}]}, ValueError, "devices[0] has unknown keys ['sped']: it takes name, speed"),
        ({"devices": [{}, {"speed": 0}]}, ValueError, "devices[1].speed=0 must be a finite number > 0"),
        ({"devices": [{"speed": "2 GB"}]}, ValueError, "devices[0].speed='2 GB' must be a finite number > 0"),
        ({"devices": [{"mem": "2 Gb"}]}, ValueError, "devices[0].mem='2 Gb' must be a size > 0"),
        ({"devices": [{"count": 0}]}, ValueError, "devices[0].count=0 must be a whole number >= 1"),
        ({"devices": [{"count": True}]}, ValueError, "devices[0].count=True must be a whole number >= 1"),
        ({"devices": [{"name": 3}]}, ValueError, "devices[0].name=3 must be a text"),
        ({"nodes": [{"name": "a"}]}, TypeError, "nodes[0].devices=None must be a list"),
        ({"nodes": [{"devices": [{}], "link": 3}]}, TypeError, "nodes[0].link=3 must be a mapping"),
        ({"devices": [{}], "link": {"bandwith": 3}}, ValueError, "link has unknown keys ['bandwith']"),
        ({"devices": [{}], "link": {"latency": "3 h"}}, ValueError, "link.latency='3 h' must be a time"),
    ],
)  # fmt: skip
def test_a_wrong_spec_is_refused_where_it_is_wrong(wrong: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        cluster_from_plain(wrong)


@pytest.mark.parametrize(
    ("extra", "error", "words"),
    [
        ({"links": [{"between": [0, 1]}]}, ValueError, "changes nothing: give bandwidth, latency or both"),
        ({"links": [{"bandwidth": 1}]}, ValueError, "must name its ends"),
        ({"links": [{"from": 0, "bandwidth": 1}]}, ValueError, "must name its ends"),
        ({"links": [{"from": 0, "to": 1, "between": [0, 1], "latency": 1}]}, ValueError, "must name its ends"),
        ({"links": [{"between": [0], "latency": 1}]}, ValueError, "links[0].between=[0] must hold two ends"),
        ({"links": [{"between": [0, 4], "latency": 1}]}, ValueError, "between[1]=4 must be a rank in 0..3"),
        ({"links": [{"from": 0, "to": -1, "latency": 1}]}, ValueError, "links[0].to=-1 must be a whole"),
        ({"links": [{"between": ["fast", "slwo"], "latency": 1}]}, ValueError, "'slwo' is no device and no node"),
        ({"links": [{"between": [1, 1], "latency": 1}]}, ValueError, "joins rank 1 with itself"),
        ({"matrix": {"bandwidth": [[1, 1], [1, 1]]}}, ValueError, "rows of [2, 2] entries; 4 devices need 4"),
        ({"matrix": {"latency": [[0] * 4] * 3 + [[0, 0, "x", 0]]}}, ValueError, "matrix.latency[3][2]='x'"),
    ],
)  # fmt: skip
def test_a_wrong_link_is_refused_where_it_is_wrong(extra: Any, error: type[Exception], words: str) -> None:
    wrong = {"devices": [{"name": "fast", "count": 2}, {"name": "slow", "count": 2}], **extra}
    with pytest.raises(error, match=re.escape(words)):
        cluster_from_plain(wrong)


# ---- round trip, changes, text -------------------------------------------------------------------------------

above_0 = st.floats(0.0, exclude_min=True, allow_infinity=False)
links = st.builds(
    Link,
    bandwidth_bytes_per_s=above_0 | st.just(math.inf),
    latency_s=st.floats(0.0, allow_nan=False, allow_infinity=False),
)
devices = st.builds(Device, name=st.text(min_size=1), speed=above_0, mem_bytes=above_0 | st.just(math.inf))


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    n = draw(st.integers(1, 4))
    rows = [[draw(links) for _ in range(n)] for _ in range(n)]
    return Cluster(devices=tuple(draw(devices) for _ in range(n)), links=tuple(map(tuple, rows)))


@given(clusters())
@settings(max_examples=25)
def test_any_cluster_comes_back_from_strict_json(cluster: Cluster) -> None:
    text = json.dumps(cluster_to_plain(cluster), allow_nan=False)
    assert cluster_from_plain(json.loads(text)) == cluster


@given(clusters(), st.integers(1, 4))
def test_every_cluster_can_be_shown(cluster: Cluster, most: int) -> None:
    lines = describe_cluster(cluster, most=most).split("\n")
    assert lines[0].split() == ["rank", "device", "speed", "memory"]
    assert len(lines) > len(cluster.devices)


def test_speeds_memory_and_links_are_exchanged_one_by_one() -> None:
    plain = equal_cluster(2)
    changed = override_cluster(plain, speeds=[1, 0.5], mem_bytes=[None, 100])
    assert [(d.speed, d.mem_bytes) for d in changed.devices] == [(1.0, math.inf), (0.5, 100.0)]
    assert changed.links == plain.links and [d.name for d in changed.devices] == ["device:0", "device:1"]
    link = Link(latency_s=1.0)
    assert override_cluster(plain, links=[[link, link], [link, link]]).links[0][1] == link
    assert override_cluster(plain) == plain
    with pytest.raises(ValueError, match=re.escape("speeds=[1] must have one entry per device: the cluster has 2")):
        override_cluster(plain, speeds=[1])
    with pytest.raises(ValueError, match=re.escape("Device.speed=0.0")):
        override_cluster(plain, speeds=[1, 0])
    with pytest.raises(ValueError, match="size=0 must be a whole number >= 1"):
        equal_cluster(0)


# ---- what is shipped -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(CONF.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_cluster_reads(path: Path) -> None:
    config = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(config, dict) and set(config) == {"spec"}
    if not isinstance(config["spec"], dict):
        assert {"none": None, "probe": "probe"}[path.stem] == config["spec"]
        return
    cluster = cluster_from_plain(config["spec"])
    assert len(cluster.devices) == 4 and max(d.speed for d in cluster.devices) == 1.0
    assert len({d.name for d in cluster.devices}) == 4
