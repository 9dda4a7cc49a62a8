"""How much of a gradient exchange over emulated links an engine waits for behind its backward pass (no torch).

    device r     forward | backward: head, layer n, ... layer 0
    bucket 0                        [ready]----wire----|
    bucket 1                                   [ready]-----wire-----|
                                               end of the slowest backward |~~exposed~~|

Stock DDP, and the balanced engine, which is DDP inside: gradients are gathered into buckets in the order in which they
come, the first bucket of 1 MiB, the others of 25 MiB (``bucket_cap_mb``), and a bucket is reduced while backward goes
on (Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020, sections 3.2.2 and
3.2.3). A bucket is ready when it is on all devices, and the wire carries one after the other:

    ready_k = max over r of (forward_r + backward_r of the layers from the last down to the first of bucket k)
    end_k   = max(end_{k-1}, ready_k) + ring(bytes_k)
    exposed = end_last - max over r of (forward_r + backward_r)

Our pipelines reduce beside the last backward pass likewise, but in buckets of 25 MiB from the first one on and by
owners of layers; no model here is as large as one, so a device's bucket is complete at the end of its last backward
pass and all of the exchange is exposed.

The ring all-reduce is the planner's, see `lightning_hetero.solvers.placement.sync`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.pipeline.scenarios import Case
from lightning_hetero.types import Cluster, ModelCost

FIRST_BUCKET_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Gradients that are reduced together.

    Attributes:
        size_bytes: of all of them.
        first: the part of the model that gives its gradient last: 0 is before the layers, 1 the first of them, ...
    """

    size_bytes: float
    first: int


def ddp_buckets(
    parameters: Sequence[tuple[int, float]], first_bytes: float = FIRST_BUCKET_BYTES, other_bytes: float = BUCKET_BYTES
) -> list[Bucket]:
    """Returns DDP's buckets, in the order of their exchange.

    A bucket is closed by the parameter with which it reaches its size, as in ``compute_bucket_assignment_by_size`` of
    torch's reducer.

    Args:
        parameters: part of the model and size [bytes], in the order of the forward pass.
        first_bytes, other_bytes: of the first bucket, and of all others.
    """
    buckets: list[Bucket] = []
    size, limit, part = 0.0, first_bytes, 0
    for part, size_bytes in reversed(parameters):
        size += size_bytes
        if size >= limit:
            buckets.append(Bucket(size_bytes=size, first=part))
            size, limit = 0.0, other_bytes
    return [*buckets, Bucket(size_bytes=size, first=part)] if size else buckets


def ring_s(cluster: Cluster, size_bytes: float) -> float:
    """Returns the ring all-reduce of so many bytes among all devices, by rank [s]."""
    k = len(cluster.devices)
    if k < 2 or not size_bytes:
        return 0.0
    links = [cluster.links[r][(r + 1) % k] for r in range(k)]
    per_byte_s = max(1.0 / link.bandwidth_bytes_per_s for link in links)
    return 2.0 * (k - 1) * (size_bytes / k * per_byte_s + max(link.latency_s for link in links))


def exposed_s(buckets: Sequence[Bucket], cluster: Cluster, model: ModelCost, shares: Sequence[int]) -> float:
    """Returns how long all devices wait behind the slowest backward pass [s].

    Args:
        buckets: in the order of their exchange.
        cluster: devices, by rank, and links.
        model: costs on a device of speed 1.
        shares: samples by rank; a device without any is not waited for.
    """
    parts = (model.before, *model.layers, model.head)

    def given_s(rank: int, first: int) -> float:
        """When a device has the gradients of the parts from ``first`` on [s]."""
        n, speed = shares[rank], cluster.devices[rank].speed
        forward_s = sum(part.forward.seconds(n) for part in parts)
        return (forward_s + sum(part.backward.seconds(n) for part in parts[first:])) / speed

    at_work = [rank for rank, n in enumerate(shares) if n]
    end_s = 0.0
    for bucket in buckets:
        ready_s = max(given_s(rank, bucket.first) for rank in at_work)
        end_s = max(end_s, ready_s) + ring_s(cluster, bucket.size_bytes)
    return max(0.0, end_s - max(given_s(rank, 0) for rank in at_work))


def ddp_exposed_s(
    case: Case, model: ModelCost, parameters: Sequence[tuple[int, float]], shares: Sequence[int]
) -> float:
    """Returns `exposed_s` of stock DDP's buckets in one of the scenarios [s]."""
    return exposed_s(ddp_buckets(parameters), case.cluster, model, shares)
