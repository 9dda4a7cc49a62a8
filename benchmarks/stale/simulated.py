"""The simulated half: every policy, and the balanced engine's barrier, with real gradients on simulated time.

A *run* is one contender on one case with one seed; it trains all recipes at once on the same schedule, because times do
not depend on gradients.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from multiprocessing import get_context
from typing import Any

from benchmarks.kit.figures import geometric
from benchmarks.stale.cases import CONTENDERS, COSTS, SEEDS, Case, Contender, JitteredWork
from benchmarks.stale.learning import BATCH, RECIPES, TRAINING_SAMPLES, Learner, Recipe, Training, synchronous
from benchmarks.stale.simulator import Costs, Simulated, WorkerTotals, simulate
from lightning_hetero.shares.bounds import ShareBounds
from lightning_hetero.shares.policy import BalancePolicy
from lightning_hetero.solvers.scale import scale_shares
from lightning_hetero.stale.decide.coordinator import Coordinator
from lightning_hetero.types import SpeedSample

Result = dict[str, Any]
Job = tuple[Case, Contender, int, tuple[str, ...], int]  # ..., seed, recipes, epochs
MLP = ("MLP, momentum", "MLP, Adam")
COMPARED = (*MLP, "MLP at the edge, momentum")  # by every policy
MLP_ALL = tuple(name for name in RECIPES if name.startswith("MLP"))
WITH_CNN = ("1:1:1/2:1/4", "spells")  # it costs most of the time
QUICK = ("bsp (stock DDP)", "flexible", "asp", "balanced (>= 1 sample)")
TICKS = TRAINING_SAMPLES // BATCH
ENDS = tuple(range(BATCH, TRAINING_SAMPLES + 1, BATCH))


def balanced_barrier(
    work: JitteredWork, workers: int, batches: Sequence[int], costs: Costs, *, min_samples: int = 1
) -> Simulated:
    """Simulates the balanced engine: its own policy with its defaults, and a barrier after every batch.

    As in the engine, a record that surprises decides the very next batch, any other one the batch after that. A worker
    without samples pays the start of a chunk. The largest share is not bounded.
    """
    policy = BalancePolicy(predictor="kalman")
    bounds = ShareBounds(lower=min_samples, upper=max(batches))
    policy.start(world_size=workers, total=max(batches), bounds=bounds)
    totals = {rank: WorkerTotals() for rank in range(workers)}
    now_s, updates_s = 0.0, list[float]()
    waiting: list[SpeedSample] = []
    for step, batch in enumerate(batches):
        shares = policy.shares if batch == max(batches) else scale_shares(policy.shares, batch)
        times = [work(rank, step, now_s + costs.pull_s, n) for rank, n in enumerate(shares)]
        slowest = max(times)
        for rank, (n, busy_s) in enumerate(zip(shares, times, strict=True)):
            one = totals[rank]
            one.busy_s += busy_s
            one.hold_s += slowest - busy_s
            one.samples += n
            one.chunks += n > 0
        now_s += costs.pull_s + slowest + costs.push_s
        updates_s.append(now_s)
        records = [
            SpeedSample(rank=rank, step=step, samples=n, compute_s=busy_s)
            for rank, (n, busy_s) in enumerate(zip(shares, times, strict=True))
        ]
        if waiting:
            policy.observe(waiting)
        waiting = records
        if policy.urgent(shares, times):
            policy.observe(records)
            waiting = []
    return Simulated(makespan_s=now_s, workers=totals, staleness={0: sum(batches)}, updates_s=updates_s)


def scaled(name: str, epochs: int) -> Recipe:
    """Returns a recipe whose schedule fits into ``epochs``: shorter for quick runs, else as it is."""
    recipe = RECIPES[name]
    return replace(recipe, epochs=min(epochs, recipe.epochs))


def run_one(job: Job) -> Result:
    """Simulates and trains one run; returns plain JSON values."""
    import torch  # for the CNN only; it is slow to import

    torch.set_num_threads(1)  # the batches are tiny
    case, contender, seed, recipes, epochs = job
    workers = len(case.speeds)
    speeds = case.build(seed)
    work = JitteredWork(speeds, workers, case.jitter, seed)
    ideal_s = speeds.ideal_s([BATCH] * (TICKS * epochs))
    trained: dict[str, Any] = {}
    if contender.kind == "balanced":
        batches = [BATCH] * (TICKS * epochs)
        trace = balanced_barrier(work, workers, batches, COSTS, **contender.settings)
    else:
        policy = contender.policy()
        coordinator = Coordinator(policy, workers=range(workers))
        names = () if contender.synchronous else recipes
        learners = [Learner(scaled(name, epochs), seed, completes=policy.completes) for name in names]
        training = Training(learners, seed)
        trace = simulate(
            coordinator,
            work,
            workers=range(workers),
            epochs=[ENDS] * epochs,
            costs=COSTS,
            hooks=training if learners else None,
        )
        for learner in learners:
            trained[learner.recipe.name] = learner.result(training.ticks_s)
    return {
        "time_s": trace.makespan_s,
        "ideal_s": ideal_s,
        "updates": len(trace.updates_s),
        "max_staleness": trace.max_staleness,
        "mean_staleness": trace.mean_staleness,
        "stale_fraction": 1.0 - trace.staleness.get(0, 0) / max(1, sum(trace.staleness.values())),
        "recomputed": trace.recomputed / (TRAINING_SAMPLES * epochs),
        "waiting": sum(w.hold_s for w in trace.workers.values()) / (workers * trace.makespan_s),
        "ticks_s": trace.updates_s if contender.synchronous else [],
        "trained": trained,
    }


@cache
def synchronously(recipe: str, seed: int, epochs: int) -> dict[str, Any]:
    """Returns what synchronous training with this seed ends with, the same for every barrier."""
    return synchronous(scaled(recipe, epochs), seed)


def trained(job: Job, result: Result, recipe: str) -> dict[str, Any]:
    """Returns loss and time to target of one recipe in one run."""
    _, contender, seed, _, epochs = job
    if not contender.synchronous:
        return result["trained"][recipe]
    same = synchronously(recipe, seed, epochs)
    at = same["target_tick"]
    return {**same, "target_s": None if at is None else result["ticks_s"][at]}


def spread(values: Sequence[float]) -> float:
    """Returns half the distance between the quartiles."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4)
    return (high - low) / 2


def recipes_of(case: Case, contender: Contender, quick: bool) -> tuple[str, ...]:
    """Returns what this contender trains: the default policy everything, the others what all are compared by."""
    if quick:
        return MLP
    if contender.name != "flexible":
        return COMPARED
    return tuple(RECIPES) if case.name in WITH_CNN else MLP_ALL


def measure(case: Case, quick: bool = False) -> list[Result]:
    """Runs every contender on a case and returns a row of each.

    A row has the columns ``case``, ``policy``, ``held_out``, ``time_s`` and ``time_spread_s`` (median, half the
    distance of the quartiles), ``to_ddp``, ``to_balanced`` (the better of its two forms), ``to_bound``,
    ``max_staleness``, ``mean_staleness``, ``stale_fraction``, ``recomputed`` (of the samples), ``waiting`` (of the
    workers' time), and for each recipe ``<recipe>: loss to DDP`` with ``..., standard error`` and
    ``<recipe>: time to target_s`` (None: the median run does not reach it).
    """
    contenders = [c for c in CONTENDERS if not quick or c.name in QUICK]
    most, epochs = (2, 2) if quick else (len(SEEDS), 30)
    recipes = {c.name: recipes_of(case, c, quick) for c in contenders}
    jobs: list[Job] = [(case, c, seed, recipes[c.name], epochs) for c in contenders for seed in c.seeds[:most]]
    runs: dict[str, list[Result]] = {c.name: [] for c in contenders}
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        for job, result in zip(jobs, pool.map(run_one, jobs), strict=True):
            runs[job[1].name].append(result)
    return [row_of(case, c, runs, recipes[c.name], epochs) for c in contenders]


def row_of(
    case: Case, contender: Contender, runs: Mapping[str, Sequence[Result]], recipes: Sequence[str], epochs: int
) -> Result:
    """Returns one row of `measure`; ``runs``: by contender, a result per seed, of fewer seeds where it has fewer."""
    some = runs[contender.name]
    seeds = contender.seeds[: len(some)]
    times = [r["time_s"] for r in some]
    barriers = [[r["time_s"] for r in runs[c.name]] for c in CONTENDERS if c.kind == "balanced" and c.name in runs]
    ddp = [r["time_s"] for c in CONTENDERS if c.kind == "bsp" for r in runs[c.name]]

    def to(others: Sequence[float]) -> float:
        return statistics.median(t / o for t, o in zip(times, others, strict=False))

    row: Result = {
        "case": case.name,
        "policy": contender.name,
        "held_out": case.held_out,
        "time_s": statistics.median(times),
        "time_spread_s": spread(times),
        "to_bound": to([r["ideal_s"] for r in some]),
        "max_staleness": max(r["max_staleness"] for r in some),
        "mean_staleness": statistics.fmean(r["mean_staleness"] for r in some),
        "stale_fraction": statistics.fmean(r["stale_fraction"] for r in some),
        "recomputed": statistics.fmean(r["recomputed"] for r in some),
        "waiting": statistics.fmean(r["waiting"] for r in some),
        "to_ddp": to(ddp),
        "to_balanced": to(min(barriers, key=statistics.median)),
    }
    for recipe in recipes:
        ends = [trained((case, contender, s, (), epochs), r, recipe) for s, r in zip(seeds, some, strict=True)]
        pairs = [
            min(end["loss"], 100.0) / synchronously(recipe, seed, epochs)["loss"]
            for end, seed in zip(ends, seeds, strict=True)
        ]
        row[f"{recipe}: loss to DDP"], row[f"{recipe}: loss to DDP, standard error"] = geometric(pairs)
        median = statistics.median(math.inf if e["target_s"] is None else e["target_s"] for e in ends)
        row[f"{recipe}: time to target_s"] = median if math.isfinite(median) else None
    return row
