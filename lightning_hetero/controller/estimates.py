"""What devices, links and layers are like by now: a factor each, on top of the profile (layer P).

A run measures stages, not speeds. A stage's time over what the profile says of it is the device's *slowness*; a link's
time over what the cluster says is the link's. Where layers are timed one by one, the median over a stage's layers is
the device's and what is left is the layer's own: that heals a profile which is wrong about layers. Layers too small to
matter count for neither: most of what they take is what surrounds a computation.

Each factor has its own filter, the predictor of the balanced engine (Kalman with a test for jumps): noise is
averaged, a jump is believed the second time it is seen. Where slow spells pass before a plan holds, a rank's factor is
its usual one instead, the median of some batches: see `SpellGuard`.

**Not measured.** Only links between neighbouring stages are measured. But what slows one link of a rank mostly slows
all of them: its interface, or its island's. So a rank is *blamed* if all that was measured of it lately, links to two
ranks or more, is slow; then its other links count as that slow, too, and so does what groups send one another. And
what is measured no more (an idle device, except a change of what it can do; a link nobody uses) is *forgotten* after
a while, that is taken for what the profile says, or it would never be tried again; the next time after twice as long,
until it was found to be well.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, TypeAlias

from lightning_hetero.controller.messages import LinkTime, Observation
from lightning_hetero.controller.spells import PROVEN, SpellGuard
from lightning_hetero.predictors import Kalman
from lightning_hetero.solvers.chain.chain import fixed_and_per_sample
from lightning_hetero.solvers.placement.pipes import Pipe
from lightning_hetero.types import Cluster, Link, ModelCost

_FEW = 3  # layers in a stage, below which their median says nothing
_SMALL = 0.1  # of the mean layer of a stage
_SURE = 2.0  # standard deviations that a change must exceed, besides the dead band
_BESIDE = 50  # batches within which measurements of a rank's links count together
_BLAMED = 1.5  # the least factor of these from which it is the rank that is slow, not a link
_UNSTEADY, _STEADY = 3, 10  # first times of a rank at rest: ignored so many; compared with the mean up to so many
_CHANGED, _RESTING_SURE = 0.5, 4.0  # relative change of its time that counts, if it is so many standard deviations
_OF_MEDIAN = 1.86  # standard deviation of a median, over the median absolute deviation and by the root of the number
_USUAL_OF, _UNUSUAL = 31, 0.2  # batches that what is usual is the median of; relative difference from it
_RECHECK = 200  # batches after which what is not measured any more is forgotten
_WELL = 1.05  # factor up to which something is as the profile says


Key: TypeAlias = tuple[Any, ...]
"""``("rank", r)``, ``("layer", k)``, or ``("link", source, target)``."""
State: TypeAlias = Mapping[Key, float]
"""Factors on the profile's times: 2.0 is twice as slow. It has all ranks and layers, and links measured or blamed."""


class _Factor:
    """One filtered factor, measured time over the profile's; or the usual one, where the guard says so."""

    def __init__(self, guard: SpellGuard) -> None:
        self._filter, self._guard = Kalman(), guard
        self.lately: deque[float] = deque(maxlen=_USUAL_OF)  # measured
        self.seen = -1  # last batch
        self.batch_s = math.inf  # what is at stake: its time in a batch, as profiled

    def add(self, ratio: float, batch: int) -> None:
        if not self.known:
            self._filter.update(1, 1.0)  # the profile is a measurement, too
        self._filter.update(1, ratio)
        self.lately.append(ratio)
        self.seen = batch

    @property
    def known(self) -> bool:
        return self._filter.ready

    @property
    def present(self) -> float:
        return self._filter.predict(1) if self.known else 1.0

    @property
    def usual(self) -> float:
        return median(self.lately) if self.lately else self.present

    @property
    def value(self) -> float:
        return self.present if self._guard.follows else self.usual

    @property
    def std(self) -> float:
        if self._guard.follows or not self.lately:
            return self._filter.std_s(1) if self.known else 0.0
        usual = self.usual
        return _OF_MEDIAN * median(abs(ratio - usual) for ratio in self.lately) / math.sqrt(len(self.lately))

    @property
    def unsure(self) -> bool:
        least, most = sorted((self.present, self.usual))
        is_unusual = most > (1.0 + _UNUSUAL) * least and self._guard.account < PROVEN
        return self._guard.follows and (is_unusual or self._filter.outlier_side != 0)

    def forget(self) -> None:
        self._filter = self._filter.fresh()
        self.lately.clear()

    def to_plain(self) -> dict[str, Any]:
        return {"filter": self._filter.state_dict(), "seen": self.seen, "lately": list(self.lately)}

    def load(self, plain: Mapping[str, Any]) -> None:
        self._filter.load_state_dict(plain["filter"])
        self.seen, self.lately = plain["seen"], deque(plain.get("lately", ()), _USUAL_OF)


class _Resting:
    """A rank since it became idle: nothing that it computes is the run's, so a change of its time counts.

    Args:
        factor: its time over the profile's, measured when it worked last.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self._filter, self._first_s, self._seen = Kalman(), math.nan, 0

    def add(self, rest_s: float) -> float | None:
        """Takes in what a computation took that is always the same [s].

        Returns:
            The rank's factor by now, if that time has changed since it became idle.
        """
        self._seen += 1
        if self._seen <= _UNSTEADY:
            return None
        self._filter.update(1, rest_s)
        now_s = self._filter.predict(1)
        if self._seen <= _STEADY:
            self._first_s = now_s
            return None
        ratio = now_s / self._first_s
        sure = abs(now_s - self._first_s) > _RESTING_SURE * self._filter.std_s(1)
        if not sure or max(ratio, 1.0 / ratio) <= 1.0 + _CHANGED:
            return None
        # Never better than it was at work, or in the beginning: the first times may have been held up.
        return max(self.factor * ratio, min(self.factor, 1.0))


class Estimates:
    """Filters for all that is measured.

    Args:
        model: the costs that were planned with, tied layers joined.
        cluster: devices and links that were planned with.

    Attributes:
        guard: whether ranks' present factors count, or their usual ones.
    """

    def __init__(self, model: ModelCost, cluster: Cluster) -> None:
        self._model, self._cluster, self.guard = model, cluster, SpellGuard()
        self._links: dict[tuple[int, int], Link] = {}  # of such as were free in the cluster's description
        self._factors: dict[Key, _Factor] = {}
        self._resting: dict[int, _Resting] = {}
        self._batch_s = 0.0  # of the last batch
        self._state: State | None = None  # until something is learned or forgotten
        self._patience: dict[tuple[str, int], int] = {}  # with a rank or its links: how many times `_RECHECK`
        self._base = [fixed_and_per_sample(layer) for layer in model.layers]
        self._leader = [fixed_and_per_sample(model.before), fixed_and_per_sample(model.head)]

    # ---- measurements ----

    def update(self, seen: Observation, pipes: Sequence[Pipe], sizes: Sequence[Sequence[int]]) -> None:
        """Learns from one batch, which ran as ``pipes`` with micro-batches of ``sizes``, by pipeline."""
        self._state = None
        for pipe, micro in zip(pipes, sizes, strict=True):
            for stage, rank in enumerate(pipe.ranks):
                first, last = pipe.cuts[stage], pipe.cuts[stage + 1]
                self._stage(seen, rank, range(first, last), len(micro), sum(micro), leader=stage == 0)
        for rank in {*self._resting, *seen.rest_s}:
            if any(rank in pipe.ranks for pipe in pipes):
                self._resting.pop(rank, None)
            elif (rest_s := seen.rest_s.get(rank, 0.0)) > 0.0:
                if rank not in self._resting:
                    self._resting[rank] = _Resting(self._value("rank", rank))
                if (changed := self._resting[rank].add(rest_s)) is not None:
                    self._factor("rank", rank).add(changed, seen.batch)
        devices = [(self._factor("rank", rank), device.speed) for rank, device in enumerate(self._cluster.devices)]
        self.guard.learn(
            [(f.lately[-1] if f.seen == seen.batch else f.present) / speed for f, speed in devices],
            [f.present / speed for f, speed in devices], [f.usual / speed for f, speed in devices],
        )  # fmt: skip
        most = max(map(len, sizes), default=1)
        for sent in seen.links:
            self._link(sent, seen.batch, most)
        if seen.batch_s > 0.0:
            self._batch_s = seen.batch_s
        for key, factor in self._factors.items():
            if factor.seen == seen.batch and factor.value <= _WELL:
                for rank in key[1:]:
                    self._patience.pop((key[0], rank), None)

    def _stage(self, seen: Observation, rank: int, layers: range, count: int, samples: int, *, leader: bool) -> None:
        speed = self._cluster.devices[rank].speed
        parts = [self._seconds(self._base[k], count, samples) / speed for k in layers]
        by_layer = seen.layer_s.get(rank)
        if by_layer is not None and len(by_layer) == len(parts) >= _FEW:
            least_s, least_part_s = _SMALL * sum(by_layer) / len(parts), _SMALL * sum(parts) / len(parts)
            pairs = [(k, m, p) for k, m, p in zip(layers, by_layer, parts, strict=True) if m > 0.0 and p > 0.0]
            common = [m / p for _, m, p in pairs if m >= least_s and p >= least_part_s]
            if common:
                own = median(common)
                for k, m, p in pairs:
                    if m >= least_s or p >= least_part_s:
                        self._factor("layer", k).add(m / p / own, seen.batch)
                        self._factor("layer", k).batch_s = p * own
        work_s = seen.work_s.get(rank)
        if work_s is None or not work_s > 0.0:
            return
        reference_s = sum(part * self._value("layer", k) for k, part in zip(layers, parts, strict=True))
        if leader:
            reference_s += sum(self._seconds(cost, count, samples) / speed for cost in self._leader)
        if reference_s > 0.0:
            self._factor("rank", rank).add(work_s / reference_s, seen.batch)

    def _link(self, sent: LinkTime, batch: int, most: int) -> None:
        if sent.messages < 1 or not sent.seconds > 0.0:
            return
        pair = sent.source, sent.target
        if not self._link_of(pair).seconds(sent.size_bytes) > 0.0:  # nothing is known of it
            if not sent.size_bytes > 0.0:
                return
            self._links[pair] = Link(bandwidth_bytes_per_s=sent.size_bytes / sent.seconds)
        link, factor = self._link_of(pair), self._factor("link", *pair)
        reference_s = sent.messages * link.latency_s + sent.size_bytes / link.bandwidth_bytes_per_s
        factor.add(sent.seconds / reference_s, batch)
        factor.batch_s = reference_s / sent.messages * max(sent.messages, most)  # not all need have been timed

    def _link_of(self, pair: tuple[int, int]) -> Link:
        return self._links.get(pair, self._cluster.links[pair[0]][pair[1]])

    @staticmethod
    def _seconds(cost: tuple[float, float], count: int, samples: int) -> float:
        return cost[0] * count + cost[1] * samples

    def _factor(self, *key: Any) -> _Factor:
        found = self._factors.get(key)
        if found is None:  # `setdefault` would make a filter each time
            found = self._factors[key] = _Factor(self.guard if key[0] == "rank" else SpellGuard())
        return found

    def _value(self, *key: Any) -> float:
        found = self._factors.get(key)
        return 1.0 if found is None else found.value

    def forget(self, batch: int) -> list[str]:
        """Forgets what was not measured for long; returns what, in words."""
        gone: list[str] = []
        again: set[tuple[str, int]] = set()
        for key, factor in self._factors.items():
            if key[0] == "layer" or not factor.known or abs(factor.value - 1.0) <= 1e-3:
                continue
            ends = [(key[0], rank) for rank in key[1:]]
            patience = max(self._patience.get(end, 1) for end in ends)
            if batch - factor.seen > _RECHECK * patience:
                gone.append(f"{_named(key)} not measured for {batch - factor.seen} batches")
                factor.forget()
                self._state = None
                again.update(ends)
        for end in again:
            self._patience[end] = 2 * self._patience.get(end, 1)
        return gone

    # ---- what follows ----

    @property
    def state(self) -> State:
        """The present factors."""
        if self._state is None:
            ranks = range(len(self._cluster.devices))
            keys: list[Key] = [*(("rank", rank) for rank in ranks), *(("layer", k) for k in range(len(self._base)))]
            state = {key: self._value(*key) for key in keys}
            known = self._known_links()
            state.update({key: factor.value for key, factor in known.items()})
            for (side, rank), (least, since) in _blamed(known).items():
                for other in ranks:
                    key = ("link", other, rank) if side else ("link", rank, other)
                    if other != rank and (key not in known or known[key].seen <= since):
                        state[key] = max(state.get(key, 1.0), least)
            self._state = state
        return self._state

    def _known_links(self) -> dict[Key, _Factor]:
        return {key: factor for key, factor in self._factors.items() if key[0] == "link" and factor.known}

    def _changed(self, since: State, sure: float) -> Iterator[tuple[float, Key, _Factor, float, float]]:
        """Yields what differs from ``since`` by more than ``sure`` standard deviations: the ratio, and both factors."""
        state = self.state
        for key, factor in self._factors.items():
            before, now = since.get(key, 1.0), state.get(key, 1.0)
            if abs(now - before) > sure * factor.std:
                yield max(now / before, before / now), key, factor, before, now

    def changes(self, since: State, band: float) -> list[tuple[float, str, tuple[int, ...]]]:
        """Returns what changed by more than ``band`` and by more than the noise: (ratio, in words, ranks), most first.

        Of a link both its ranks, or only the one that is blamed. A link or a layer must also have changed by that part
        of a batch: what hardly counts is noisiest.

        Args:
            since: an earlier `state`.
            band: relative.
        """
        found: list[tuple[float, str, tuple[int, ...]]] = []
        blamed = {rank for _, rank in _blamed(self._known_links())}
        for size, key, factor, before, now in self._changed(since, _SURE):
            if size - 1.0 > band and abs(now - before) * factor.batch_s > band * self._batch_s:
                ranks = key[1:] if key[0] != "layer" else ()
                ranks = tuple(rank for rank in ranks if key[0] == "link" and rank in blamed) or ranks
                slower = "takes {:.2f} times as long" if now > before else "is {:.2f} times as fast"
                found.append((size, f"{_named(key)} {slower.format(size)} as before", ranks))
        return sorted(found, key=lambda change: (-change[0], change[1]))

    def unsure(self, batch: int) -> bool:
        """Returns whether a rank's time has just jumped: the next batches will confirm it, or call it a slow spell."""
        return any(key[0] == "rank" and f.seen == batch and f.unsure for key, f in self._factors.items())

    def furthest(self, since: State, sure: float) -> float:
        """Returns the largest relative change since ``since`` of those that exceed ``sure`` standard deviations."""
        return max((ratio for ratio, *_ in self._changed(since, sure)), default=1.0) - 1.0

    def costs(self, state: State) -> tuple[ModelCost, Cluster]:
        """Returns the profile and the cluster with the factors applied."""
        model, cluster = self._model, self._cluster
        layers = [layer.times(state["layer", k]) for k, layer in enumerate(model.layers)]
        devices = [replace(d, speed=d.speed / state["rank", rank]) for rank, d in enumerate(cluster.devices)]
        links = [list(row) for row in cluster.links]
        for key, factor in state.items():
            if key[0] == "link":
                link = self._link_of(key[1:])
                links[key[1]][key[2]] = Link(
                    bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / factor, latency_s=link.latency_s * factor
                )
        return replace(model, layers=tuple(layers)), Cluster(devices=tuple(devices), links=tuple(map(tuple, links)))

    # ---- checkpoint ----

    def to_plain(self) -> dict[str, Any]:
        """Returns JSON values for `load`."""
        links = [[a, b, link.bandwidth_bytes_per_s] for (a, b), link in self._links.items()]
        return {
            "factors": [[list(key), factor.to_plain()] for key, factor in self._factors.items()],
            "links": links,
            "patience": [[list(end), times] for end, times in self._patience.items()],
            "resting": [[rank, resting.factor] for rank, resting in self._resting.items()],
        }

    def load(self, plain: Mapping[str, Any]) -> None:
        """Goes on from what `to_plain` returned."""
        self._state = None
        self._links = {(a, b): Link(bandwidth_bytes_per_s=bandwidth) for a, b, bandwidth in plain["links"]}
        self._factors = {}
        for key, state in plain["factors"]:
            self._factor(*key).load(state)
        self._patience = {(kind, rank): times for (kind, rank), times in plain["patience"]}
        self._resting = {rank: _Resting(factor) for rank, factor in plain.get("resting", ())}


def _blamed(links: Mapping[Key, _Factor]) -> dict[tuple[int, int], tuple[float, int]]:
    """Returns what all that was measured lately of a rank's links is slower than, and since when that counts.

    By (0, rank) of what leaves it, and (1, rank) of what gets to it.
    """
    ends: dict[tuple[int, int], list[_Factor]] = {}
    for (_, *pair), factor in links.items():
        for side, rank in enumerate(pair):
            ends.setdefault((side, rank), []).append(factor)
    found: dict[tuple[int, int], tuple[float, int]] = {}
    for end, factors in ends.items():
        since = max(factor.seen for factor in factors) - _BESIDE
        lately = [factor.value for factor in factors if factor.seen > since]
        if len(lately) > 1 and min(lately) >= _BLAMED:
            found[end] = min(lately), since
    return found


def _named(key: Key) -> str:
    return f"link {key[1]} -> {key[2]}" if key[0] == "link" else f"{key[0]} {key[1]}"
