"""Stock DDP, and the balanced engine: its own policy decides on exact times until its shares stay (layer P).

    step = slowest rank's work + exchange of the gradients

A balanced rank that holds less than its share computes it in pieces, each of which pays the step's fixed part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_hetero.cluster.units import bytes_text
from lightning_hetero.plan.estimate import Estimate, impossible
from lightning_hetero.plan.setup import Setup
from lightning_hetero.plan.unsteady import followed_s, slowest_s
from lightning_hetero.shares.bounds import ShareBounds
from lightning_hetero.shares.policy import BalancePolicy
from lightning_hetero.solvers import minimax
from lightning_hetero.types import Cost, SpeedSample

__all__ = ["balanced", "ddp", "in_pieces_s"]

_MOST_STEPS = 400
_SETTLED = 30  # records without a change of shares: evidence grows with them
_NOTABLE = 0.05  # part of a step that is worth a sentence


def ddp(setup: Setup) -> Estimate:
    """Returns what `DDPStrategy` would take: equal shares, everybody waits for the slowest."""
    costs, ranks = setup.step_costs(), setup.ranks
    share = -(-setup.global_batch // ranks)
    tight = [(most, rank) for rank, most in enumerate(setup.most_samples()) if most is not None and share > most]
    if tight:
        most, rank = min(tight)
        return impossible("ddp", _too_large(setup, rank, share, most))
    work_s = tuple(cost.seconds(share) for cost in costs)
    slowest, last_s = work_s.index(max(work_s)), slowest_s(setup, work_s)
    reasons: list[str] = []
    waited = 1.0 - math.fsum(work_s) / (ranks * max(work_s)) if max(work_s) > 0.0 else 0.0
    if waited > _NOTABLE:
        reasons.append(
            f"{setup.name(slowest)} works {work_s[slowest] * 1e3:.1f} ms on its {share} samples, the fastest"
            f" {min(work_s) * 1e3:.1f} ms: {100.0 * waited:.0f} % of all device-seconds of work time are waiting"
        )
    elif last_s > (1.0 + _NOTABLE) * max(work_s):
        reasons.append(
            f"the devices are equally fast on the whole, and in each step another is late: the last one takes"
            f" {last_s * 1e3:.1f} ms, a device usually {max(work_s) * 1e3:.1f} ms"
        )
    else:
        reasons.append("the devices are equally fast: nothing waits that another division would put to work")
    if setup.global_batch % ranks:
        reasons.append(f"{setup.global_batch} samples are no multiple of {ranks} devices: a step has {share * ranks}")
    return Estimate(
        engine="ddp",
        step_s=last_s + setup.exchange(),
        bound_s=last_s + setup.exchange(),
        work_s=work_s,
        shares=(float(share),) * ranks,
        memory_bytes=(setup.memory_bytes(share),) * ranks,
        exchange_s=setup.exchange(),
        reasons=tuple(reasons),
        overrides=("strategy=ddp", f"trainer.devices={ranks}", f"data.batch_size={share}"),
    )


def balanced(setup: Setup) -> Estimate:
    """Returns what `LoadBalancedStrategy` would take when its shares have settled."""
    costs, most, exchange_s = setup.step_costs(), setup.most_samples(), setup.exchange()
    if (short := _nothing_fits(setup, most)) is not None:
        return impossible("balanced", short)
    try:
        policy, steps = _settle(setup, costs, most)
    except ValueError as error:  # e.g. fewer samples than devices
        return impossible("balanced", str(error))
    shares = policy.shares
    work_s = tuple(in_pieces_s(cost, n, m) for cost, n, m in zip(costs, shares, most, strict=True))
    bound = minimax(costs, setup.global_batch)
    step_s = max(work_s) if setup.series == 1 else followed_s(setup, policy)
    reasons = [_said(setup, work_s, shares, steps)]
    overrides = ["strategy=hetero_balanced", f"trainer.devices={setup.ranks}"]
    overrides.append(f"strategy.global_batch_size={setup.global_batch}")
    if setup.min_samples is not None:
        overrides.append(f"strategy.min_samples={setup.min_samples}")
    pieced = [rank for rank, (n, m) in enumerate(zip(shares, most, strict=True)) if m is not None and n > m]
    if pieced:
        names = ", ".join(setup.name(rank) for rank in pieced)
        reasons.append(f"together the devices hold less than the batch: {names} compute their shares in pieces")
    elif any(m is not None and n >= m for n, m in zip(shares, most, strict=True)):
        full = [r for r, (n, m) in enumerate(zip(shares, most, strict=True)) if m is not None and n >= m]
        reasons.append(f"memory limits the share of {', '.join(setup.name(rank) for rank in full)}")
    if not pieced and any(m is not None and m < setup.global_batch for m in most):
        caps = ",".join(str(min(setup.global_batch, setup.global_batch if m is None else m)) for m in most)
        overrides.append(f"strategy.max_samples=[{caps}]")
    free = minimax(costs, setup.global_batch, upper=[setup.global_batch if m is None else m for m in most])
    if not pieced and free.ok and max(work_s) > (1.0 + _NOTABLE) * free.makespan_s:
        reasons.append(
            f"the bounds of shares (by default a quarter to four times the equal one) hold it up: without them the work"
            f" would take {free.makespan_s * 1e3:.1f} ms; plan with min_samples={min(free.shares)}"
        )
    return Estimate(
        engine="balanced",
        step_s=step_s + exchange_s,
        bound_s=bound.lower_bound_s + exchange_s,
        work_s=work_s,
        shares=tuple(map(float, shares)),
        memory_bytes=tuple(
            setup.memory_bytes(n if m is None else min(n, m)) for n, m in zip(shares, most, strict=True)
        ),
        exchange_s=exchange_s,
        reasons=tuple(reasons),
        overrides=tuple(overrides),
    )


def in_pieces_s(cost: Cost, samples: int, most: int | None) -> float:
    """Returns the time of a share whose pieces have at most ``most`` samples; a rank without any computes a dummy.

    >>> from lightning_hetero.types import AffineCost
    >>> cost = AffineCost(fixed_s=1.0, per_sample_s=1.0)
    >>> in_pieces_s(cost, 5, None), in_pieces_s(cost, 5, 2), in_pieces_s(cost, 0, None)
    (6.0, 8.0, 2.0)
    """
    if most is None or samples <= most:
        return cost.seconds(max(samples, 1))
    full, rest = divmod(samples, most)
    return full * cost.seconds(most) + (cost.seconds(rest) if rest else 0.0)


def _settle(setup: Setup, costs: Sequence[Cost], most: Sequence[int | None]) -> tuple[BalancePolicy, int]:
    """Lets the engine's default policy decide until its shares stay; returns it, and after how many steps."""
    policy = BalancePolicy()
    bounds = ShareBounds(lower=setup.min_samples)
    policy.start(world_size=setup.ranks, total=setup.global_batch, bounds=bounds)
    since = 0
    for step in range(_MOST_STEPS):
        shares = policy.shares
        times_s = [in_pieces_s(cost, n, m) for cost, n, m in zip(costs, shares, most, strict=True)]
        records = [
            SpeedSample(rank=rank, step=step, samples=n, compute_s=seconds)
            for rank, (n, seconds) in enumerate(zip(shares, times_s, strict=True))
        ]
        # Shown to fit is what memory holds of a share.
        policy.limit(most, [n if m is None else min(n, m) for n, m in zip(shares, most, strict=True)], times_s)
        policy.observe(records)
        if policy.shares != shares:
            since = step + 1
        elif step - since >= _SETTLED:
            break
    return policy, since


def _said(setup: Setup, work_s: Sequence[float], shares: Sequence[int], steps: int) -> str:
    if not steps:
        return "shares stay equal: no other division is faster by more than the engine leaves equal shares for"
    ends = f"{min(work_s) * 1e3:.1f} to {max(work_s) * 1e3:.1f} ms"
    shown = "/".join(map(str, shares)) if setup.ranks <= 16 else f"{min(shares)} to {max(shares)}"
    return f"shares {shown} let all devices end together ({ends} of work), {steps} steps after the start"


def _too_large(setup: Setup, rank: int, share: int, most: int) -> str:
    if most < 1:
        return _whole_model(setup, rank)
    parts = math.ceil(share / most)
    return (
        f"{setup.name(rank)} holds {most} samples beside the model, its equal share is {share}:"
        f" data.batch_size={-(-share // parts)} with trainer.accumulate_grad_batches={parts} would fit"
    )


def _nothing_fits(setup: Setup, most: Sequence[int | None]) -> str | None:
    """Says which device does not hold the whole model with one sample; None: all do."""
    for rank, m in enumerate(most):
        if m is not None and m < 1:
            return _whole_model(setup, rank)
    return None


def _whole_model(setup: Setup, rank: int) -> str:
    need, has = setup.memory_bytes(1), setup.cluster.devices[rank].mem_bytes
    return (
        f"{setup.name(rank)} has {bytes_text(has)}, the whole model with one sample takes {bytes_text(need)}:"
        " leave the device out, or divide the layers (hetero_pipeline)"
    )
