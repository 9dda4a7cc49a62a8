"""The best split of a fixed order of devices into contiguous, non-empty stages, as far as profiles can tell.

Minimises the modelled total ``fill + (m - 1) * period`` (`chain.model` states the model). Ours: for a given period the
split of least fill is a shortest path over the layers, stage by stage, and it is computed for a dozen periods at once,
from the least bottleneck upwards; then once more between the periods next to the best one. The depth of a stage, which
decides what fits, is taken from the best split behind it: so the answer is no proof, and
where memory is short borders are moved once more. The mean gap to all splits, and to SciPy's mixed-integer solver, is
below 0.5 % (`tests/pure/solvers`).

Long chains are split twice: at 200 places of about equal work first, then at single layers near the borders found.

Why a chain of devices cannot hold a model, in words.
"""

from __future__ import annotations

import math

import numpy as np

from lightning_hetero.solvers.chain.chain import DeviceChain, Floats, Ints
from lightning_hetero.solvers.chain.model import ChainPlan, evaluate, fitting_periods, periods, room, size, times
from lightning_hetero.types import Status

_MOST_PLACES = 200
_STEPS = np.array([1.0, 1.005, 1.01, 1.02, 1.04, 1.08, 1.15, 1.3, 1.6, 2.0, 4.0])  # periods over the least bottleneck
_BETWEEN = 8  # periods of the second round
_FEW_STAGES = 16  # of more, fewer periods are tried
_POLISHED = 10  # moves of a border
_WIDEST = 4.0  # times the places that its speed is worth: no stage is longer, where there are many
_ROUNDING = 1.0 + 1e-12


def split(chain: DeviceChain) -> ChainPlan:
    """Returns a split of the chain's layers over its devices in the given order, with a layer or more per stage.

    Returns:
        A plan; or infeasible, and why.

    >>> from lightning_hetero.solvers.chain.chain import Layers
    >>> from lightning_hetero.types import Device, Link
    >>> devices = [Device(name="fast", speed=2.0), Device(name="slow")]
    >>> layers = Layers(work_s=[1.0] * 6, cut_bytes=[0.0] * 7)
    >>> links = [Link(), Link()]
    >>> plan = split(DeviceChain(layers=layers, devices=devices, links=links, back=links, micro_batches=8))
    >>> plan.cuts, plan.period_s, plan.fill_s, plan.total_s
    ((0, 4, 6), 2.0, 4.0, 18.0)
    """
    n, stages = len(chain.layers), len(chain)
    cuts: tuple[int, ...] | None = None
    if stages == 1:
        cuts = (0, n)
    elif stages <= n:
        cuts = _at_some_places(chain)
        cuts = _polished(chain, cuts) if cuts and chain.capped else cuts
    plan = evaluate(chain, cuts) if cuts else None
    if plan is None or not plan.ok:
        plan = ChainPlan(cuts=(), status=Status.INFEASIBLE, reason=why_infeasible(chain))
    return plan


def _at_some_places(chain: DeviceChain) -> tuple[int, ...] | None:
    n, most = len(chain.layers), max(_MOST_PLACES, 2 * len(chain))
    if n <= most:
        return _best_at(chain, np.arange(n + 1))
    work = chain.layers.work_to
    even: Ints = np.searchsorted(work, np.linspace(0.0, float(work[n]), most))
    cuts = _best_at(chain, _places(even, n), rounds=1)
    reach = max(2, most // (2 * len(chain)))
    if cuts is not None:
        near = (np.array(cuts)[:, None] + np.arange(-reach, reach + 1)).ravel()
        cuts = _best_at(chain, _places(near, n), near=cuts) or cuts
    return cuts


def _polished(chain: DeviceChain, cuts: tuple[int, ...]) -> tuple[int, ...]:
    """Moves one border at a time while that helps: what fits depends on more than the split behind a stage."""
    best = np.array(cuts)
    moves = np.concatenate([step * np.eye(len(cuts), dtype=np.int64)[1:-1] for step in (1, -1, 2, -2)])
    for _ in range(_POLISHED):
        found = np.vstack([best, best + moves])
        found = found[(np.diff(found, axis=1) > 0).all(axis=1)]
        i = int(np.argmin(_totals(chain, found)))
        if i == 0:
            break
        best = found[i]
    return tuple(best.tolist())


def _totals(chain: DeviceChain, cuts: Ints) -> Floats:
    of = times(chain, cuts)
    period_s = fitting_periods(chain, cuts, of)
    fits = np.isfinite(period_s)
    return np.where(fits, of.fill_s + (chain.micro_batches - 1) * np.where(fits, period_s, 0.0), np.inf)


def _places(some: Ints, n: int) -> Ints:
    return np.unique(np.concatenate([[0, n], some[(some > 0) & (some < n)]]))


def _best_at(
    chain: DeviceChain, places: Ints, *, near: tuple[int, ...] | None = None, rounds: int = 2
) -> tuple[int, ...] | None:
    """Returns the best cuts at these places between layers; None if no split fits.

    Args:
        chain: to be split.
        places: where it may be cut.
        near: cuts that are good already: only periods up to theirs are tried.
        rounds: of periods.
    """
    table = _Table(chain, places)
    least_s = table.least_bottleneck()
    if near is not None:
        cuts, totals, _ = table.best(np.linspace(least_s, max(least_s, evaluate(chain, near).period_s), _BETWEEN))
        return min(zip(totals, cuts, strict=True))[1] if cuts else None
    steps = _STEPS if len(chain) <= _FEW_STAGES else _STEPS[::2]
    asked = np.append(least_s * steps, max(chain.slowest_s, least_s))
    cuts, totals, which = table.best(asked)
    if not cuts:
        return None
    if rounds == 1:
        return min(zip(totals, cuts, strict=True))[1]
    i = which[int(np.argmin(totals))]
    first_s, last_s = float(asked[max(i - 1, 0)]), float(asked[min(i + 1, len(steps) - 1)])
    between: Floats = np.linspace(first_s, last_s, _BETWEEN + 2)[1:-1]
    more, more_totals, _ = table.best(between)
    return min([*zip(totals, cuts, strict=True), *zip(more_totals, more, strict=True)])[1]


class _Table:
    """What a stage takes from any place to any other, and the least fill for given periods.

    Args:
        chain: to be split.
        places: where it may be cut, 0 and the number of layers included.
    """

    def __init__(self, chain: DeviceChain, places: Ints) -> None:
        self._chain, self._places = chain, places
        layers, stages, n = chain.layers, len(chain), len(places)
        widest = math.ceil(_WIDEST * n / stages * float(chain.speeds.max() / chain.speeds.mean())) + 1
        reach = np.arange(n)[:, None] + np.arange(1, min(widest, n - stages) + 1)[None, :]
        self._ends: Ints = np.minimum(reach, n - 1)  # that a stage may have, by start: all but far ones
        work, sizes = layers.work_to[places], layers.cut_sizes[places]
        span = np.where(reach < n, work[self._ends] - work[:, None], np.inf)
        before_s, head_s = chain.leader_s
        self._trips: list[Floats] = []  # round trip behind each stage, by its end
        self._cost: list[Floats] = []  # what each stage adds to the fill, by start and end
        self._busy: list[Floats] = []  # how long it is busy per micro-batch, likewise
        for stage in range(stages):
            ahead, back = chain.crossing_s(stage, sizes)
            trips = (ahead + back)[self._ends]
            compute = span / chain.speeds[stage] + (0.0 if stage else before_s)
            busy: Floats = compute + (0.0 if stage else head_s)
            beside = (0.0, 0.0) if stage else chain.beside_s
            busy = np.maximum(busy, np.maximum(ahead + beside[0], back + beside[1])[self._ends])
            self._trips.append(ahead + back)
            self._cost.append(compute + trips)
            self._busy.append(busy)

    def least_bottleneck(self) -> float:
        """Returns the least bottleneck of any split, memory left out [s]."""
        value = np.append(np.full(len(self._places) - 1, np.inf), 0.0)
        for busy in reversed(self._busy):
            value = np.maximum(busy, value[self._ends]).min(axis=1)
        return float(value[0])

    def best(self, asked_s: Floats) -> tuple[list[tuple[int, ...]], list[float], list[int]]:
        """Returns the splits of least fill at these periods that fit at all, their totals [s], and of which periods."""
        chain, n = self._chain, len(self._places)
        period_s = asked_s[:, None]
        value = np.full((len(asked_s), n), np.inf)
        value[:, -1] = 0.0
        held = np.ones((len(asked_s), n))  # micro-batches in flight behind the place
        chosen: list[Ints] = []
        for stage in reversed(range(len(chain))):
            fits = self._busy[stage][None] <= period_s[:, :, None] * _ROUNDING
            fill = np.where(fits, self._cost[stage][None], np.inf) + value[:, self._ends]
            depth = self._depth(stage, held, period_s, fill)
            if chain.capped:
                fill = np.where(np.minimum(depth, chain.micro_batches) <= self._room(stage)[None], fill, np.inf)
            end = fill.argmin(axis=2)[:, :, None]
            value = np.take_along_axis(fill, end, axis=2)[:, :, 0]
            held = np.take_along_axis(np.broadcast_to(depth, fill.shape), end, axis=2)[:, :, 0]
            chosen.append(np.minimum(np.arange(n)[None, :] + 1 + end[:, :, 0], n - 1))
        rows = np.flatnonzero(np.isfinite(value[:, 0]))
        if not rows.size:
            return [], [], []
        cuts = [np.zeros(len(rows), dtype=np.int64)]
        for end in reversed(chosen):
            cuts.append(end[rows, cuts[-1]])
        found, first = np.unique(self._places[np.stack(cuts, axis=1)], axis=0, return_index=True)
        totals = _totals(chain, found)
        kept = np.flatnonzero(np.isfinite(totals))
        return [tuple(found[i].tolist()) for i in kept], totals[kept].tolist(), rows[first[kept]].tolist()

    def _depth(self, stage: int, held: Floats, period_s: Floats, fill: Floats) -> Floats:
        """Returns how many micro-batches the stage holds, by period, start and end."""
        chain = self._chain
        depth = (held + 1.0 + periods(self._trips[stage][None], period_s))[:, self._ends]
        if chain.depth == "low_memory":
            with np.errstate(invalid="ignore"):
                rest = np.where(np.isfinite(fill), fill + chain.leader_s[1], 0.0)
            depth = np.minimum(depth, np.maximum(1.0 + periods(rest, period_s[:, :, None]), 2.0))
        return depth

    def _room(self, stage: int) -> Floats:
        """Returns how many micro-batches in flight fit, by start and end."""
        layers, places = self._chain.layers, self._places
        state = layers.state_to[places][self._ends] - layers.state_to[places][:, None]
        each = layers.activation_to[places][self._ends] - layers.kept_to[places][:, None]
        if stage == 0:
            state, each = state + layers.leader_state_bytes, each + layers.leader_activation_bytes
        return room(state, each, self._chain.mem_bytes[stage])


def why_infeasible(chain: DeviceChain) -> str:
    """Names the constraint that no split of this order can meet, with numbers, and what would help.

    Meant for chains that `split` found infeasible: checked in turn are stages, leader, single layers, the sum, order.
    """
    layers, s, n = chain.layers, len(chain), len(chain.layers)
    if s > n:
        gone = "1 device" if s == n + 1 else f"{s - n} devices"
        return f"{s} devices for {n} layers: every stage needs a layer; leave out {gone}"
    held = _least_depths(chain)
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
    hint = _remedies(chain, 0.0, total)
    return f"no split into {s} contiguous, non-empty stages fits the devices in this order; another order, or {hint}"


def _remedies(chain: DeviceChain, state_bytes: float, need_bytes: float, device: str = "another device") -> str:
    """Activations can be made fewer; state cannot."""
    ways: list[str] = []
    if need_bytes > state_bytes:
        ways += ["a smaller micro-batch", "gradient checkpointing"]
        if chain.depth == "per_link" and float(_least_trips(chain).max()) > 0.0:
            ways.append("fewer in flight (depth='low_memory')")
    return "what helps: " + ", ".join([*ways, device])


def _least_trips(chain: DeviceChain) -> Floats:
    """Returns the least round trip of each link, whatever the cuts; the loop's last [s]."""
    sizes = np.full(len(chain), chain.layers.cut_range_bytes[0])
    sizes[-1] = chain.layers.cut_sizes[-1]
    ahead, back = chain.crossing_s(slice(None), sizes)
    return ahead + back


def _least_depths(chain: DeviceChain) -> Floats:
    """Returns how many micro-batches each stage holds at least, whatever the cuts and however slow the pace."""
    s = len(chain)
    if s == 1:
        return np.ones(1)
    held = np.arange(s + 1.0, 1.0, -1.0)
    if chain.depth == "per_link":
        held += np.cumsum(periods(_least_trips(chain), np.array(chain.slowest_s))[::-1])[::-1]
    return np.minimum(held, chain.micro_batches)
