"""What a decision costs with many ranks: one rank's share of it, with every rank's row made up; no process, no torch.

Time that every rank spends: *critical* before a batch may be drawn (taking the rows in, asking whether they are urgent,
and deciding if they are), *beside* while gradients travel (deciding if they are not).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from benchmarks.balanced.series import lognormal
from benchmarks.steps import percentile
from lightning_hetero.balanced.decide.controller import ExchangeClock, Row, ShareController, shares_digest
from lightning_hetero.shares.bounds import ShareBounds
from lightning_hetero.shares.policy import BalancePolicy

RANKS = (4, 64, 1000)
PER_RANK = 16
FIXED_S, PER_SAMPLE_S = 0.009, 0.003
NOISE = 0.02
SETTLED = 10
LIMIT_US = {"critical path": {4: 50.0, 1000: 1000.0}, "all of it": {1000: 1000.0}}  # of means


def measure(steps: int = 60) -> dict[str, dict[str, list[float]]]:
    """Returns seconds per step by number of ranks: a quarter of them half as fast, all of them settled and then not.

    In every tenth step another rank becomes twice as slow, or as fast as it was, which is urgent.
    """
    return {str(ranks): _timed(ranks, steps) for ranks in RANKS}


def _timed(ranks: int, steps: int) -> dict[str, list[float]]:
    policy = BalancePolicy()
    policy.start(world_size=ranks, total=PER_RANK * ranks, bounds=ShareBounds())
    controller = ShareController(policy, rank=0, world_size=ranks, exchange=ExchangeClock(every=1))
    noise = lognormal(Random(ranks), ranks, steps, NOISE)
    slow = [2.0 if rank % 4 == 3 else 1.0 for rank in range(ranks)]
    critical_s: list[float] = []
    beside_s: list[float] = []
    for step in range(steps):
        if step >= SETTLED and step % 10 == 0:
            slow[step // 10 % ranks] = 3.0 - slow[step // 10 % ranks]
        before_s = time.perf_counter()
        shares = controller.full_shares(0, step)
        drawn_s = time.perf_counter()
        rows = _rows(step, shares, slow, noise[step])
        controller.sent(0, step, lambda rows=rows: rows)
        sent_s = time.perf_counter()
        controller.catch_up()
        if step >= SETTLED:
            critical_s.append(drawn_s - before_s)
            beside_s.append(time.perf_counter() - sent_s)
    return {"critical_s": critical_s, "beside_s": beside_s}


def _rows(step: int, shares: Sequence[int], slow: Sequence[float], noise: Sequence[float]) -> list[list[float]]:
    """Returns every rank's row as it comes from the exchange."""
    digest = float(shares_digest(0, step, shares))
    nan = float("nan")
    return [
        list(
            Row(
                epoch=0.0,
                step=float(step),
                samples=float(max(1, n)),
                compute_s=k * e * (FIXED_S + PER_SAMPLE_S * max(1, n)),
                wait_s=0.0,
                digest=digest,
                batches=1.0,
                work=nan,
                free_cpu=nan,
                free_mem=nan,
                most_samples=nan,
            )
        )
        for n, k, e in zip(shares, slow, noise, strict=True)
    ]


def figures(raw: Mapping[str, Mapping[str, Sequence[float]]]) -> list[dict[str, Any]]:
    """Returns mean, median and p99 of the critical path, and with what is beside it."""
    out: list[dict[str, Any]] = []
    for ranks, found in raw.items():
        name = f"{ranks} ranks, simulated: decision"
        both = [a + b for a, b in zip(found["critical_s"], found["beside_s"], strict=True)]
        for words, values in (("critical path", found["critical_s"]), ("all of it", both)):
            most = LIMIT_US[words].get(int(ranks))
            mean_us = statistics.fmean(values) * 1e6
            goal = None if most is None else f"<= {most:g}"
            holds = None if most is None else mean_us <= most
            out.append({"name": f"{name}, {words}, mean", "value": mean_us, "unit": "us", "goal": goal, "holds": holds})
            for percent in (50, 99):
                value = percentile(values, percent) * 1e6
                out.append({"name": f"{name}, {words}, p{percent}", "value": value, "unit": "us", "goal": None,
                            "holds": None})  # fmt: skip
    return out
