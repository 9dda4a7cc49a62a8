"""The stale engine: how fast ranks compute a global batch when none of them ever waits for another (layer P).

A chunk of n samples costs its rank the work and the transfers to and from the server, which is on rank 0's node. All
messages pass the server's port, which bounds a step from below. What its policy wastes or holds back is added as 3 %:
with the policy itself on simulated time a step of steady devices took 1 to 4 % longer than ranks that never wait.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from lightning_hetero.cluster.score import least_s
from lightning_hetero.plan.estimate import Estimate, impossible
from lightning_hetero.plan.setup import Setup
from lightning_hetero.types import Cost

_OVERHEAD = 1.03  # of a step, over ranks that never wait


def stale(setup: Setup) -> Estimate:
    """Returns what `BoundedStalenessStrategy` would take with its default policy, when it has learned the speeds."""
    batch, ranks = setup.global_batch, setup.ranks
    slowness = [fmean(setup.slowness_at(rank, step) for step in range(setup.series)) for rank in range(ranks)]
    transfers_s, port_s = _transfers(setup)
    chunks = [_Chunk(*both) for both in zip(setup.step_costs(), slowness, transfers_s, strict=True)]
    computed_s = least_s(chunks, batch)
    step_s = max(_OVERHEAD * computed_s, port_s)
    shares = [max(0.0, chunk.most_samples(computed_s)) for chunk in chunks]
    for rank, most in enumerate(setup.most_samples()):
        if most is not None and most < min(1.0, shares[rank]):
            return impossible("stale", setup.too_small(rank))
        if most is not None and shares[rank] > most + 0.5:
            return impossible(
                "stale",
                f"{setup.name(rank)} holds {most} samples beside the model, its chunks have about {shares[rank]:.0f}:"
                " the server's policy knows no limits of memory",
            )
    reasons = ["nobody waits for stragglers: updates are computed on parameters that may be a few updates old"]
    if port_s > computed_s:
        reasons.append(
            f"the server's port is the limit: the messages of all ranks take {port_s * 1e3:.1f} ms per update"
        )
    work_s = [chunk.work_s(n) if n > 0.0 else 0.0 for chunk, n in zip(chunks, shares, strict=True)]
    scale = batch / math.fsum(shares)
    return Estimate(
        engine="stale",
        step_s=step_s,
        bound_s=max(computed_s, port_s),
        work_s=tuple(min(seconds, step_s) for seconds in work_s),
        shares=tuple(n * scale for n in shares),
        memory_bytes=tuple(map(setup.memory_bytes, shares)),
        exchange_s=max(transfers_s),
        reasons=tuple(reasons),
        overrides=("strategy=hetero_stale", f"trainer.devices={ranks}", f"strategy.global_batch_size={batch}"),
    )


class _Chunk:
    """The cost of a rank's chunk: its work, slower by a factor, and its transfers."""

    def __init__(self, cost: Cost, slowness: float, transfer_s: float) -> None:
        self.cost, self.slowness, self.transfer_s = cost, slowness, transfer_s

    def work_s(self, samples: float) -> float:
        return self.cost.seconds(samples) * self.slowness

    def seconds(self, samples: float) -> float:
        return self.work_s(samples) + self.transfer_s

    def most_samples(self, deadline_s: float) -> float:
        return self.cost.most_samples((deadline_s - self.transfer_s) / self.slowness)


def _transfers(setup: Setup) -> tuple[list[float], float]:
    """Returns what parameters from the server and gradients to it take, by rank, and how long all messages of an
    update are on the server's links, in the busier direction [s]."""
    if setup.exchange_s is not None:
        return [setup.exchange()] * setup.ranks, 0.0
    size, links, others = setup.param_bytes(), setup.cluster.links, range(1, setup.ranks)
    transfers_s = [0.0, *(links[0][rank].seconds(size) + links[rank][0].seconds(size) for rank in others)]
    sent_s = _on_the_wire(size, [links[0][rank].bandwidth_bytes_per_s for rank in others])
    received_s = _on_the_wire(size, [links[rank][0].bandwidth_bytes_per_s for rank in others])
    return transfers_s, max(sent_s, received_s)


def _on_the_wire(size_bytes: float, rates: Sequence[float]) -> float:
    return math.fsum(size_bytes / rate for rate in rates)
