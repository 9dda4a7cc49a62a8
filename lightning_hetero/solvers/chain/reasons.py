"""Why a chain of devices cannot hold a model, in words."""

from __future__ import annotations

import numpy as np

from lightning_hetero.solvers.chain.chain import DeviceChain
from lightning_hetero.solvers.chain.layers import Floats
from lightning_hetero.solvers.chain.model import periods, size


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
