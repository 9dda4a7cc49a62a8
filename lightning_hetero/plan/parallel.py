"""Stock DDP, and the engines that balance: their own policy decides on exact times until shares stay (layer P).

    step = slowest rank's work + exchange of the gradients
    sharded: + gathers, before each layer in forward and backward, and scatters of gradients, as far as work hides none

A balanced rank that holds less than its share computes it in pieces, each of which pays the step's fixed part. For
times that differ from step to step see `lightning_hetero.cluster.engine_times`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning_hetero.cluster.engine_times import in_pieces_s, settled, shared_s, slowest_s
from lightning_hetero.cluster.units import bytes_text
from lightning_hetero.plan.estimate import EngineName, Estimate, impossible
from lightning_hetero.plan.setup import Setup, whole_step
from lightning_hetero.solvers import minimax

_NOTABLE = 0.05  # part of a step that is worth a sentence


def ddp(setup: Setup) -> Estimate:
    """Returns what `DDPStrategy` would take: equal shares, all ranks wait for the slowest."""
    costs, ranks = setup.step_costs(), setup.ranks
    share = -(-setup.global_batch // ranks)
    tight = [(most, rank) for rank, most in enumerate(setup.most_samples()) if share > most]
    if tight:
        most, rank = min(tight)
        return impossible("ddp", _too_large(setup, rank, share, most))
    work_s = tuple(cost.seconds(share) for cost in costs)
    slowest, last_s, most_s = work_s.index(max(work_s)), slowest_s(work_s, setup.slowness), max(work_s)
    waited = 1.0 - math.fsum(work_s) / (ranks * most_s) if most_s > 0.0 else 0.0
    if waited > _NOTABLE:
        reason = (
            f"{setup.name(slowest)} works {most_s * 1e3:.1f} ms on its {share} samples, the fastest"
            f" {min(work_s) * 1e3:.1f} ms: {100.0 * waited:.0f} % of all device-seconds of work time are waiting"
        )
    elif last_s > (1.0 + _NOTABLE) * most_s:
        reason = (
            f"the devices are equally fast on the whole, and in each step another is late: the last one takes"
            f" {last_s * 1e3:.1f} ms, a device usually {most_s * 1e3:.1f} ms"
        )
    else:
        reason = "the devices are equally fast: nothing waits that another division would put to work"
    rest_s = setup.exchange() + setup.besides("ddp")
    uneven = f"{setup.global_batch} samples are no multiple of {ranks} devices: a step has {share * ranks}"
    return Estimate(
        engine="ddp", step_s=last_s + rest_s, bound_s=last_s + rest_s, work_s=work_s,
        shares=(float(share),) * ranks, memory_bytes=(setup.memory_bytes(share),) * ranks,
        exchange_s=setup.exchange(), reasons=(reason, uneven) if setup.global_batch % ranks else (reason,),
        batch_size=share,
    )  # fmt: skip


def balanced(setup: Setup) -> Estimate:
    """Returns what `LoadBalancedStrategy` would take when its shares have settled."""
    caps = setup.most_samples()
    if min(caps) < 1:
        return impossible("balanced", setup.too_small(caps.index(min(caps))))
    return _balanced(setup, "balanced", caps)


def sharded(setup: Setup) -> Estimate:
    """Returns what `ShardedBalancedStrategy` would take, with the layers as blocks."""
    caps = setup.most_samples(sharded=True)
    if setup.model is None or min(caps) < 1:
        rank, need = caps.index(min(caps)), setup.memory_bytes(1, sharded=True)
        least = f"a shard, the gathered layers and one sample take {bytes_text(need)}"
        return impossible("sharded", f"{setup.name(rank)} is too small: {least}")
    found = _balanced(setup, "sharded", caps)
    if not found.ok:
        return found
    pieces = max(math.ceil(n / most) for n, most in zip(found.shares, caps, strict=True))
    step, gather_s = whole_step(setup.model), pieces * setup.exchange() / 2.0  # an exchange is a scatter and a gather
    forward = math.fsum(p.forward.seconds(setup.global_batch) for p in setup.model.parts)
    forward_s = max(found.work_s) * forward / (step.seconds(setup.global_batch) or 1.0)
    hidden_s = min(gather_s, forward_s) + min(2.0 * gather_s, max(found.work_s) - forward_s)
    ends_s = 2.0 * gather_s / len(setup.model.layers)  # the first gather and the last scatter
    shown_s = max(3.0 * gather_s - hidden_s, min(ends_s, 3.0 * gather_s))
    told = f"no device holds the whole model: each keeps 1/{setup.ranks} of its state and gathers layers when needed"
    return replace(
        found, step_s=found.step_s - found.exchange_s + shown_s, bound_s=found.bound_s - found.exchange_s,
        exchange_s=shown_s, reasons=(told, *found.reasons), arguments={**found.arguments, "shard": "auto"},
        memory_bytes=tuple(setup.memory_bytes(n, sharded=True) for n in map(min, found.shares, caps)),
    )  # fmt: skip


def _balanced(setup: Setup, engine: EngineName, caps: Sequence[int]) -> Estimate:
    costs, batch, exchange_s = setup.step_costs(), setup.global_batch, setup.exchange()
    try:
        policy, steps = settled(costs, batch, caps, setup.min_samples)
    except ValueError as error:  # e.g. fewer samples than devices
        return impossible(engine, str(error))
    shares = policy.shares
    work_s = tuple(map(in_pieces_s, costs, shares, caps))
    reasons = [_said(setup, work_s, shares, steps)]
    arguments: dict[str, Any] = {"global_batch_size": batch}
    if setup.min_samples is not None:
        arguments["min_samples"] = setup.min_samples
    pieced = [rank for rank, (n, most) in enumerate(zip(shares, caps, strict=True)) if n > most]
    full = [rank for rank, (n, most) in enumerate(zip(shares, caps, strict=True)) if n == most < batch]
    if pieced:
        names = ", ".join(map(setup.name, pieced))
        reasons.append(f"together the devices hold less than the batch: {names} compute their shares in pieces")
    elif full:
        reasons.append(f"memory limits the share of {', '.join(map(setup.name, full))}")
    if not pieced and min(caps) < batch:
        arguments["max_samples"] = list(caps)
    free = minimax(costs, batch, upper=caps)
    if not pieced and free.ok and max(work_s) > (1.0 + _NOTABLE) * free.makespan_s:
        reasons.append(
            f"the bounds of shares (by default a quarter to four times the equal one) hold it up: without them the work"
            f" would take {free.makespan_s * 1e3:.1f} ms; plan with min_samples={min(free.shares)}"
        )
    step_s = shared_s(policy, costs, setup.slowness) if setup.series > 1 else max(work_s)
    rest_s = exchange_s + setup.besides("balanced")
    return Estimate(
        engine=engine, step_s=step_s + rest_s, bound_s=minimax(costs, batch).lower_bound_s + rest_s, work_s=work_s,
        shares=tuple(map(float, shares)), memory_bytes=tuple(map(setup.memory_bytes, map(min, shares, caps))),
        exchange_s=exchange_s, reasons=tuple(reasons), arguments=arguments,
    )  # fmt: skip


def _said(setup: Setup, work_s: Sequence[float], shares: Sequence[int], steps: int) -> str:
    if not steps:
        return "shares stay equal: no other division is faster by more than the engine leaves equal shares for"
    ends = f"{min(work_s) * 1e3:.1f} to {max(work_s) * 1e3:.1f} ms"
    shown = "/".join(map(str, shares)) if setup.ranks <= 16 else f"{min(shares)} to {max(shares)}"
    return f"shares {shown} let all devices end together ({ends} of work), {steps} steps after the start"


def _too_large(setup: Setup, rank: int, share: int, most: int) -> str:
    if most < 1:
        return setup.too_small(rank)
    parts = math.ceil(share / most)
    return (
        f"{setup.name(rank)} holds {most} samples besides the model, its equal share is {share}:"
        f" batch_size={-(-share // parts)} with accumulate_grad_batches={parts} would fit"
    )
