"""The stale engine: how fast ranks compute a global batch when none of them ever waits for another (layer P).

A chunk of n samples costs its rank the work and the transfers to and from the server, which is on rank 0's node. All
messages pass the server's port, which bounds a step from below. What its policy wastes or holds back is added as 3 %:
with the policy itself on simulated time a step of steady devices took 1 to 4 % longer than ranks that never wait.
"""

from __future__ import annotations

import math

from lightning_hetero.cluster.engine_times import OVERHEAD, least_s, never_waiting
from lightning_hetero.plan.estimate import Estimate, impossible
from lightning_hetero.plan.setup import Setup


def stale(setup: Setup) -> Estimate:
    """Returns what `BoundedStalenessStrategy` would take with its default policy, when it has learned the speeds."""
    batch = setup.global_batch
    transfers_s, port_s = _transfers(setup)
    besides_s = [seconds + setup.besides("stale") for seconds in transfers_s]
    chunks = never_waiting(setup.step_costs(), setup.slowness, besides_s)
    computed_s = least_s(chunks, batch)
    step_s = max(OVERHEAD * computed_s, port_s)
    shares = [max(0.0, chunk.most_samples(computed_s)) for chunk in chunks]
    for rank, most in enumerate(setup.most_samples()):
        if most < min(1.0, shares[rank]):
            return impossible("stale", setup.too_small(rank))
        if shares[rank] > most + 0.5:
            return impossible(
                "stale",
                f"{setup.name(rank)} holds {most} samples besides the model, its chunks have about {shares[rank]:.0f}:"
                " the server's policy knows no limits of memory",
            )
    reasons = ["nobody waits for stragglers: updates are computed on parameters that may be a few updates old"]
    if port_s > computed_s:
        reasons.append(
            f"the server's port is the limit: the messages of all ranks take {port_s * 1e3:.1f} ms per update"
        )
    work_s = [c.seconds(n) - s if n > 0.0 else 0.0 for c, s, n in zip(chunks, besides_s, shares, strict=True)]
    scale = batch / math.fsum(shares)
    return Estimate(
        engine="stale", step_s=step_s, bound_s=max(computed_s, port_s),
        work_s=tuple(min(seconds, step_s) for seconds in work_s), shares=tuple(n * scale for n in shares),
        memory_bytes=tuple(map(setup.memory_bytes, shares)), exchange_s=max(transfers_s),
        reasons=tuple(reasons), arguments={"global_batch_size": batch},
    )  # fmt: skip


def _transfers(setup: Setup) -> tuple[list[float], float]:
    """Returns what parameters from the server and gradients to it take, by rank, and how long all messages of an
    update are on the server's links, in the busier direction [s]."""
    if setup.exchange_s is not None:
        return [setup.exchange()] * setup.ranks, 0.0
    size, links = setup.param_bytes(), setup.cluster.links
    ways = [(links[0][rank], links[rank][0]) for rank in range(1, setup.ranks)]
    transfers_s = [0.0, *(there.seconds(size) + back.seconds(size) for there, back in ways)]
    sent_s, received_s = (math.fsum(size / both[way].bandwidth_bytes_per_s for both in ways) for way in (0, 1))
    return transfers_s, max(sent_s, received_s)
