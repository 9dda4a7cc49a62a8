"""``python -m benchmarks.tables``: writes the measured tables of README.md and docs/ from the results files.

A page holds ``<!-- NAME: python -m benchmarks.tables -->``, the text and ``<!-- end -->``; `BLOCKS` says what NAME is.
Every number between these lines is read from a ``benchmarks/*/results.json``, whose figures are called by their names:
one that is no longer there is an error, not a gap. A benchmark that has no results at all is said to have none.
"""

from __future__ import annotations

import math
import re
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.fault_matrix.table import failing_list, fault_table, hook_table
from benchmarks.planner.published import SETUPS
from benchmarks.provenance import ROOT
from benchmarks.results import DASH, Results, faster, measured

PAGES = ("README.md", "docs/index.md", "docs/benchmarks.md", "docs/theory/stale_policies.md",
         "docs/theory/federated.md", "docs/reference/drop_in.md", "docs/reference/faults.md",
         "docs/reference/goals.md")  # fmt: skip
_BLOCK = re.compile(r"(<!-- (?P<name>[\w ]+): python -m benchmarks\.tables -->\n).*?(<!-- end -->)", re.S)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def _joined(*parts: str) -> str:
    """Returns tables and paragraphs, these in lines of a page's length."""
    wrapped = [p if p.startswith("|") else textwrap.fill(p, 120, break_on_hyphens=False) for p in parts]
    return "\n\n".join(wrapped)


def _span(values: Sequence[float], form: str = "{:.2f}", last: str = "") -> str:
    return f"{form.format(min(values))} to {(last or form).format(max(values))}"


# ---- the blocks -----------------------------------------------------------------------------------------------------


FOUR = "4 ranks 1:1:1/2:1/4"
CAPPED = "memory-capped, mlp"
LOSS = ": final loss to DDP's"
FIRST, LATER = "a first run", "with the last run's speeds"
WORST = ": goodput of the worst outage"
HINDSIGHT = "ours / static parts that are best in hindsight, whole run"


def gain(results: Results) -> str:
    """Of README and the site's first page: the first figure anybody reads, which the time lines show, too."""
    ddp_ms, ours_ms = results[f"{FOUR}: stock DDP step"], results[f"{FOUR}: our step"]
    return _joined(
        f"On four emulated devices of speeds 1, 1, 1/2 and 1/4, a step takes {ours_ms:.0f} ms instead of DDP's"
        f" {ddp_ms:.0f} ms: {ddp_ms / ours_ms:.1f} times as fast, with the same global batch and the same gradient up"
        f" to rounding (relative error {results[f'{FOUR}: relative gradient error, first step']:.0e})."
    )


def headline(results: Results) -> str:
    """Of README: a row per engine."""
    stale, pipeline = results.other("stale"), results.other("pipeline")
    tasks = [f"real, {task}, spells" for task in ("digits CNN", "text transformer")]
    _, saved = pipeline.starting(f"{CAPPED}: less time than the best even pipeline (even, ")
    held = f"{CAPPED}, Lightning: parameters, gradients, optimizer state, whole model / largest memory"
    equal = [1.0 / results[f"{case}: ours / DDP"] for case in results.cases(": ours / DDP")]
    times = " and ".join(dict.fromkeys(f"{1.0 / stale[f'{task}: time to DDP']:.1f}" for task in tasks))
    losses = " and ".join(f"{stale[task + LOSS]:.2f}" for task in tasks)
    rows = [
        ["speeds 1, 1, 1/2, 1/4", "`hetero_balanced`",
         f"{results[f'{FOUR}: speed-up over DDP']:.1f} times as fast as DDP; on equal devices {_span(equal)} times"],
        ["each randomly 6x slower, 25 % of the time", "`hetero_stale`",
         f"{times} times as fast as DDP (CNN, transformer), final loss {losses} times DDP's"],
        [f"speeds 1, 1, 1/2, 1/4; a model of {pipeline[held]:.1f} times the largest memory", "`hetero_pipeline`",
         f"{faster(saved):.1f} times as fast as the best even pipeline; DDP cannot hold the model"],
    ]  # fmt: skip
    return _table(["four emulated devices", "engine", "measured"], rows)


def seeds(results: Results) -> str:
    """Of README: what is lost and won by its first command, seed by seed."""
    spread = results["ddp: accuracy, standard deviation over seeds"]
    of = {"mean": "{:+.2f}", "standard error": "{:.2f}", "worst seed": "{:+.1f}"}
    mean, error, worst = (results.text(f"hetero_stale: accuracy to DDP's, {what}", form) for what, form in of.items())
    mean = mean.replace("-0.00", "0.00")
    fast = [results.text(f"hetero_{engine}: speed-up over DDP", "{:.2f}") for engine in ("balanced", "stale")]
    return _joined(
        "*fit s* holds everything: start-up, the first steps with equal shares, validation. Accuracy varies from seed"
        f" to seed: over [twelve seeds](benchmarks/demo/results.md) DDP's standard deviation is {spread:.1f} points,"
        f" and `hetero_stale` differs from DDP by {mean} points on average (standard error {error}), by {worst} for its"
        f" worst seed. Over these seeds `hetero_balanced` is {fast[0]} times as fast as DDP, `hetero_stale` {fast[1]}"
        " times."
    )


def balanced(results: Results) -> str:
    """Of docs/benchmarks.md: every case with its gain, and what equal devices pay."""
    rows = []
    for case in sorted(results.cases(": speed-up over DDP"), key=lambda case: int(case.split()[0])):  # by ranks
        whole = faster(results[f"{case}: time saved over DDP, whole run"])
        bias = results.text(f"{case}: static uneven sampler, unweighted: relative gradient error", "{:.2f}")
        rows.append([
            case,
            f"{results[f'{case}: stock DDP step']:.0f} / {results[f'{case}: our step']:.0f}",
            f"{results[f'{case}: speed-up over DDP']:.2f} / {whole:.2f}",
            f"{results[f'{case}: fraction of ideal, gross']:.2f} / {results[f'{case}: fraction of ideal, net']:.2f}",
            " / ".join(_faster(results, f"{case}: {HINDSIGHT}, {run}") for run in (FIRST, LATER)),
            results.text(f"{case}: our step / the fast devices alone, ideal step", "{:.2f}"),
            f"{results[f'{case}: relative gradient error, first step']:.0e} / {bias}",
        ])  # fmt: skip
    head = ["emulated devices", "step in ms, DDP / ours", "times as fast, step / whole run",
            "of the ideal, gross / net", "times as fast as the best static split, whole run, first / later",
            "step over that of the fast devices alone", "gradient error: ours / static unweighted split"]  # fmt: skip
    (swapped,) = results.cases(": steps to 5% of ideal after swap")
    equal: dict[str, list[str]] = {}
    for case in results.cases(": ours / DDP"):  # "2 equal ranks, 3 ms steps of stock DDP": what was aimed at
        told = f"{1.0 / results[f'{case}: ours / DDP']:.2f} ({results[f'{case}: stock DDP step']:.1f} ms)"
        equal.setdefault(case.partition(" equal")[0], []).append(told)
    ratios = [f"{', '.join(told)} times as fast on {ranks} ranks" for ranks, told in equal.items()]
    steps = results[f"{swapped}: steps to 5% of ideal after swap"]
    after = results.text(f"{swapped}: our step, steady after swap", "; a steady step then takes {:.0f} ms").strip(DASH)
    return _joined(
        _table(head, rows),
        f"After the swap the shares are right again {steps:.0f} steps later{after}. On *equal* devices ours is"
        f" {'; '.join(ratios)} (in brackets the time of DDP's step).",
    )


def _faster(results: Results, figure: str) -> str:
    """Returns how many times as fast, of a ratio of times; a dash where there is none."""
    return f"{1.0 / results[figure]:.2f}" if figure in results else DASH


def real_work(results: Results) -> str:
    """Of docs/benchmarks.md: nothing emulated, other programs on one of two cores."""
    if not (cases := [name for name in results.figures if name.endswith(": DDP / static split, whole run")]):
        return "These runs have not been measured yet."
    engines = ("static split", "free core alone", "balanced", "balanced, narx", "stale", "DDP again")
    rows = []
    for case in (name.rpartition(": ")[0] for name in cases):
        rows.append([case, *(results.text(f"{case}: DDP / {engine}, whole run", "{:.2f}") for engine in engines)])
    return _table(["times as fast as DDP, whole run", *engines], rows)


def stale(results: Results) -> str:
    """Of docs/benchmarks.md: both tasks, by cluster."""
    tasks = ("digits CNN", "text transformer")
    names = {
        "equal": "4 equal ranks",
        "spells": "slow spells (6x slower, a quarter of the time)",
        "one killed": "one rank killed half-way",
    }
    ours = [row for row in results.raw["real"] if row["engine"] == "flexible"]
    rows = []
    for cluster in dict.fromkeys(row["cluster"] for row in results.raw["real"]):
        cells = [
            [_faster(results, f"real, {task}, {cluster}: time to {what}") for task in tasks]
            for what in ("DDP", "balanced")
        ]
        cells.append([results.text(f"real, {task}, {cluster}{LOSS}", "{:.2f}") for task in tasks])
        late = [f"{100 * row['stale_fraction']:.0f} %" for row in ours if row["cluster"] == cluster]
        words = ["DDP's job ends; ours ends its schedule on the other three", "", ""]
        known = cells[0] != [DASH, DASH]
        ratios = [" / ".join(pair) for pair in cells] if known else words
        rows.append([names.get(cluster, cluster), *ratios, " / ".join(late)])
    head = ["emulated devices", "times as fast as DDP, digits CNN / transformer",
            "times as fast as `hetero_balanced`", "final loss over DDP's", "stale samples"]  # fmt: skip
    oldest = max(row["max_staleness"] for row in ours)
    simulated = [case for case in results.cases(LOSS) if case.startswith("simulated")]
    worst = max(simulated, key=lambda case: results[case + LOSS])
    bounds = [results[f"{case}: time to bound"] for case in results.cases(": time to bound") if "simulated" in case]
    taken = max(row["taken"] for row in results.raw["real"])
    return _joined(
        _table(head, rows),
        f"No contribution was more than {oldest} versions old. In simulated time `flexible` needs {_span(bounds)} times"
        " the *bound*, the time all devices need together without waiting or transfers, and ends at"
        f" {_span([results[case + LOSS] for case in simulated])} times DDP's final loss"
        f" (most: {worst.partition(', ')[2]})."
        f" Emulated work took up to {taken:.2f} times what was asked: where that is above 1, real work was longer than"
        " the emulated, which brings the ratios closer to 1.",
    )


def policies(results: Results) -> str:
    """Of docs/theory/stale_policies.md: a table per optimizer, time to the target and final loss over DDP's."""
    clusters = {"equal": "calm", "1:1:1:1/8": "one straggler", "spells": "spells"}
    rows = {(row["case"], row["policy"]): row for row in results.raw["simulated"]}
    shown = [policy for policy in dict.fromkeys(policy for _, policy in rows) if "balanced" not in policy]
    parts: list[str] = []
    for model in ("MLP, momentum", "MLP, Adam", "MLP at the edge, momentum"):
        lined: list[list[str]] = []
        for policy in shown:
            cells = [f"`{policy}`"]
            for case in clusters:
                row, target = rows[case, policy], f"{model}: time to target_s"
                ddp_s = rows[case, "bsp (stock DDP)"][target]
                time = DASH if row[target] is None else f"{row[target] / ddp_s:.2f}"
                error = row[f"{model}: loss to DDP, standard error"]
                cells.append(f"{time}, {row[f'{model}: loss to DDP']:.2f}" + (f" +- {error:.2f}" if error else ""))
            lined.append(cells)
        parts.append(_table([model, *(f"{word}: time, final loss" for word in clusters.values())], lined))
    return "\n\n".join(parts)


def optimizers(results: Results) -> str:
    """Of docs/theory/stale_policies.md: what the default policy does to the final loss, by optimizer."""
    rows = [row for row in results.raw["simulated"] if row["policy"] == "flexible"]
    kinds = [f"MLP, {optimizer}" for optimizer in ("SGD", "momentum", "Adam", "Muon")]
    if any(f"{kind}: loss to DDP" not in row for kind in kinds for row in rows):
        return "These runs have not been measured yet."
    lines = []
    for kind in kinds:
        losses = [(row[f"{kind}: loss to DDP"], row[f"{kind}: loss to DDP, standard error"]) for row in rows]
        mean = math.exp(sum(math.log(loss) for loss, _ in losses) / len(losses))
        lines.append([kind, *(f"{loss:.2f} +- {error:.2f}" for loss, error in losses), f"{mean:.2f}"])
    return _table(["final loss over DDP's", *(row["case"] for row in rows), "mean"], lines)


def pipeline(results: Results) -> str:
    """Of docs/benchmarks.md: every scenario."""
    rows = []
    for case in results.cases(": modelled / measured"):
        groups, saved = results.starting(f"{case}: less time than the best even pipeline (even, ")
        ddp = f"{case}, Lightning: less time than stock DDP"
        rows.append([
            case,
            f"{results[f'{case}: our step']:.0f}",
            f"{faster(saved):.2f} ({groups.rstrip(')')})",
            f"{faster(results[ddp]):.2f}" if ddp in results else DASH,
            f"{results[f'{case}: modelled / measured']:.2f}",
        ])  # fmt: skip
    head = ["emulated devices, model", "our step, ms", "times as fast as the best even pipeline",
            "times as fast as stock DDP", "modelled / measured"]  # fmt: skip
    return _table(head, rows)


def joint(results: Results) -> str:
    """Of docs/benchmarks.md: the controller against what nobody can know before, by scenario."""
    hindsight = ": less time than best static plan"
    rows = []
    for case in results.cases(hindsight):
        oracle = 1.0 + results[f"{case}: above the oracle"] / 100.0
        rows.append([case, f"{faster(results[case + hindsight]):.2f}", f"{oracle:.2f}"])
    head = ["scenario", "times as fast as the static plan that is best in hindsight", "time over the oracle's"]
    return _table(head, rows)


def pipeline_besides(results: Results) -> str:
    """Of docs/benchmarks.md: against the balanced engine and torch's pipelines, and the memory."""
    replicas = results["4 equal, gpt, Lightning: plain data parallelism, ours / balanced engine"]
    held = "memory-capped, mlp, Lightning: parameters, gradients, optimizer state"
    even = ": the even chain by our walker / by torch.distributed.pipelining"
    chains = [1.0 / results[f"{case}{even}"] for case in results.cases(even)]
    most, whole = results[f"{held}, most held / device's memory"], results[f"{held}, whole model / largest memory"]
    stages = ": ours / torch.distributed.pipelining"
    equal = [1.0 / results[case + stages] for case in results.cases(stages)]  # emulated, and real work only
    return _joined(
        "On four *equal* devices the best plan is plain data parallelism, and so is ours; there a step is"
        f" {1.0 / replicas:.2f} times as fast as the balanced engine's. Each rank of the memory-capped MLP holds at"
        f" most {most:.2f} of its device, the whole model is {whole:.1f} times as large. Compared with"
        f" `torch.distributed.pipelining` on the same even chains our walker is {_span(chains)} times as fast; on four"
        f" synthetic equal stages {equal[0]:.2f} times, and {equal[1]:.2f} times where nothing is emulated and four"
        " processes share two cores."
    )


def published(results: Results) -> str:
    """Of docs/benchmarks.md: set-ups of others, theirs, as planned and as measured."""
    rows = []
    for one in SETUPS:
        gains = [f"{one.name}: times as fast as DDP, {how}" for how in ("planner", "measured")]
        if gains[1] in results:
            errors = [results.text(f"{one.name}, {e}: planned / measured", "{:.2f}") for e in ("ddp", "balanced")]
            cells = [f"{results[gain]:.2f}" for gain in gains]
            rows.append([one.name, one.theirs, *cells, " / ".join(errors)])
    head = ["set-up", "theirs", "times as fast as DDP: planner says", "measured", "planned / measured step, DDP / ours"]
    return _table(head, rows) if rows else "The published set-ups have not been measured yet."


def predictions(results: Results) -> str:
    """Of docs/benchmarks.md: how well an update is planned where nothing is emulated, by engine."""
    rows = []
    for engine in ("ddp", "balanced", "stale", "pipeline", "auto, printed"):
        names = [f"{model}, {engine}: planned / measured" for model in results.raw["real"]]
        found = [results[name] for name in names if name in results]
        if found:
            what = "`hetero_auto`, as printed" if "auto" in engine else engine
            rows.append([what, f"{statistics.median(found):.2f}", _span(found)])
    head = ["engine", "planned / measured step, median of the models", "least to greatest"]
    return _table(head, rows) if rows else "Steps of real work have not been measured yet."


def federated(results: Results) -> str:
    """Of docs/theory/federated.md: every policy, on devices of steady speeds."""
    rows = []
    for case in results.cases(", final accuracy"):
        if not case.startswith("steady: ") or "owned" in case:
            continue
        base = case.endswith(": fedavg")
        reached = results.text(f"{case}, runs that reach the target", "{:.0f}")
        rows.append([
            f"`{case.removeprefix('steady: ')}`",
            (results.text(f"{case}, time to target", "{:.0f} s") if base
             else f"{_faster(results, f'{case}, time to target')} times as fast") + f" ({reached} runs)",
            f"{results[f'{case}, final accuracy']:.1f} %",
            results.text(f"{case}, accuracy lost after as many rounds", "{:.2f}"),
            f"{results[f'{case}, rounds']:.0f}",
            f"{100 * results[f'{case}, waiting']:.0f} %",
        ])  # fmt: skip
    head = ["policy", "emulated time to 90 %", "final accuracy", "points lost to `fedavg` after as many rounds",
            "rounds", "waiting"]  # fmt: skip
    return _table(head, rows)


def overview(results: Results) -> str:
    """Of docs/benchmarks.md: every benchmark that has results."""
    known = measured(results.root)
    rows = [[f"[{name}](../benchmarks/{name}/results.md)", results.other(name).title] for name in known]
    return _table(["name", "benchmark"], rows)


def goals(results: Results) -> str:
    """Of docs/reference/goals.md: how many goals each benchmark holds."""
    rows = []
    for name in measured(results.root):
        one = results.other(name)
        known = [figure["holds"] for figure in one.rows if figure["holds"] is not None]
        if known:
            rows.append([f"[{name}](../../benchmarks/{name}/results.md)", f"{sum(known)} of {len(known)}"])
    return _table(["benchmark", "goals held"], rows)


def _with_goals(results: Results) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Returns the figures that have a goal, by what they measure and the goal."""
    kinds: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for figure in results.rows:
        if figure["holds"] is not None:
            kinds.setdefault((figure["name"].rpartition(": ")[2], figure["goal"]), []).append(figure)
    return kinds


def _values(figures: Sequence[Mapping[str, Any]]) -> str:
    values, unit = [figure["value"] for figure in figures], figures[0]["unit"].replace("1", "")
    return f"{f'{values[0]:.4g}' if len(values) == 1 else _span(values, '{:.4g}')} {unit}".strip()


def missed(results: Results) -> str:
    """Of docs/reference/goals.md: a list of what does not hold its goal, by benchmark and kind of figure."""
    lines = []
    for name in measured(results.root):
        behind = []
        for (kind, goal), figures in _with_goals(results.other(name)).items():
            if late := [figure for figure in figures if not figure["holds"]]:
                behind.append(f"{kind} ({goal}): {_values(late)}, {len(late)} of {len(figures)}")
        lines += [f"- **{name}**: {'; '.join(behind)}."] if behind else []
    return "\n".join(lines)


def goodput(results: Results) -> str:
    """Of docs/reference/faults.md: what is left of training while machines go and come back."""
    rows = []
    for name in (name for name in results.figures if name.endswith(WORST)):
        system = name.removesuffix(WORST)
        total, worst = (results.text(f"{system}{of}", "{:.2f}") for of in (": goodput, an outage every 20 s", WORST))
        rows.append([f"`{system}`" if "hetero" in system else system, total, worst])
    head = ["one of four ranks killed every 20 s", "goodput", "of the worst outage"]
    return _table(head, rows) if rows else "Outages have not been measured yet."


def own_tests(results: Results) -> str:
    """Of docs/reference/drop_in.md: how many of Lightning's own tests pass with our classes."""
    engines = {"balanced": "balanced", "stale": "stale", "stale-bsp": 'stale, `policy="bsp"`', "pipeline": "pipeline"}
    rows = [["one rank"], ["two ranks"]]
    for ranks, row in enumerate(rows, start=1):
        for engine in engines:
            if (engine, ranks) == ("stale-bsp", 1):
                row.append("as stale")  # one device is stock DDP whatever the policy
            else:
                counted, passed = results.starting(f"{engine}, {ranks} rank(s): passed of ")
                row.append(f"{passed:.0f} of {counted}")
    return _table(["passed", *engines.values()], rows)


def peers(results: Results) -> str:
    """Of docs/benchmarks.md: how soon the same loss is reached, by peer and devices."""
    found: dict[str, dict[str, str]] = {}
    for row in results.raw["rows"]:
        ratio = row["target_to_ddp"]
        found.setdefault(row["peer"], {})[row["cluster"]] = "not reached" if ratio is None else f"{1.0 / ratio:.2f}"
    clusters = list(dict.fromkeys(row["cluster"] for row in results.raw["rows"]))
    rows = [[peer, *(told.get(cluster, DASH) for cluster in clusters)] for peer, told in found.items()]
    return _table(["times as fast as stock DDP to the same validation loss", *clusters], rows)


BLOCKS: dict[str, tuple[str, Callable[[Results], str]]] = {
    "gain": ("balanced", gain),
    "seeds": ("demo", seeds),
    "headline": ("balanced", headline),
    "overview": ("balanced", overview),
    "goals": ("balanced", goals),
    "missed": ("balanced", missed),
    "balanced": ("balanced", balanced),
    "real work": ("balanced", real_work),
    "stale": ("stale", stale),
    "pipeline": ("pipeline", pipeline),
    "pipeline besides": ("pipeline", pipeline_besides),
    "joint": ("joint", joint),
    "predictions": ("planner", predictions),
    "published": ("planner", published),
    "federated": ("federated", federated),
    "peers": ("peers", peers),
    "goodput": ("faults", goodput),
    "own tests": ("drop_in", own_tests),
    "faults": ("fault_matrix", fault_table),
    "faults hooks": ("fault_matrix", hook_table),
    "faults failing": ("fault_matrix", failing_list),
    "policies": ("stale", policies),
    "optimizers": ("stale", optimizers),
}
"""What a page's mark names -> the benchmark, and the text that is made of its results."""


def page_with(page: str, *, root: Path = ROOT, results_root: Path | None = None) -> str:
    """Returns a page with its blocks written anew.

    Args:
        page: path below ``root``.
        root: of the checkout.
        results_root: where ``benchmarks/`` with the results is; else ``root``.

    Raises:
        KeyError: an unknown block, or a figure that is not in the results.
    """

    def written(match: re.Match[str]) -> str:
        benchmark, text = BLOCKS[match["name"]]
        known = benchmark in measured(results_root or root)
        said = text(Results(benchmark, results_root or root)) if known else "There are no results yet."
        return f"{match[1]}\n{said}\n\n{match[3]}"

    return _BLOCK.sub(written, (root / page).read_text(encoding="utf-8"))


if __name__ == "__main__":
    for _page in PAGES:
        (ROOT / _page).write_text(page_with(_page), encoding="utf-8")
