"""Random pipelines, and the model once more in plain Python, term by term as it is written down."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hypothesis import strategies as st

from lightning_hetero.solvers.chain.chain import DeviceChain, Layers
from lightning_hetero.types import Device, Link

# Whole numbers make ties and exact fits, and zeros; others what is not exactly representable.
TIMES = [0.0, 1.0, 1.0, 2.0, 3.0, 0.1, 0.3, 1.7]
BYTES = [0.0, 1.0, 2.0, 3.0, 5.0]
SPEEDS = [1.0, 1.0, 2.0, 0.5, 3.0]
CAPS = [0.6, 0.8, 1.0, 1.2, 1.5, 2.0, 1e9]
BANDWIDTHS = [0.5, 0.7, 1.0, 2.0, 3.0, 8.0, math.inf]
LATENCIES = [0.0, 0.0, 0.5, 0.1]


@st.composite
def chains(
    draw: st.DrawFn, *, link: str = "any", capped: bool = False, depth: str = "per_link", most: int = 4
) -> DeviceChain:
    """Up to ``most`` devices and 8 layers; ``link``: ``any`` or ``free``.

    Hypothesis draws the size and a seed for the numbers: one draw per number would take longer than the tests.
    """
    s = draw(st.sampled_from([1, *range(2, most + 1), *range(2, most + 1), *range(2, most + 1)]))
    n = draw(st.integers(s, 8))
    micro_batches = draw(st.sampled_from([32, 8, 4, 2, 1]))
    rng = random.Random(draw(st.integers(0, 2**32)))

    def wire() -> Link:
        latency_s, bandwidth = rng.choice(LATENCIES), rng.choice(BANDWIDTHS)
        return Link() if link == "free" else Link(latency_s=latency_s, bandwidth_bytes_per_s=bandwidth)

    layers = Layers(
        work_s=rng.choices(TIMES, k=n),
        cut_bytes=rng.choices(BYTES, k=n + 1),
        before_s=rng.choice(TIMES),
        head_s=rng.choice(TIMES),
        state_bytes=rng.choices(BYTES, k=n),
        activation_bytes=rng.choices(BYTES, k=n),
        leader_state_bytes=rng.choice(BYTES),
        leader_activation_bytes=rng.choice([0.0, 1.0]),
    )
    caps = [math.inf] * s
    if capped:  # around what is needed, or none
        need = sum(layers.state_bytes) + 4.0 * sum(layers.activation_bytes) + 2.0
        caps = [float(math.ceil(need * x / s)) for x in rng.choices(CAPS, k=s)]
    limits = enumerate(zip(rng.choices(SPEEDS, k=s), caps, strict=True))
    return DeviceChain(
        layers=layers,
        devices=[Device(name=f"d{i}", speed=speed, mem_bytes=cap) for i, (speed, cap) in limits],
        links=[wire() for _ in range(s)],
        back=[wire() for _ in range(s)],
        micro_batches=micro_batches,
        depth="low_memory" if depth == "low_memory" else "per_link",
    )


def all_cuts(chain: DeviceChain) -> Iterator[tuple[int, ...]]:
    n = len(chain.layers)
    for inner in itertools.combinations(range(1, n), len(chain) - 1):
        yield (0, *inner, n)


class Naive(NamedTuple):
    bottleneck_s: float
    period_s: float
    fill_s: float
    total_s: float
    depths: tuple[int, ...]
    memory_bytes: tuple[float, ...]


def naive(chain: DeviceChain, cuts: Sequence[int]) -> Naive | None:
    """The model of one split; None if it does not fit at any pace."""
    layers, devices, s = chain.layers, chain.devices, len(chain)
    speeds = [d.speed for d in devices]
    stage = [sum(layers.work_s[a:b]) / f for a, b, f in zip(cuts[:-1], cuts[1:], speeds, strict=True)]
    before, head = layers.before_s / speeds[0], layers.head_s / speeds[0]
    size = [layers.cut_bytes[b] for b in cuts[1:]]
    ahead = [link.seconds(size[i]) for i, link in enumerate(chain.links)]
    back = [link.seconds(size[i]) for i, link in enumerate(chain.back)]
    if s == 1:
        ahead, back = [0.0], [0.0]
    trip = [a + b for a, b in zip(ahead, back, strict=True)]
    busy = [t + (before + head if i == 0 else 0.0) for i, t in enumerate(stage)]
    wires = ahead + back
    if s == 2:  # the loop back goes the way of the activations, the loop that of the gradients
        wires += [ahead[0] + back[1], back[0] + ahead[1]]
    bottleneck = max(busy + wires)
    fill = sum(stage) + before + head + sum(trip)
    rest = [sum(stage[i:]) + sum(trip[i:]) + head + (before if i == 0 else 0.0) for i in range(s)]
    state = [sum(layers.state_bytes[a:b]) for a, b in itertools.pairwise(cuts)]
    kept = [sum(layers.activation_bytes[a:b]) for a, b in itertools.pairwise(cuts)]
    state[0] += layers.leader_state_bytes
    kept[0] += layers.leader_activation_bytes
    for i in range(1, s):
        kept[i] += layers.cut_bytes[cuts[i]]

    def depths(period: float) -> list[int]:
        if s == 1:
            return [1]
        held = [0] * s
        by_links = by_rest = 1
        for i in reversed(range(s)):
            by_links += 1 + ceil(trip[i], period)
            by_rest = max(ceil(rest[i], period) + 1, by_rest + 1)
            held[i] = min(by_links, by_rest) if chain.depth == "low_memory" else by_links
        return [min(h, chain.micro_batches) for h in held]

    def memory(period: float) -> list[float]:
        return [a + h * b for a, h, b in zip(state, depths(period), kept, strict=True)]

    def fits(period: float) -> bool:
        return all(need <= d.mem_bytes * (1 + 1e-12) for need, d in zip(memory(period), devices, strict=True))

    # Depths only change where a round trip takes a whole number of periods.
    paces = {t / k for t in trip + rest for k in range(1, chain.micro_batches + 3)}
    for period in [bottleneck, *sorted(p for p in paces if p > bottleneck)]:
        if fits(period):
            total = fill + (chain.micro_batches - 1) * period
            return Naive(bottleneck, period, fill, total, tuple(depths(period)), tuple(memory(period)))
    return None


def ceil(span: float, period: float) -> int:
    return math.ceil(span / period * (1 - 1e-9)) if span > 0.0 else 0
