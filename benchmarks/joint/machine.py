"""What a plan really takes on a simulated cluster: the operations of its schedule, not a formula."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from lightning_hetero.controller.messages import LinkTime
from lightning_hetero.controller.migration import pieces_between
from lightning_hetero.pipeline.decide.costs import batch_s, work_s
from lightning_hetero.solvers.placement.pipes import Pipe, Problem
from lightning_hetero.solvers.placement.sync import sync_s
from lightning_hetero.types import Cluster, GroupPlan, Link, ModelCost, PipelinePlan


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """What holds from ``start`` on.

    Attributes:
        start: batch, or second.
        slowness: of the ranks: how many times as long they take as the cluster's description says.
        links: the same of directions between ranks, (source, target); those left out are as described.
        prices: of the ranks, relative to what they are given as.
    """

    start: float
    slowness: tuple[float, ...]
    links: Mapping[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])
    prices: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """What one batch takes.

    Attributes:
        seconds: from its start to its end.
        work_s: own work by rank [s]; 0 at rest.
        links: what links carried between stages.
    """

    seconds: float
    work_s: tuple[float, ...]
    links: tuple[LinkTime, ...]


class Machine:
    """A cluster that changes; remembers what it has computed.

    Args:
        model: what layers really cost.
        cluster: devices and links as described; a `Phase` says how much slower they are.
        pause_s: fixed part of a migration.
        layer_s: of each layer that moves, beside its bytes.
    """

    def __init__(self, model: ModelCost, cluster: Cluster, *, pause_s: float = 0.05, layer_s: float = 0.0) -> None:
        self.model, self.cluster = model, cluster
        self._pause_s, self._layer_s = pause_s, layer_s
        self._clusters: dict[int, Cluster] = {}
        self._batches: dict[tuple[tuple[GroupPlan, ...], int], Batch] = {}
        self._phases: dict[int, Phase] = {}  # kept, so that an id stays theirs

    def cluster_in(self, phase: Phase) -> Cluster:
        """Returns the cluster as it is in ``phase``."""
        known = self._clusters.get(id(phase))
        if known is None:
            devices = tuple(
                replace(device, speed=device.speed / slowness)
                for device, slowness in zip(self.cluster.devices, phase.slowness, strict=True)
            )
            rows = [list(row) for row in self.cluster.links]
            for (a, b), factor in phase.links.items():
                link = rows[a][b]
                rows[a][b] = Link(
                    bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / factor, latency_s=link.latency_s * factor
                )
            known = self._clusters[id(phase)] = Cluster(devices=devices, links=tuple(tuple(row) for row in rows))
            self._phases[id(phase)] = phase
        return known

    def batch(self, plan: PipelinePlan, phase: Phase) -> Batch:
        """Returns what a whole batch takes under ``plan`` in ``phase``."""
        cluster = self.cluster_in(phase)
        key = (tuple(replace(group, total_s=0.0) for group in plan.groups), id(phase))
        found = self._batches.get(key)
        if found is None:
            found = self._batches[key] = self._run(plan, cluster)
        return found

    def _run(self, plan: PipelinePlan, cluster: Cluster) -> Batch:
        links: list[LinkTime] = []
        for group in plan.groups:
            for a, b, size_bytes, count in self._wires(group):
                wire_s = (
                    cluster.links[a][b].latency_s * count + size_bytes / cluster.links[a][b].bandwidth_bytes_per_s
                )
                links.append(LinkTime(source=a, target=b, messages=count, size_bytes=size_bytes, seconds=wire_s))
        samples = sum(group.samples for group in plan.groups)
        problem = Problem(self.model, cluster, samples, (samples,))
        synchronised_s = sync_s(problem, [Pipe(group.ranks, group.cuts) for group in plan.groups])
        return Batch(
            seconds=batch_s(replace(plan, sync_s=synchronised_s), self.model, cluster),
            work_s=work_s(plan, self.model, cluster, ranks=len(cluster.devices)),
            links=tuple(links),
        )

    def _wires(self, group: GroupPlan) -> list[tuple[int, int, float, int]]:
        ranks, count = group.ranks, len(group.micro_batches)
        if len(ranks) == 1:
            return []
        found: dict[tuple[int, int], tuple[float, int]] = {}
        for stage, rank in enumerate(ranks):
            after = ranks[(stage + 1) % len(ranks)]
            size_bytes = self.model.layers[group.cuts[stage + 1] - 1].output_bytes * group.samples
            for pair in ((rank, after), (after, rank)):
                bytes_so_far, messages = found.get(pair, (0.0, 0))
                found[pair] = bytes_so_far + size_bytes, messages + count
        return [(a, b, size_bytes, messages) for (a, b), (size_bytes, messages) in found.items()]

    def moves(self, old: PipelinePlan, new: PipelinePlan) -> list[tuple[int, int, float]]:
        """Returns what travels from plan to plan, layer by layer: source, target and size [bytes]."""
        problem = Problem(self.model, self.cluster, sum(group.samples for group in new.groups), (1,))
        before, after = ([Pipe(group.ranks, group.cuts) for group in plan.groups] for plan in (old, new))
        found: list[tuple[int, int, float]] = []
        for first, end, source, target in pieces_between(problem, before, after):
            layers = (problem.outside,) if first < 0 else self.model.layers[first:end]
            found += [(source, target, layer.state_bytes) for layer in layers]
        return found

    def pause_s(self, moves: Sequence[tuple[int, int, float]], phase: Phase) -> float:
        """Returns how long a migration stops training [s]: each rank sends and receives one message at a time."""
        cluster, busy = self.cluster_in(phase), dict[tuple[int, int], float]()
        for source, target, size_bytes in moves:
            seconds = cluster.links[source][target].seconds(size_bytes) + self._layer_s
            for end in ((0, source), (1, target)):
                busy[end] = busy.get(end, 0.0) + seconds
        return self._pause_s + max(busy.values()) if busy else 0.0
