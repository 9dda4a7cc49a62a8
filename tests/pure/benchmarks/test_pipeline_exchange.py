"""What an exchange over emulated links leaves behind the backward pass, by hand and against torch's own buckets."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.pipeline.exchange import Bucket, ddp_buckets, ddp_exposed_s, exposed_s, ring_s
from benchmarks.pipeline.models import MODELS, costs_of, parameters_of
from benchmarks.pipeline.plans import replica_sync_s
from benchmarks.pipeline.scenarios import cases
from lightning_hetero.types import AffineCost, Cluster, Device, LayerCost, Link, ModelCost

MIB = 2**20


def cost(forward_s: float, backward_s: float) -> LayerCost:
    return LayerCost(
        name="",
        forward=AffineCost(fixed_s=0.0, per_sample_s=forward_s),
        backward=AffineCost(fixed_s=0.0, per_sample_s=backward_s),
    )


MODEL = ModelCost(layers=(cost(1.0, 2.0), cost(1.0, 2.0)), before=cost(0.0, 0.0), head=cost(1.0, 2.0))


def cluster(speeds: list[float], bandwidth: float) -> Cluster:
    links = ((Link(bandwidth_bytes_per_s=bandwidth),) * len(speeds),) * len(speeds)
    return Cluster(devices=tuple(Device(name=f"{i}", speed=v) for i, v in enumerate(speeds)), links=links)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 60), st.integers(1, 200))
def test_buckets_are_filled_as_torch_fills_them(sizes: list[int], first: int, other: int) -> None:
    buckets = ddp_buckets(list(enumerate(4.0 * n for n in sizes)), first, other)
    tensors = [torch.empty(n) for n in reversed(sizes)]  # in the order in which gradients come
    indices, _ = dist._compute_bucket_assignment_by_size(tensors, [first, other])
    assert [b.size_bytes for b in buckets] == [sum(4 * tensors[i].numel() for i in each) for each in indices]
    assert [b.first for b in buckets] == [len(sizes) - 1 - max(each) for each in indices]


def test_the_sizes_are_those_of_torch() -> None:
    assert dist._DEFAULT_FIRST_BUCKET_BYTES == MIB
    buckets = ddp_buckets([(i, 0.6 * MIB) for i in range(60)])
    assert [round(b.size_bytes / MIB, 1) for b in buckets] == [1.2, 25.2, 9.6]


def test_the_last_bucket_is_waited_for_and_the_first_is_hidden() -> None:
    """4 s of ring for each of 8 bytes on 2 devices; 3 s forward, 2 s backward a part, from the head down."""
    two = cluster([1.0, 1.0], 2.0)
    assert ring_s(two, 8.0) == pytest.approx(4.0)
    early, late = Bucket(size_bytes=8.0, first=2), Bucket(size_bytes=1.0, first=0)
    assert exposed_s([early], two, MODEL, [1, 1]) == pytest.approx(7.0 + 4.0 - 9.0)  # ready after 7 s of 9
    assert exposed_s([early, late], two, MODEL, [1, 1]) == pytest.approx(2.0 + 0.5)
    assert exposed_s([replace(early, first=3), late], two, MODEL, [1, 1]) == pytest.approx(0.5)  # ready after 5 s
    assert exposed_s([replace(early, first=0)], two, MODEL, [1, 1]) == pytest.approx(4.0)  # nothing overlaps


def test_a_bucket_waits_for_the_slowest_device() -> None:
    uneven = cluster([1.0, 0.5], 2.0)
    early = Bucket(size_bytes=8.0, first=3)
    # the slow one has its gradients of the head after 10 s of 18
    assert exposed_s([early], uneven, MODEL, [1, 1]) == 0.0
    assert exposed_s([replace(early, size_bytes=20.0)], uneven, MODEL, [1, 1]) == pytest.approx(10.0 + 10.0 - 18.0)
    # with half of the samples it is as fast as the other; with none nobody waits for it
    assert exposed_s([replace(early, size_bytes=20.0)], uneven, MODEL, [2, 1]) == pytest.approx(2.0)
    assert exposed_s([replace(early, size_bytes=20.0)], uneven, MODEL, [1, 0]) == pytest.approx(5.0 + 10.0 - 9.0)


@pytest.mark.parametrize("name", list(MODELS))
def test_parameters_are_those_of_the_costs(name: str) -> None:
    costs = costs_of(name, 0.01)
    sizes = [part.param_bytes for part in (costs.before, *costs.layers, costs.head)]
    found = parameters_of(name)
    assert [sum(size for part, size in found if part == i) for i in range(len(sizes))] == sizes


@pytest.mark.parametrize("case", [case for case in cases() if case.trained], ids=lambda case: case.title)
def test_in_the_scenarios_the_wire_is_the_planners_and_partly_hidden(case) -> None:  # type: ignore[no-untyped-def]
    costs, parameters = costs_of(case.model, case.sample_s, case.fixed_s), parameters_of(case.model)
    total = sum(size for _, size in parameters)
    assert total < 25 * MIB  # so that nothing of our engine's exchange is hidden
    whole_s = ring_s(case.cluster, total)
    assert whole_s == pytest.approx(replica_sync_s(case, costs))
    share = case.global_batch // case.world_size
    assert 0.0 < ddp_exposed_s(case, costs, parameters, [share] * case.world_size) < whole_s
