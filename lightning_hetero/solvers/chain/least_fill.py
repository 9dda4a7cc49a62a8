"""The least fill over all splits of a chain that keep to a given period: dynamic programming from the last stage.

For one period P it is a shortest path: V_s(a) = least time of stages s, s + 1, ... and back, if s starts at layer a;

    V_s(a) = min over b of  V_(s+1)(b) + round trip over link s at cut b + work(a, b) / speed_s
             such that      the stage, and each direction of the link at b, take at most P, and the stage fits.

All stages must be non-empty, b > a. Ours is how it is made fast: only cuts in *windows* are looked at, which the two
relaxed walks of `bounds` leave open (narrow near the optimum); edges (a, b) are laid out as a band, by b - a; and many
periods are rows of the same arrays, because at these sizes NumPy costs per call and not per number.

**Memory** needs the depth of stage s, which in turn depends on the cuts behind it. Two passes are offered. The *quick*
one takes the least depth that any cuts give: its fill is a lower bound, and exact if the split it finds fits. The
*labelled* one is exact: for a single period, a row per depth d that holds the least V_s(a) among ways whose depth is at
most d. Of two ways with the same a, the one with less fill and less depth can replace the other whatever is in front,
so nothing else need be kept. (Under ``low_memory`` the depth is the lesser of two counts: a row per pair of them.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_hetero.solvers.chain.bounds import Walk, walk_back, walk_on
from lightning_hetero.solvers.chain.chain import Chain
from lightning_hetero.solvers.chain.layers import Floats, Ints
from lightning_hetero.solvers.chain.model import PERIOD_SNAP, periods, room

__all__ = ["LeastFill"]

Bools: TypeAlias = NDArray[np.bool_]
_Pick: TypeAlias = Callable[[Floats], Floats]
_AT_ONCE = 1 << 16  # numbers per array of edges: what a core's cache holds


class _Labels(NamedTuple):
    """Rows of a labelled pass: pairs of bounds on the two counts of `chain`, whose lesser one is the depth.

    Each is a range of whole numbers; at its last one any count is meant, since no count is above it.
    """

    by_rest: Floats  # [k] C; a single inf where only L counts
    by_links: Floats  # [n] L

    @property
    def held(self) -> Floats:
        """[k * n, 1] the depth is at most this."""
        return np.reshape(np.minimum(self.by_rest[:, None], self.by_links), (-1, 1))

    def before(self, chain: Chain, per: Floats, trips: Floats, longest_s: float) -> _Labels:
        """Returns the labels of the stage in front, given its round trips, and the longest way from it and back."""
        most = float(chain.micro_batches)
        low = min(float(self.by_links[0] + 1.0 + periods(trips.min(), per)[0, 0]), most)
        high = min(float(self.by_links[-1] + 1.0 + periods(trips.max(), per)[0, 0]), most)
        by_rest = self.by_rest
        if chain.depth == "low_memory":
            longest = max(float(by_rest[-1]), float(periods(longest_s, per)[0, 0])) + 1.0
            by_rest = np.arange(min(float(by_rest[0]) + 1.0, most), min(longest, most) + 1.0)
        return _Labels(by_rest, np.arange(low, high + 1.0))

    def rows_behind(self, behind: _Labels, most: int, steps: Floats) -> Ints:
        """Returns the rows of the stage behind [rows, cuts] that these rows build on; -1 where there is none."""
        i = _places(self.by_rest[:, None], behind.by_rest, most, np.ones(1))[:, None, :]
        j = _places(self.by_links[:, None], behind.by_links, most, steps)[None, :, :]
        rows: Ints = np.where((i < 0) | (j < 0), -1, i * len(behind.by_links) + j)
        return np.reshape(rows, (-1, rows.shape[2]))


def _places(counts: Floats, behind: Floats, most: int, steps: Floats) -> Ints:
    if np.isinf(behind[0]):
        return np.zeros((1, 1), dtype=np.int64)
    allowed = np.where(counts >= most, behind[-1], np.minimum(counts - steps, behind[-1]))
    return np.maximum(allowed - behind[0], -1.0).astype(np.int64)


class _Stage(NamedTuple):
    """What tracing back needs of a stage that starts at a cut from ``first`` on and ends at one from ``start`` on."""

    first: int
    start: int
    ways: Floats  # [rows, cuts] V_(s+1) and the link; inf where the link is too slow
    held: Floats  # [rows, 1] depth
    latest: Floats | float  # [rows, 1] the longest way to the end and back that the label allows
    behind: Ints | None  # [rows, cuts] row of the stage behind; None: the same
    values: Floats  # [rows, places] V_s; labelled: [k, n, places], not yet the minimum over lesser labels


class LeastFill:
    """One pass over a chain of two or more devices.

    Args:
        walk: of the chain.
        period_s: [n] periods to ask for, positive; just one if ``labelled``.
        labelled: exact under memory caps.

    Attributes:
        fill_s: [n] the least fill; ``inf`` if no split has this period.
        width: mean number of places at which a cut was looked for.
    """

    def __init__(self, walk: Walk, period_s: Floats, *, labelled: bool = False) -> None:
        self._chain, self._labelled = walk.chain, labelled
        self._per = period_s[:, None]
        self._stages: list[_Stage] = []
        self.fill_s = np.full(len(period_s), np.inf)
        self.width = 1.0
        places = _windows(walk, float(period_s.max()))
        if places is not None:
            self.width = sum(b - a + 1 for a, b in places) / len(places)
            if labelled:
                self.fill_s[0] = self._run_labelled(places)
            else:
                self.fill_s = self._run_quick(places)

    # ---- from the last stage to the first ----

    def _run_quick(self, places: list[tuple[int, int]]) -> Floats:
        chain, per = self._chain, self._per
        value = np.full((len(per), 1), chain.leader_s[1])
        held = np.ones((1, 1))  # by the head, which comes behind the last stage
        for s in range(len(chain) - 1, -1, -1):
            start, end = places[s + 1]
            trips, slow = self._crossings(s, start, end)
            if chain.capped:
                if chain.overlap:
                    held = held + 1.0 + periods(trips.min(), per)
                else:
                    held = np.full((1, 1), len(chain) + 1.0 - s)
                held = np.minimum(held, float(chain.micro_batches))
            ways = value + trips
            np.copyto(ways, np.inf, where=slow)
            stage = _Stage(places[s][0], start, ways, held, np.inf, None, value)
            value = self._band(s, *places[s], stage)
            self._stages.append(stage._replace(values=value))
        return value[:, 0]

    def _run_labelled(self, places: list[tuple[int, int]]) -> float:
        chain, per = self._chain, self._per
        most = chain.micro_batches
        value = np.full((1, 1), chain.leader_s[1])
        labels = _Labels(np.ones(1) if chain.depth == "low_memory" else np.full(1, np.inf), np.ones(1))
        longest_s = chain.leader_s[1]
        for s in range(len(chain) - 1, -1, -1):
            start, end = places[s + 1]
            trips, slow = self._crossings(s, start, end)
            longest_s += float(per[0, 0]) + float(trips.max())
            labels, above = labels.before(chain, per, trips, longest_s), labels
            behind = labels.rows_behind(above, most, 1.0 + periods(trips, per[0]))
            ways = np.where((behind < 0) | slow, np.inf, value[behind, np.arange(len(trips))] + trips)
            limit = np.where(labels.by_rest >= most, np.inf, labels.by_rest - 1.0) * per[0]
            latest = np.repeat(limit, len(labels.by_links))[:, None]
            stage = _Stage(places[s][0], start, ways, labels.held, latest, behind, value)
            found = np.reshape(
                self._band(s, *places[s], stage), (len(labels.by_rest), len(labels.by_links), -1)
            )
            self._stages.append(stage._replace(values=found))
            least = np.minimum.accumulate(np.minimum.accumulate(found, axis=0), axis=1)
            value = np.reshape(least, (len(ways), -1))
        return float(value.min())

    def _crossings(self, s: int, start: int, end: int) -> tuple[Floats, Bools]:
        """Returns the round trips over the link behind s at cuts [n], and at which periods it is too slow [rows, n]."""
        chain = self._chain
        ahead, back = chain.crossing_s(s, chain.layers.cut_sizes[start : end + 1])
        limit = self._per if chain.overlap else np.full((1, 1), np.inf)
        trips = ahead + back
        if s == 0:
            ahead, back = ahead + chain.beside_s[0], back + chain.beside_s[1]
        return trips, np.maximum(ahead, back) > limit

    def _band(self, s: int, first: int, last: int, stage: _Stage) -> Floats:
        """Returns V_s [rows, places] for starts from ``first`` to ``last``."""
        chain, layers = self._chain, self._chain.layers
        ways, start = stage.ways, stage.start
        n, width, count = len(ways), last - first + 1, ways.shape[1]
        work = layers.work_to[: len(layers) + 1]
        reach = work[first : last + 1] + float(self._per.max()) * float(chain.speeds[s]) * (1.0 + 1e-9)
        furthest = int((np.searchsorted(work, reach, side="right") - np.arange(first, last + 1)).max())
        near = max(1, start - last)
        far = min(furthest, start + count - 1 - first)
        best = np.full((n, width), np.inf)
        if far < near:
            return best
        low = first + near  # the band's first cut
        padded = np.full((n, far - near + width), np.inf)
        a, b = max(low, start), min(last + far, start + count - 1)
        padded[:, a - low : b - low + 1] = ways[:, a - start : b - start + 1]
        step = max(1, _AT_ONCE // (n * width))
        row, item = padded.strides
        for k in range(near, far + 1, step):
            deep = min(step, far + 1 - k)
            band = np.ndarray((deep, n, width), np.float64, padded, (k - near) * item, (item, row, item))
            at_b = partial(_slide, start=first + k, count=deep, width=width)
            value = self._extend(s, band, lambda x: x[first : last + 1], at_b, stage, slice(None))
            np.minimum(best, value.min(axis=0), out=best)
        return best

    def _extend(
        self, s: int, ways: Floats, at_a: _Pick, at_b: _Pick, stage: _Stage, rows: slice | Ints
    ) -> Floats:
        """Returns V_s by edge (a, b), all shapes broadcast; inf where the edge is not allowed.

        ``at_a`` and ``at_b`` pick the values at the cuts a and b from an array over all cuts.
        """
        chain, layers = self._chain, self._chain.layers
        before_s, head_s = chain.leader_s
        per = self._per if self._labelled else self._per[rows]
        stage_s = (at_b(layers.work_to) - at_a(layers.work_to)) / float(chain.speeds[s])
        busy_s = stage_s + (before_s + head_s) if s == 0 else stage_s
        if not chain.overlap:
            busy_s = busy_s + at_b(self._trips(s)) + (at_a(self._trips(s - 1)) if s else self._trips(-1)[-1])
        value = ways + (stage_s + before_s if s == 0 else stage_s)
        np.copyto(value, np.inf, where=busy_s > per)
        thrifty = chain.overlap and chain.depth == "low_memory"
        cap = float(chain.mem_bytes[s])
        if cap < np.inf:
            state = at_b(layers.state_to) - at_a(layers.state_to)
            activations = at_b(layers.activation_to) - at_a(layers.kept_to)
            if s == 0:
                state = state + layers.leader_state_bytes
                activations = activations + layers.leader_activation_bytes
            space = room(state, activations, cap)
            held = stage.held[rows] if len(stage.held) > 1 else stage.held
            if float(held.max()) > float(space.min()):
                too_many = held > space
                if thrifty and not self._labelled:  # the other count may be less, but not less than this
                    too_late = value * PERIOD_SNAP > (np.floor(space) - 1.0) * per
                    too_many &= too_late | (min(len(chain) + 1 - s, chain.micro_batches) > space)
                np.copyto(value, np.inf, where=too_many)
        if thrifty and isinstance(stage.latest, np.ndarray):
            np.copyto(value, np.inf, where=value * PERIOD_SNAP > stage.latest[rows])
        return value

    def _trips(self, link: int) -> Floats:
        """Returns the round trip over a link (-1: the loop) at every cut [s]."""
        ahead, back = self._chain.crossing_s(link, self._chain.layers.cut_sizes)
        return ahead + back

    # ---- and back again ----

    def cuts(self, rows: Ints) -> Ints:
        """Returns the splits [k, S + 1] behind ``fill_s`` of these rows, which must be finite."""
        cuts = np.zeros((len(rows), len(self._chain) + 1), dtype=np.int64)
        for s, stage in enumerate(reversed(self._stages)):
            starts = cuts[:, s : s + 1]
            if self._labelled:
                place = int(starts[0, 0]) - stage.first
                rows = self._best_label(stage, place, None if s == 0 else int(rows[0]))
            ends: Ints = np.arange(stage.start, stage.start + stage.ways.shape[1], dtype=np.int64)
            at_a, at_b = partial(_take, at=starts), partial(_take, at=ends)
            value = self._extend(s, stage.ways[rows], at_a, at_b, stage, rows)
            np.copyto(value, np.inf, where=ends <= starts)
            best = value.argmin(axis=1)
            cuts[:, s + 1] = ends[best]
            if stage.behind is not None:
                rows = stage.behind[rows, best]
        return cuts

    def _best_label(self, stage: _Stage, place: int, row: int | None) -> Ints:
        """Returns the row where the least value up to the label ``row`` (None: any) comes from."""
        values = stage.values[:, :, place]
        n = values.shape[1]
        if row is not None:
            values = values[: row // n + 1, : row % n + 1]
        i, j = divmod(int(values.argmin()), values.shape[1])
        return np.array([i * n + j])


def _windows(walk: Walk, period_s: float) -> list[tuple[int, int]] | None:
    """Returns the first and the last place of each cut [S + 1] in splits of this period; None: there is no split."""
    last, first = walk_on(walk, period_s), walk_back(walk, period_s)
    n, s = len(walk.work) - 1, len(walk.speeds)
    if last[s] < n or first[0] > 0:
        return None
    places = [(max(first[i], i), min(last[i], n - s + i)) for i in range(s + 1)]
    places[0], places[s] = (0, 0), (n, n)
    return None if any(a > b for a, b in places) else places


def _take(values: Floats, *, at: Ints) -> Floats:
    return values[at]


def _slide(values: Floats, *, start: int, count: int, width: int) -> Floats:
    """Returns a view [count, 1, width] with ``values[start + i + j]`` at (i, 0, j)."""
    return np.ndarray((count, 1, width), np.float64, values, start * 8, (8, 0, 8))
