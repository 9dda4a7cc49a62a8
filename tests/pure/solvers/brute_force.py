"""The best plan by trying everything: all subsets, groups, orders, borders, sizes of micro-batches and shares.

Shares no code with the planner but the model of one chain (`times`), which has an oracle of its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_hetero.solvers.chain.chain import DepthRule, Layers, chain_of, layers_of
from lightning_hetero.solvers.chain.model import fitting_periods, times
from lightning_hetero.types import Cluster, ModelCost

Shape = tuple[tuple[int, ...], tuple[int, ...]]
"""Ranks in order, and cuts."""
Times: TypeAlias = NDArray[np.float64]
Cuts: TypeAlias = NDArray[np.int64]


class BruteForce:
    """Of up to 5 devices, fewer than 10 layers and about a dozen samples: seconds.

    Args:
        model, cluster, samples: the problem.
        sizes: of full micro-batches; the last one of a group may be smaller.
        depth: as in `place`.
    """

    def __init__(
        self,
        model: ModelCost,
        cluster: Cluster,
        samples: int,
        sizes: Sequence[int],
        *,
        depth: DepthRule = "per_link",
    ) -> None:
        self._model, self._cluster, self._samples, self._sizes = model, cluster, samples, sizes
        self._depth: DepthRule = depth
        self._capped = any(math.isfinite(device.mem_bytes) for device in cluster.devices)
        self._layers: dict[int, Layers] = {}
        self._seen: dict[tuple[tuple[int, ...], int, int], tuple[Times, Times, Times]] = {}

    def best(self) -> tuple[float, list[Shape]]:
        """Returns the least modelled time [s] and the groups that reach it; ``inf`` and none if nothing fits."""
        ranks = tuple(range(len(self._cluster.devices)))
        table: dict[tuple[int, ...], list[tuple[Shape, Times]]] = {}
        for n in range(1, len(ranks) + 1):
            for some in itertools.combinations(ranks, n):
                table[some] = [found for found in self.pipelines(some) if found[1][0] < math.inf]
        best_s: float = math.inf
        best: list[Shape] = []
        for groups in _groupings(ranks):
            if len(groups) > self._samples or not all(table[group] for group in groups):
                continue
            ideal = [np.min([found for _, found in table[group]], axis=0) for group in groups]
            if self._slowest_s(ideal) >= best_s:
                continue
            for combination in itertools.product(*[table[group] for group in groups]):
                time_s = self._slowest_s([found for _, found in combination])
                if time_s < best_s:
                    time_s += self.sync_s([shape for shape, _ in combination])
                    if time_s < best_s:
                        best_s, best = time_s, [shape for shape, _ in combination]
        return best_s, best

    def pipelines(self, ranks: Sequence[int]) -> Iterator[tuple[Shape, Times]]:
        """Yields all pipelines of all of these ranks, and their times for 1, 2, ... all samples [s]."""
        n = len(self._model.layers)
        inner = list(itertools.combinations(range(1, n), len(ranks) - 1))
        if inner:
            cuts = np.array([(0, *some, n) for some in inner])
            for order in itertools.permutations(ranks):
                found = np.min([self._times(order, cuts, size) for size in self._sizes], axis=0)
                for row, time in zip(cuts.tolist(), found, strict=True):
                    yield (order, tuple(row)), time

    def _times(self, ranks: tuple[int, ...], cuts: Cuts, size: int) -> Times:
        """Returns the times of all cuts, for 1, 2, ... all samples in micro-batches of ``size`` [cuts, samples] [s]."""
        columns: list[Times] = []
        for samples in range(1, self._samples + 1):
            count = -(-samples // size)
            last = samples - (count - 1) * size
            period_s, bottleneck_s, fill_s = self._chain(ranks, cuts, min(size, samples), count)
            fits = period_s < math.inf
            period_s = np.where(fits, period_s, 0.0)
            if count > 1:
                _, rest_s, _ = self._chain(ranks, cuts, last, count)
                fill_s = fill_s + (count - 2) * period_s + period_s / bottleneck_s * rest_s
            columns.append(np.where(fits, fill_s, math.inf))
        return np.array(columns).T

    def _chain(self, ranks: tuple[int, ...], cuts: Cuts, size: int, count: int) -> tuple[Times, Times, Times]:
        """Returns period, bottleneck and fill of all cuts [s]."""
        key = (ranks, size, count if self._capped else 1)
        if key not in self._seen:
            if size not in self._layers:
                self._layers[size] = layers_of(self._model, size)
            layers = self._layers[size]
            chain = chain_of(layers, self._cluster, ranks, micro_batches=count, depth=self._depth)
            of = times(chain, cuts)
            self._seen[key] = fitting_periods(chain, cuts, of), of.bottleneck_s, of.fill_s
        return self._seen[key]

    def _slowest_s(self, groups: Sequence[Times]) -> float:
        """Returns when all samples are done by groups of these times at best, each with one sample at least.

        Times never decrease, so handing out the rest one by one to who is first takes the least of all of them.
        """
        left = self._samples - len(groups)
        if len(groups) == 1:
            return float(groups[0][-1])
        first_s = max(float(t[0]) for t in groups)
        if left == 0:
            return first_s
        return max(first_s, float(np.sort(np.concatenate([t[1:] for t in groups]))[left - 1]))

    def sync_s(self, shapes: Sequence[Shape]) -> float:
        """Returns the time of the gradients' synchronisation, layer by layer [s]."""
        n, model = len(shapes), self._model
        if n == 1:
            return 0.0
        sizes: dict[tuple[int, ...], float] = {}
        leaders = tuple(ranks[0] for ranks, _ in shapes)
        sizes[leaders] = model.before.param_bytes + model.head.param_bytes
        for i, layer in enumerate(model.layers):
            owners = tuple(
                next(rank for s, rank in enumerate(ranks) if cuts[s] <= i < cuts[s + 1])
                for ranks, cuts in shapes
            )
            sizes[owners] = sizes.get(owners, 0.0) + layer.param_bytes
        busy_s = dict.fromkeys(range(len(self._cluster.devices)), 0.0)
        for owners, size in sizes.items():
            ring = sorted(owners)
            links = [self._cluster.links[a][b] for a, b in zip(ring, [*ring[1:], ring[0]], strict=True)]
            slowest = min(link.bandwidth_bytes_per_s for link in links)
            round_s = size / n / slowest + max(link.latency_s for link in links)
            for rank in owners:
                busy_s[rank] += 2 * (n - 1) * round_s if size > 0.0 else 0.0
        return max(busy_s.values())


def _groupings(ranks: tuple[int, ...]) -> Iterator[list[tuple[int, ...]]]:
    """Yields all ways to form groups of some of the ranks, few groups first."""
    found: list[list[tuple[int, ...]]] = [[]]
    for rank in ranks:
        more: list[list[tuple[int, ...]]] = []
        for groups in found:
            more += [groups, [*groups, (rank,)]]
            more += [[*groups[:i], (*group, rank), *groups[i + 1 :]] for i, group in enumerate(groups)]
        found = more
    yield from sorted([groups for groups in found if groups], key=len)
