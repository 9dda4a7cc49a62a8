"""Small models and clusters, and an oracle for the controller's decisions that shares no code with it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, pairwise, permutations

from hypothesis import strategies as st

from lightning_hetero.solvers.placement import evaluate_plan, micro_batches_of
from lightning_hetero.solvers.placement.pipes import Pipe
from lightning_hetero.types import AffineCost, Cluster, Device, GroupPlan, LayerCost, Link, ModelCost

FREE = AffineCost(fixed_s=0.0, per_sample_s=0.0)
ENDS = LayerCost(name="", forward=FREE, backward=FREE)


def model_of(
    work_s: Sequence[float], *, state_bytes: float = 1e6, output_bytes: float = 1e3, fixed_s: float = 0.0
) -> ModelCost:
    """Layers that take ``work_s`` per sample, a third of it forward."""
    layers = tuple(
        LayerCost(
            name=f"layer{i}",
            forward=AffineCost(fixed_s=fixed_s / 3, per_sample_s=work / 3),
            backward=AffineCost(fixed_s=2 * fixed_s / 3, per_sample_s=2 * work / 3),
            param_bytes=state_bytes / 4,
            state_bytes=state_bytes,
            output_bytes=output_bytes,
        )
        for i, work in enumerate(work_s)
    )
    return ModelCost(layers=layers, before=ENDS, head=ENDS)


def cluster_of(
    speeds: Sequence[float], *, bandwidth: float = 1e9, latency_s: float = 1e-5, mem_bytes: float = math.inf
) -> Cluster:
    """Devices of these speeds, all links alike."""
    link = Link(bandwidth_bytes_per_s=bandwidth, latency_s=latency_s)
    devices = tuple(Device(name=f"d{i}", speed=speed, mem_bytes=mem_bytes) for i, speed in enumerate(speeds))
    return Cluster(devices=devices, links=((link,) * len(devices),) * len(devices))


def every_structure(layers: int, ranks: int) -> Iterator[tuple[Pipe, ...]]:
    """All groupings, orders and borders: by labelling ranks with groups, then ordering each group's."""

    def labelled(rank: int, groups: tuple[tuple[int, ...], ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
        if rank == ranks:
            yield groups
            return
        yield from labelled(rank + 1, groups)
        for i, group in enumerate(groups):
            yield from labelled(rank + 1, (*groups[:i], (*group, rank), *groups[i + 1 :]))
        yield from labelled(rank + 1, (*groups, (rank,)))

    def piped(groups: tuple[tuple[int, ...], ...]) -> Iterator[tuple[Pipe, ...]]:
        if not groups:
            yield ()
            return
        for order in permutations(groups[0]):
            for inner in combinations(range(1, layers), len(order) - 1):
                for rest in piped(groups[1:]):
                    yield (Pipe(order, (0, *inner, layers)), *rest)

    for groups in labelled(0, ()):
        if groups:
            yield from piped(groups)


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write ``total`` as ``parts`` numbers >= 1."""
    for inner in combinations(range(1, total), parts - 1):
        ends = (0, *inner, total)
        yield tuple(b - a for a, b in pairwise(ends))


def time_of(model: ModelCost, cluster: Cluster, pipes: Sequence[Pipe], shares: Sequence[int], size: int) -> float:
    """Modelled time of a batch by `evaluate_plan`, micro-batches of ``size``; ``inf`` if it does not fit."""
    groups = [
        GroupPlan(ranks=p.ranks, cuts=p.cuts, samples=n, micro_batches=micro_batches_of(n, size), depths=())
        for p, n in zip(pipes, shares, strict=True)
    ]
    return evaluate_plan(model, cluster, groups).total_s


def best_by_force(
    model: ModelCost,
    cluster: Cluster,
    samples: int,
    size: int,
    *,
    v: float,
    reference_s: float,
    prices_per_s: Sequence[float],
    queue_over_budget: float,
    pauses_s: Mapping[tuple[Pipe, ...], float],
    horizon: float,
) -> float:
    """The least of V T'/T_ref + Q money/budget over all structures and all shares."""
    best = math.inf
    for pipes in every_structure(len(model.layers), len(cluster.devices)):
        if len(pipes) > samples:
            continue
        rate = sum(prices_per_s[rank] for pipe in pipes for rank in pipe.ranks)
        pause_s = pauses_s[tuple(sorted(pipes, key=lambda p: min(p.ranks)))]
        for shares in compositions(samples, len(pipes)):
            seconds = time_of(model, cluster, pipes, shares, size) + pause_s / horizon
            best = min(best, v * seconds / reference_s + queue_over_budget * rate * seconds)
    return best


@st.composite
def structures(draw: st.DrawFn, layers: int = 6, ranks: int = 5) -> tuple[Pipe, ...]:
    """Groups of ranks with borders; some ranks rest."""
    order = draw(st.permutations(range(ranks)))[: draw(st.integers(1, ranks))]
    pipes: list[Pipe] = []
    while order:
        n = draw(st.integers(1, len(order)))
        inner = sorted(draw(st.sets(st.integers(1, layers - 1), min_size=n - 1, max_size=n - 1)))
        pipes.append(Pipe(tuple(order[:n]), (0, *inner, layers)))
        order = order[n:]
    return tuple(pipes)
