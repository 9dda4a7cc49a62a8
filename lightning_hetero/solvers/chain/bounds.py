"""Lower bounds for pipelines in a given order, and why one does not fit.

`relaxed_bound` allows empty stages. Then the furthest end of a stage dominates: what can be reached from a cut further
left can be reached from it, or is behind it and matched by an empty stage. So a walk that takes the furthest end each
time decides exactly whether a period suffices *for the relaxation*, it is monotone in the period, and a bisection over
it bounds every real split from below. With non-empty stages the same walk is wrong: taking less may be necessary.
Without overlap the time of a stage depends on both its cuts, and so does its memory, as a stage keeps its input: the
walk then takes the best of all starts up to the furthest as reachable, which is still a bound.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import numpy as np

from lightning_hetero.solvers.chain.chain import Chain
from lightning_hetero.solvers.chain.layers import Floats
from lightning_hetero.solvers.chain.model import periods, size

__all__ = ["Bounds", "bounds", "relaxed_bound", "walk_back", "walk_on", "why_infeasible"]

# Walks only ever rule out: they are lenient by more than the rounding of their sums.
_LENIENT = 1.0 + 1e-9
_MOST_THRESHOLDS = 64


class Walk:
    """Plain lists of what walks ask for again and again, and the least depths at a period."""

    def __init__(self, chain: Chain) -> None:
        layers = chain.layers
        self.chain = chain
        self.work, self.state, self.activation, self.kept, self.cut = layers.lists
        self.speeds: list[float] = chain.speeds.tolist()
        self.caps: list[float] = chain.mem_bytes.tolist()
        wires: Floats = np.transpose(chain.wires)
        self.wires: list[list[float]] = wires.tolist()
        if chain.overlap:
            self.wires[0][0] += chain.beside_s[0]
            self.wires[0][2] += chain.beside_s[1]
        self.lead_s = sum(chain.leader_s)
        sizes = np.full(len(chain), layers.cut_range_bytes[0])
        sizes[-1] = layers.cut_sizes[-1]
        ahead, back = chain.crossing_s(slice(None), sizes)
        self.least_trips = ahead + back
        self.loop_s = max(float(ahead[-1]), float(back[-1])) if chain.overlap else float(self.least_trips[-1])
        # Without overlap, what the links add to a stage: exactly by cut, and at least.
        self._trips = [(c + d, 1.0 / x + 1.0 / y) for c, x, d, y in self.wires]
        trips: list[float] = self.least_trips.tolist()
        self.in_front_s = [0.0] * len(chain) if chain.overlap else [trips[i - 1] for i in range(len(chain))]
        self.behind_s = [0.0] * len(chain) if chain.overlap else trips
        self.slack = 1e-12 * self.work[-1]

    def trip_s(self, position: int, cut: int) -> float:
        """Returns the round trip over the link behind a position [s]; -1 is the loop, at whatever cut."""
        latency_s, per_byte_s = self._trips[position]
        return latency_s + self.cut[cut if position >= 0 else -1] * per_byte_s

    def too_slow(self, position: int, cut: int, limit_s: float) -> bool:
        """Whether a direction of the link behind a position takes longer."""
        ahead_s, ahead, back_s, back = self.wires[position]
        size_bytes = self.cut[cut]
        return ahead_s + size_bytes / ahead > limit_s or back_s + size_bytes / back > limit_s

    def start_work(self, position: int, cut: int) -> float:
        """Returns the work in front of a stage, less what it could do while its link in front is busy.

        Overlap: as at ``cut``. Else the most of any start up to ``cut``: all of them may be reachable.
        """
        work, speed, best, a = self.work, self.speeds[position], -math.inf, cut
        if self.chain.overlap:
            return work[cut]
        while a >= 0 and work[a] - speed * self.in_front_s[position] > best:
            best = max(best, work[a] - speed * self.trip_s(position - 1, a))
            a -= 1
        return best

    def end_work(self, position: int, cut: int) -> float:
        """Returns likewise the work up to a stage's end, and what it could do while its link behind is busy."""
        work, speed, best, b = self.work, self.speeds[position], math.inf, cut
        if self.chain.overlap:
            return work[cut]
        while b < len(work) and work[b] + speed * self.behind_s[position] < best:
            best = min(best, work[b] + speed * self.trip_s(position, b))
            b += 1
        return best

    def least_depths(self, period_s: float) -> list[int]:
        """Returns how many micro-batches each stage holds at least, whatever the cuts."""
        return least_depths(self.chain, self.least_trips, period_s).tolist()

    def last_fitting(self, position: int, start: int, end: int, depth: int) -> int:
        """Returns the last b <= ``end`` where a stage may end that starts at ``start`` or before; ``start`` if none."""
        state, activation, cap = self.state, self.activation, self.caps[position] * _LENIENT
        if position == 0:
            layers = self.chain.layers
            cap -= layers.leader_state_bytes + depth * layers.leader_activation_bytes
        cap += self._most_in_front(start, depth)
        if state[end] + depth * activation[end] <= cap:
            return end
        found = bisect_right(range(end), cap, lo=start, key=lambda b: state[b] + depth * activation[b])
        return max(start, found - 1)

    def first_fitting(self, position: int, start: int, end: int, depth: int) -> int:
        """Returns the first a >= ``start`` for which the layers [a, end) fit, ``end`` if none."""
        state, kept, cap = self.state, self.kept, self.caps[position] * _LENIENT
        least = state[end] + depth * self.activation[end] - cap
        if position == 0:
            layers = self.chain.layers
            least += layers.leader_state_bytes + depth * layers.leader_activation_bytes
        if state[start] + depth * kept[start] >= least:
            return start
        # With the least input of all, what is in front rises with the cut.
        front, least_input = self.activation, depth * self.chain.layers.cut_range_bytes[0]
        a = bisect_left(range(end), least + least_input, lo=start + 1, key=lambda a: state[a] + depth * front[a])
        while a < end and state[a] + depth * kept[a] < least:
            a += 1
        return a

    def _most_in_front(self, cut: int, depth: int) -> float:
        """Returns the most state and activations in front of any start up to ``cut``, less the input it keeps."""
        state, activation, kept, a = self.state, self.activation, self.kept, cut
        least_input, best = depth * self.chain.layers.cut_range_bytes[0], 0.0
        while a > 0 and state[a] + depth * activation[a] - least_input > best:
            best = max(best, state[a] + depth * kept[a])
            a -= 1
        return best


def least_depths(chain: Chain, least_trips: Floats, period_s: float) -> Floats:
    """Returns a lower bound of the depths for any cuts, given the least round trip of each link."""
    s, most = len(chain), chain.micro_batches
    if s == 1:
        return np.ones(1)
    held = np.arange(s + 1.0, 1.0, -1.0)
    if chain.overlap and chain.depth == "per_link":
        held += np.cumsum(periods(least_trips, np.array(period_s))[::-1])[::-1]
    return np.minimum(held, most)


def walk_on(walk: Walk, period_s: float) -> list[int]:
    """Returns the furthest end of each stage [S + 1], from 0, where stages may be empty.

    Short of L at the end: no split has this period.
    """
    work, chain, last = walk.work, walk.chain, len(walk.speeds) - 1
    held = walk.least_depths(period_s) if chain.capped else []
    limit_s = period_s * _LENIENT
    a, ends = 0, [0]
    for i, speed in enumerate(walk.speeds):
        left_s = limit_s - (walk.lead_s if i == 0 else 0.0)
        reach = walk.start_work(i, a) + left_s * speed + walk.slack
        b = bisect_right(work, reach - speed * walk.behind_s[i]) - 1
        if b > a and chain.capped and walk.caps[i] < math.inf:
            b = walk.last_fitting(i, a, b, held[i])
        if i < last and chain.overlap:
            while b > a and walk.too_slow(i, b, limit_s):
                b -= 1
        elif i < last:
            while b > a and work[b] + speed * walk.trip_s(i, b) > reach:
                b -= 1
        a = max(a, b)
        ends.append(a)
    return ends


def walk_back(walk: Walk, period_s: float) -> list[int]:
    """Returns the furthest start of each stage from the right [S + 1], up to L, where stages may be empty."""
    work, chain = walk.work, walk.chain
    held = walk.least_depths(period_s) if chain.capped else []
    limit_s = period_s * _LENIENT
    b = len(work) - 1
    starts = [b]
    for i in range(len(walk.speeds) - 1, -1, -1):
        speed, left_s = walk.speeds[i], limit_s - (walk.lead_s if i == 0 else 0.0)
        reach = walk.end_work(i, b) - left_s * speed - walk.slack
        a = bisect_left(work, reach + speed * walk.in_front_s[i])
        if a < b and chain.capped and walk.caps[i] < math.inf:
            a = walk.first_fitting(i, a, b, held[i])
        if i > 0 and chain.overlap:
            while a < b and walk.too_slow(i - 1, a, limit_s):
                a += 1
        elif i > 0:
            while a < b and work[a] - speed * walk.trip_s(i - 1, a) < reach:
                a += 1
        b = min(a, b)
        starts.append(b)
    return starts[::-1]


def _reaches(walk: Walk, period_s: float) -> bool:
    """Returns False if no split of this order has a period of at most ``period_s`` [s]; True decides nothing."""
    if period_s * _LENIENT < max(walk.loop_s, walk.lead_s):
        return False
    return walk_on(walk, period_s)[-1] == len(walk.work) - 1


def relaxed_bound(chain: Chain, *, tolerance: float = 1e-6, walk: Walk | None = None) -> float:
    """Returns a period that no split of this order is below [s], ``inf`` if memory admits no split.

    The optimum with empty stages allowed and the fewest micro-batches in flight, to a relative ``tolerance``.
    O(S log L log(1 / tolerance)).
    """
    walk = walk or Walk(chain)
    low_s = max(_work_bound(chain), walk.loop_s, walk.lead_s)
    if _reaches(walk, low_s):
        return low_s
    step, most_s = 1e-4, chain.slowest_s
    enough_s = low_s
    while not _reaches(walk, enough_s := min(max(low_s, enough_s * (1.0 + step)), most_s)):
        if enough_s == most_s:
            return math.inf
        low_s, step = enough_s, 4.0 * step
    while enough_s - low_s > tolerance * low_s:
        middle_s = 0.5 * (low_s + enough_s)
        if not low_s < middle_s < enough_s:
            break
        if _reaches(walk, middle_s):
            enough_s = middle_s
        else:
            low_s = middle_s
    return low_s


def _work_bound(chain: Chain) -> float:
    layers = chain.layers
    work = layers.lists[0][-1] + layers.before_s + layers.head_s
    return work / float(chain.speeds.sum())


# ---- bounds to print ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """What no period is below, each for a reason of its own [s].

    Attributes:
        work_s: all work over all speeds.
        layer_s: the biggest layer on the fastest device.
        crowd_s: pigeonhole: n layers of at least x each need n places, and a device has floor(speed * period / x).
        memory_s: like ``work_s``, but no device does more than the most work of neighbouring layers that fits it.
        relaxed_s: the best split with empty stages allowed, links and memory counted.
    """

    work_s: float
    layer_s: float
    crowd_s: float
    memory_s: float
    relaxed_s: float

    @property
    def best_s(self) -> float:
        return max(self.work_s, self.layer_s, self.crowd_s, self.memory_s, self.relaxed_s)


def bounds(chain: Chain) -> Bounds:
    """Returns lower bounds of the period. All but ``relaxed_s`` hold for any order behind the same leader."""
    work = chain.layers.work_to[: len(chain.layers) + 1]
    return Bounds(
        work_s=_work_bound(chain),
        layer_s=float(np.diff(work).max() / chain.speeds.max()),
        crowd_s=_crowd_bound(np.diff(work), chain.speeds),
        memory_s=_memory_bound(chain, work),
        relaxed_s=relaxed_bound(chain),
    )


def _crowd_bound(work: Floats, speeds: Floats) -> float:
    sizes = np.sort(work[work > 0.0])[::-1]
    best_s = 0.0
    for k in np.unique(np.linspace(0, len(sizes) - 1, _MOST_THRESHOLDS).astype(int)) if len(sizes) else ():
        per_place_s = float(sizes[k]) / speeds  # one such layer on each device
        n = int(k) + 1
        low_s, enough_s = 0.0, float(per_place_s.min()) * n
        while enough_s - low_s > 1e-9 * enough_s:
            middle_s = 0.5 * (low_s + enough_s)
            if float(np.floor(middle_s / per_place_s).sum()) >= n:
                enough_s = middle_s
            else:
                low_s = middle_s
        best_s = max(best_s, low_s)
    return best_s


def _memory_bound(chain: Chain, work: Floats) -> float:
    """The least P with sum of min(P * speed_s, most_s) >= work, most_s the most work of neighbours that fits s."""
    total = float(work[-1]) + chain.layers.before_s + chain.layers.head_s
    most = _most_work(chain, work)
    if float(most.sum()) * (1.0 + 1e-9) < total:
        return math.inf
    order = np.argsort(most / chain.speeds)
    full_at = (most / chain.speeds)[order]
    held = np.concatenate([[0.0], np.cumsum(most[order])])  # by the devices that are full
    free = np.concatenate([np.cumsum(chain.speeds[order][::-1])[::-1], [0.0]])
    done = held[:-1] + full_at * free[:-1]  # all work that fits until the i-th device is full
    i = int(np.searchsorted(done, total * (1.0 - 1e-12)))
    return float((total - held[i]) / free[i]) if i < len(full_at) else float(full_at[-1])


def _most_work(chain: Chain, work: Floats) -> Floats:
    """Returns the most work that a device can hold, given the fewest micro-batches in flight of any place [S]."""
    layers, n = chain.layers, len(chain.layers) + 1
    extra = np.zeros(len(chain))
    extra[0] = layers.before_s + layers.head_s
    least = int(least_depths(chain, Walk(chain).least_trips, chain.slowest_s)[-1])
    fixed: list[float] = (layers.state_to[:n] + least * layers.activation_to[:n]).tolist()
    starts: list[float] = (layers.state_to[:n] + least * layers.kept_to[:n]).tolist()
    most: dict[float, float] = {math.inf: float(work[-1])}
    for cap in set(chain.mem_bytes.tolist()) - {math.inf}:
        ends = [bisect_right(fixed, w + cap * _LENIENT) - 1 for w in starts]
        most[cap] = max(0.0, float((work[ends] - work).max()))
    return np.array([most[cap] for cap in chain.mem_bytes.tolist()]) + extra


# ---- why not --------------------------------------------------------------------------------------------------------


def why_infeasible(chain: Chain) -> str:
    """Names the constraint that no split of this order can meet, with numbers, and what would help.

    Meant for chains that `split` found infeasible: checked in turn are stages, leader, single layers, the sum, order.
    """
    layers, s, n = chain.layers, len(chain), len(chain.layers)
    if s > n:
        gone = "1 device" if s == n + 1 else f"{s - n} devices"
        return f"{s} devices for {n} layers: every stage needs a layer; leave out {gone}"
    walk = Walk(chain)
    held = np.array(walk.least_depths(chain.slowest_s))
    lead = np.zeros(s)
    lead[0] = layers.leader_state_bytes + held[0] * layers.leader_activation_bytes
    spare = chain.mem_bytes - lead
    if spare[0] < 0.0:
        need, cap = size(float(lead[0])), size(chain.devices[0].mem_bytes)
        hint = _remedies(chain, layers.leader_state_bytes, float(lead[0]))
        what = f"the code before the backbone and the head need {need} on the leader"
        return f"{what}, against {cap} of {chain.devices[0].name!r}; {hint}"
    # A stage with this layer in it may start further in front, where its input is smaller.
    state, kept = layers.state_to[: n + 1, None], layers.kept_to[: n + 1, None]
    in_front = np.maximum.accumulate(state + kept * held, axis=0)[:-1]
    needs: Floats = state[1:] + layers.activation_to[1 : n + 1, None] * held - in_front
    missing = (needs - spare).min(axis=1)
    misfit = int(np.argmax(missing))
    if missing[misfit] > 0.0:
        i = int(np.argmin(needs[misfit] - spare))
        need, fixed = float(needs[misfit, i]), float(state[misfit + 1, 0] - state[misfit, 0])
        most = f"against {size(max(0.0, float(spare[i])))} at most, on {chain.devices[i].name!r}"
        hint = _remedies(chain, fixed, need, "a device with more memory")
        return f"{layers.name(misfit)} fits no device: {size(need)} {most}; {hint}"
    inputs = (s - 1) * layers.cut_range_bytes[0]
    total = float(state[-1, 0]) + float(held[-1]) * (float(layers.activation_to[n]) + inputs) + float(lead[0])
    caps = float(chain.mem_bytes.sum())
    if total > caps:
        fixed = float(state[-1, 0]) + layers.leader_state_bytes
        hint = _remedies(chain, fixed, total)
        return f"the layers need {size(total)} at least, all devices have {size(caps)} together; {hint}"
    reached = walk_on(walk, chain.slowest_s)
    hint = _remedies(chain, 0.0, total)
    if reached[-1] < n:
        spans = zip(itertools.pairwise(reached), chain.devices, strict=True)
        full = [f"layers [{a}, {b}) on {device.name!r}" for (a, b), device in spans if a < b]
        held = ", ".join(full[:3] + ["..."] * (len(full) > 3)) or "none on any"
        return (
            f"only {reached[-1]} of {n} layers fit the devices in this order, filled up one after the other"
            f" ({held}); another order, or {hint}"
        )
    return f"no split into {s} contiguous, non-empty stages fits the devices in this order; another order, or {hint}"


def _remedies(chain: Chain, state_bytes: float, need_bytes: float, device: str = "another device") -> str:
    """Activations can be made fewer; state cannot."""
    ways: list[str] = []
    if need_bytes > state_bytes:
        ways += ["a smaller micro-batch", "gradient checkpointing"]
        if chain.depth == "per_link" and chain.overlap and float(Walk(chain).least_trips.max()) > 0.0:
            ways.append("fewer in flight (depth='low_memory')")
    return "what helps: " + ", ".join([*ways, device])
