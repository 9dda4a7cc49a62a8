"""The simulated half: every policy, and the balanced engine's barrier, with real gradients on simulated time.

A *run* is one contender on one case with one seed; it trains all recipes at once on the same schedule, because times do
not depend on gradients. Results are appended to ``.cache/simulated.jsonl`` as they come: a benchmark that was stopped
goes on where it was. An entry counts only for the very code that made it (comments and docstrings aside).
"""

from __future__ import annotations

import ast
import json
import math
import statistics
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.stale.cases import (
    CASES,
    CONTENDERS,
    COSTS,
    FINAL_SEEDS,
    GRIDS,
    TUNING_CASES,
    TUNING_SEEDS,
    Case,
    Contender,
    JitteredWork,
)
from benchmarks.stale.learning import BATCH, RECIPES, TRAINING_SAMPLES, Learner, Recipe, Training, synchronous
from benchmarks.stale.simulator import Costs, Simulated, WorkerTotals, simulate
from lightning_hetero.shares.bounds import ShareBounds
from lightning_hetero.shares.policy import BalancePolicy
from lightning_hetero.solvers.scale import scale_shares
from lightning_hetero.stale.decide.coordinator import Coordinator
from lightning_hetero.types import SpeedSample

Result = dict[str, Any]
Job = tuple[Case, Contender, int, tuple[str, ...], int]  # ..., seed, recipes, epochs
CACHE = Path(__file__).parent / ".cache" / "simulated.jsonl"
MLP = ("MLP, momentum", "MLP, Adam")
MLP_ALL = tuple(name for name in RECIPES if name.startswith("MLP"))
MLP_AND_CNN = tuple(name for name in RECIPES if name.startswith(("MLP", "CNN")))
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


# ---- the cache -------------------------------------------------------------------------------------------------------


@cache
def code_digest() -> int:
    """Returns a digest of the code that results depend on, without comments and docstrings."""
    here = Path(__file__).parent
    package = here.parents[1] / "lightning_hetero"
    found: dict[Path, str] = {}
    todo = [here / "learning.py", here / "cases.py", here / "speeds.py", *(here / "policies").glob("*.py")]
    todo += [here / "simulator.py", package / "shares/policy.py"]
    while todo:
        file = todo.pop()
        if file in found:
            continue
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            match node:
                case ast.Expr(value=ast.Constant(value=str())):  # a docstring
                    node.value = ast.Constant(value="")
                case ast.ImportFrom(module=str(name)) if name.startswith("lightning_hetero."):
                    path = package.joinpath(*name.split(".")[1:])
                    todo.append(path / "__init__.py" if path.is_dir() else path.with_suffix(".py"))
        found[file] = "" if file.name == "cases.py" else ast.dump(tree)  # cases and settings are part of every key
    digest = 0
    for _, code in sorted(found.items()):
        digest = zlib.crc32(code.encode(), digest)
    return digest


def key(job: Job) -> str:
    """Returns what identifies a run: code, case, contender, seed, recipes and length."""
    case, contender, seed, recipes, epochs = job
    setup = [code_digest(), repr(case), repr(COSTS), contender.kind, contender.settings]
    return json.dumps([*setup, seed, recipes, epochs])


def results_of(
    jobs: Iterable[Job], workers: int, progress: Callable[[str], None], path: Path = CACHE
) -> dict[str, Result]:
    """Returns the result of every job by key, from the cache or computed and appended to it."""
    known: dict[str, Result] = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:  # the last line of a run that was stopped
                continue
            known[entry["key"]] = entry["result"]
    wanted = {key(job): job for job in jobs}
    todo = {k: job for k, job in wanted.items() if k not in known}
    path.parent.mkdir(exist_ok=True)
    with path.open("a", encoding="utf-8") as out:

        def keep(k: str, result: Result, done: int) -> None:
            known[k] = result
            out.write("\n" * (done == 1) + json.dumps({"key": k, "result": result}) + "\n")
            out.flush()
            case, contender, seed = todo[k][:3]
            progress(f"simulated {done}/{len(todo)}: {case.name}, {contender.name}, seed {seed}")

        if workers <= 1:
            for done, (k, job) in enumerate(todo.items(), 1):
                keep(k, run_one(job), done)
        else:
            with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
                futures = {pool.submit(run_one, job): k for k, job in todo.items()}
                for done, future in enumerate(as_completed(futures), 1):
                    keep(futures[future], future.result(), done)
    return {k: known[k] for k in wanted}


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


# ---- the table -------------------------------------------------------------------------------------------------------


def geometric(ratios: Sequence[float]) -> tuple[float, float]:
    """Returns the geometric mean of paired ratios and its standard error; the mean of the ratios themselves would
    exceed 1 even for two runs of the same thing."""
    logs = [math.log(r) for r in ratios]
    mean = math.exp(statistics.fmean(logs))
    return mean, mean * statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0


def spread(values: Sequence[float]) -> float:
    """Returns half the distance between the quartiles."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4)
    return (high - low) / 2


def rows_of(
    cases: Sequence[Case], contenders: Sequence[Contender], seeds: Sequence[int], recipes: tuple[str, ...], epochs: int,
    jobs: int, progress: Callable[[str], None],
) -> list[Result]:  # fmt: skip
    """Runs everything and returns one row per case and contender."""

    def job(case: Case, contender: Contender, seed: int) -> Job:
        return case, contender, seed, recipes, epochs

    wanted = [job(case, contender, seed) for case in cases for contender in contenders for seed in seeds]
    results = results_of(wanted, jobs, progress)

    def get(case: Case, contender: Contender) -> list[Result]:
        return [results[key(job(case, contender, seed))] for seed in seeds]

    rows: list[Result] = []
    ddp = next((c for c in contenders if c.kind == "bsp"), None)
    balanced = [c for c in contenders if c.kind == "balanced"]
    for case in cases:
        best_balanced: list[float] = []
        if balanced:
            runs = [[r["time_s"] for r in get(case, c)] for c in balanced]
            best_balanced = min(runs, key=statistics.median)
        for contender in contenders:
            some = get(case, contender)
            times = [r["time_s"] for r in some]
            row: Result = {
                "case": case.name,
                "policy": contender.name,
                "held_out": case.held_out,
                "time_s": statistics.median(times),
                "time_spread_s": spread(times),
                "to_bound": statistics.median(r["time_s"] / r["ideal_s"] for r in some),
                "max_staleness": max(r["max_staleness"] for r in some),
                "mean_staleness": statistics.fmean(r["mean_staleness"] for r in some),
                "stale_fraction": statistics.fmean(r["stale_fraction"] for r in some),
                "recomputed": statistics.fmean(r["recomputed"] for r in some),
                "waiting": statistics.fmean(r["waiting"] for r in some),
            }
            if ddp is not None:
                base = get(case, ddp)
                row["to_ddp"] = statistics.median(t / b["time_s"] for t, b in zip(times, base, strict=True))
            if best_balanced:
                row["to_balanced"] = statistics.median(t / b for t, b in zip(times, best_balanced, strict=True))
            for recipe in recipes:
                ends = [trained(job(case, contender, s), r, recipe) for s, r in zip(seeds, some, strict=True)]
                pairs = [
                    min(end["loss"], 100.0) / synchronously(recipe, seed, epochs)["loss"]
                    for end, seed in zip(ends, seeds, strict=True)
                ]
                row[f"{recipe}: loss to DDP"], row[f"{recipe}: loss to DDP, standard error"] = geometric(pairs)
                reached = [math.inf if e["target_s"] is None else e["target_s"] for e in ends]
                median = statistics.median(reached)
                row[f"{recipe}: time to target_s"] = median if math.isfinite(median) else None
            rows.append(row)
    return rows


def run(quick: bool = False, jobs: int = 1, progress: Callable[[str], None] = print) -> list[Result]:
    """Runs the simulated half and returns one row per case and contender.

    A row has the columns ``case``, ``policy``, ``held_out``, ``time_s`` and ``time_spread_s`` (median, half the
    distance of the quartiles), ``to_ddp``, ``to_balanced`` (the better of its two forms), ``to_bound``,
    ``max_staleness``, ``mean_staleness``, ``stale_fraction``, ``recomputed`` (of the samples), ``waiting`` (of the
    workers' time), and for each recipe ``<recipe>: loss to DDP`` with ``..., standard error`` and
    ``<recipe>: time to target_s`` (None: the median run does not reach it). Four of the cases train the CNN, too.

    About 50 minutes of one core.

    Args:
        quick: two cases, the main contenders, two seeds and few epochs: seconds.
        jobs: processes.
        progress: told about every run.
    """
    if quick:
        cases = [case for case in CASES if case.name in ("1:1:1/2:1/4", "spells")]
        main = ("bsp (stock DDP)", "flexible", "asp", "dynsgd", "quorum")
        contenders = [c for c in CONTENDERS if c.name in main or c.kind == "balanced"]
        return rows_of(cases, contenders, FINAL_SEEDS[:2], MLP, 4, jobs, progress)
    rows: list[Result] = []
    for case in CASES:  # the CNN costs most of the time: four cases are enough
        some = MLP_AND_CNN if case in TUNING_CASES or case.held_out else MLP_ALL
        rows += rows_of([case], CONTENDERS, FINAL_SEEDS, some, 30, jobs, progress)
    return rows


def tune(jobs: int = 1, progress: Callable[[str], None] = print) -> list[Result]:
    """Runs the grids of settings on TUNING_CASES and TUNING_SEEDS; the settings in `CONTENDERS` were chosen from it.

    ``score`` is the geometric mean, over cases and recipes, of the time to the target in multiples of the ideal time of
    the whole schedule; a target that is never reached counts as four whole schedules.
    """
    rows = rows_of(TUNING_CASES, GRIDS, TUNING_SEEDS, MLP, 30, jobs, progress)
    table: list[Result] = []
    for contender in GRIDS:
        mine = [row for row in rows if row["policy"] == contender.name]
        scores = [
            (row[f"{recipe}: time to target_s"] or 4 * row["time_s"]) / (row["time_s"] / row["to_bound"])
            for row in mine
            for recipe in MLP
        ]
        losses = [row[f"{recipe}: loss to DDP"] for row in mine for recipe in MLP]
        times = [row["to_bound"] for row in mine]
        table.append(
            {
                "policy": contender.name,
                "score": geometric(scores)[0],
                "to_bound": geometric(times)[0],
                "loss": geometric(losses)[0],
                "worst_loss": max(losses),
            }
        )
    return table
