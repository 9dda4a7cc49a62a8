"""``python -m benchmarks.tables``: writes the measured tables of README.md and docs/ from the results files.

A page holds ``<!-- NAME: python -m benchmarks.tables -->``, the text and ``<!-- end -->``; `BLOCKS` says what NAME is.
Every number between these lines is read from a ``benchmarks/*/results.json``, whose figures are called by their names:
one that is no longer there is an error, not a gap.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.provenance import ROOT

__all__ = ["BLOCKS", "PAGES", "Results", "page_with"]

PAGES = ("README.md", "docs/theory/stale.md", "docs/theory/federated.md")
_BLOCK = re.compile(r"(<!-- (?P<name>[\w ]+): python -m benchmarks\.tables -->\n).*?(<!-- end -->)", re.S)
_DASH = "–"


class Results:
    """What one benchmark has measured.

    Args:
        name: of the benchmark.
        root: of the checkout.
    """

    def __init__(self, name: str, root: Path = ROOT) -> None:
        report = json.loads((root / "benchmarks" / name / "results.json").read_text(encoding="utf-8"))
        self.name, self.raw = name, report["raw"]
        self._figures: dict[str, float] = {figure["name"]: figure["value"] for figure in report["figures"]}

    def __getitem__(self, figure: str) -> float:
        """Returns the value of a figure.

        Raises:
            KeyError: there is none of this name.
        """
        if figure not in self._figures:
            raise KeyError(f"benchmarks/{self.name}/results.json has no figure {figure!r}: mend benchmarks/tables.py")
        return self._figures[figure]

    def text(self, figure: str, form: str) -> str:
        """Returns a value in a format, e.g. ``{:.0f} ms``; a dash where there is no such figure."""
        return form.format(self._figures[figure]) if figure in self._figures else _DASH

    def cases(self, ending: str) -> list[str]:
        """Returns what stands before ``ending`` in the names of figures, in their order.

        Raises:
            KeyError: no name ends like this.
        """
        found = [name.removesuffix(ending) for name in self._figures if name.endswith(ending)]
        if not found:
            raise KeyError(f"no figure in benchmarks/{self.name}/results.json ends with {ending!r}")
        return found

    def starting(self, beginning: str) -> tuple[str, float]:
        """Returns the one figure whose name begins like this: the rest of the name, and its value."""
        ((name, value),) = [(n, v) for n, v in self._figures.items() if n.startswith(beginning)]
        return name.removeprefix(beginning), value


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


def balanced(results: Results) -> str:
    """Of README: every case with its gain, and what equal devices pay."""
    rows = []
    for case in sorted(results.cases(": speed-up over DDP"), key=lambda case: int(case.split()[0])):  # by ranks
        bias = results.text(f"{case}: static uneven sampler, unweighted: relative gradient error", "{:.2f}")
        rows.append([
            case,
            f"{results[f'{case}: stock DDP step']:.0f} ms",
            f"{results[f'{case}: our step']:.0f} ms",
            f"{results[f'{case}: speed-up over DDP']:.2f}x",
            results.text(f"{case}: time saved over DDP, whole run", "{:.0f} %"),
            f"{results[f'{case}: fraction of ideal, gross']:.2f} / {results[f'{case}: fraction of ideal, net']:.2f}",
            f"{results[f'{case}: relative gradient error, first step']:.0e} / {bias}",
        ])  # fmt: skip
    head = ["emulated devices", "DDP step", "ours", "speed-up", "time saved, whole run", "of the ideal, gross / net",
            "gradient error: ours / static unweighted split"]  # fmt: skip
    (swapped,) = results.cases(": steps to 5% of ideal after swap")
    equal = [f"{results[f'{case}: ours / DDP']:.2f} times ({case})" for case in results.cases(": ours / DDP")]
    steps = results[f"{swapped}: steps to 5% of ideal after swap"]
    critical_us = results["exchange + decision on the critical path, 4 ranks, gloo"]
    after = results.text(f"{swapped}: our step, steady after swap", "; a steady step then takes {:.0f} ms").strip(_DASH)
    return _joined(
        _table(head, rows),
        f"After the swap the shares are right again {steps:.0f} steps later{after}. On *equal* devices a step takes,"
        f" compared to stock DDP's, {', '.join(equal)}; exchange and decision cost {critical_us:.0f} us of the critical"
        " path.",
    )


def stale(results: Results) -> str:
    """Of README: both tasks, by cluster."""
    tasks = ("digits CNN", "text transformer")
    names = {
        "equal": "4 equal ranks",
        "spells": "slow spells (6x slower, a quarter of the time)",
        "one killed": "one rank killed half-way",
    }
    rows = []
    for cluster in dict.fromkeys(row["cluster"] for row in results.raw["real"]):
        cells = [
            [results.text(f"real, {task}, {cluster}: {what}", "{:.2f}") for task in tasks]
            for what in ("time to DDP", "time to balanced", "final loss to DDP's")
        ]
        words = ["DDP's job ends; ours ends its schedule on the other three", "", ""]
        known = cells[0] != [_DASH, _DASH]
        rows.append([names.get(cluster, cluster), *([" / ".join(pair) for pair in cells] if known else words)])
    head = ["emulated devices", "`hetero_stale`: time to DDP, digits CNN / transformer", "to `hetero_balanced`",
            "final loss to DDP"]  # fmt: skip
    oldest = max(row["max_staleness"] for row in results.raw["real"] if row["engine"] == "flexible")
    losses = [results[f"{case}: final loss to DDP's"] for case in results.cases(": final loss to DDP's")
              if case.startswith("simulated")]  # fmt: skip
    return _joined(
        _table(head, rows),
        f"No contribution was more than {oldest} versions old. The simulated half (all policies, twelve seeds) has the"
        f" losses as well: up to {max(losses):.1f} times DDP's final loss, where the learning rate sits at the edge of"
        " stability.",
    )


def stale_real(results: Results) -> str:
    """Of docs/theory/stale.md: real processes."""
    every = {(row["task"], row["cluster"], row["engine"]): row for row in results.raw["real"]}
    rows = []
    for (task, cluster, engine), row in every.items():
        if engine != "flexible":
            continue
        ddp = every.get((task, cluster, "ddp"))
        ratios = [row["to_ddp"], row["to_balanced"], row["loss_to_ddp"]]
        rows.append([
            task,
            cluster,
            "ends" if ddp is None else f"{ddp['fit_s']:.1f} s",
            f"{row['fit_s']:.1f} s",
            *(_DASH if ratio is None else f"{ratio:.2f}" for ratio in ratios),
            f"{100 * row['stale_fraction']:.0f} %, {row['max_staleness']}",
        ])  # fmt: skip
    head = ["task", "devices", "stock DDP", "ours", "time to DDP", "to the balanced engine", "final loss to DDP",
            "stale samples, most versions"]  # fmt: skip
    return _table(head, rows)


def stale_simulated(results: Results) -> str:
    """Of docs/theory/stale.md: simulated time."""
    every = {(row["case"], row["policy"]): row for row in results.raw["simulated"]}
    edge = "MLP at the edge, momentum: loss to DDP"

    def losses(row: Mapping[str, Any]) -> list[float]:
        return [v for k, v in row.items() if k.endswith(": loss to DDP") and k != edge and v is not None]

    rows = []
    for (case, policy), row in every.items():
        if policy != "flexible":
            continue
        asp = every[case, "asp"]
        ratios = [f"{row[key]:.2f}" for key in ("to_bound", "to_ddp", "to_balanced")]
        ours, theirs = _span(losses(row)), _span(losses(asp), last="{:.1f}")
        rows.append([case, *ratios, ours, f"{row[edge]:.2f}", f"{asp['to_bound']:.2f}", theirs])
    head = ["workers", "time to bound", "to DDP", "to balanced", "final loss to DDP", "at the edge of stability",
            "`asp`: to bound", "`asp`: final loss"]  # fmt: skip
    return _table(head, rows)


def pipeline(results: Results) -> str:
    """Of README: every scenario."""
    rows = []
    for case in results.cases(": modelled / measured"):
        groups, saved = results.starting(f"{case}: less time than the best even pipeline (even, ")
        rows.append([
            case,
            f"{results[f'{case}: our step']:.0f} ms",
            f"{saved:.0f} % ({groups.rstrip(')')})",
            results.text(f"{case}: less time than the even chain", "{:.0f} %"),
            results.text(f"{case}, Lightning: less time than stock DDP", "{:.0f} %"),
            f"{results[f'{case}: modelled / measured']:.2f}",
        ])  # fmt: skip
    head = ["emulated devices, model", "our step", "less than the best even pipeline", "less than the even chain",
            "less than stock DDP", "modelled / measured"]  # fmt: skip
    return _table(head, rows)


def pipeline_besides(results: Results) -> str:
    """Of README: against the balanced engine and torch's pipelines, and the memory."""
    replicas = results["4 equal, gpt, Lightning: plain data parallelism, ours / balanced engine"]
    held = "memory-capped, mlp, Lightning: parameters, gradients, optimizer state"
    walker = ": the even chain by our walker / by torch.distributed.pipelining"
    chains = [results[f"{case}{walker}"] for case in results.cases(walker)]
    overhead = "4 equal stages, links free: ours / torch.distributed.pipelining"
    most, whole = results[f"{held}, most held / device's memory"], results[f"{held}, whole model / largest memory"]
    return _joined(
        "On four *equal* devices the best plan is plain data parallelism, and so is ours; there a step takes"
        f" {replicas:.2f} times the balanced engine's. Each rank of the memory-capped MLP holds at most {most:.2f} of"
        f" its device, the whole model is {whole:.1f} times as large. Our walker takes {_span(chains)} of"
        " `torch.distributed.pipelining`'s time on the scenarios' even chains; on four synthetic equal stages"
        f" {results[f'emulated, {overhead}']:.3f}, and {results[f'real work only, {overhead}']:.3f} where nothing is"
        " emulated and four processes share two cores (goal 1.05)."
    )


def predictions(results: Results) -> str:
    """Of README: how well each engine's model foretells what it is asked about."""
    kinds = {
        "own work, processor time": "own work, processor time",
        "own work": "own work, by the wall clock",
        "step": "step, by the wall clock",
    }
    rows = []
    for engine in ("balanced", "stale", "pipeline", "pipeline, one chain"):
        row = [engine]
        for kind in kinds:
            name = f"all models, {engine}: {kind}, predicted / measured"
            each = [results.text(f"{name}, {which}", "{:.2f}") for which in ("median", "least", "greatest")]
            row.append(_DASH if _DASH in each else "{} ({} to {})".format(*each))
        rows.append(row)
    loads = results.raw["load_before"]
    return _joined(
        _table(["predicted / measured", *kinds.values()], rows),
        f"Medians over the models, in brackets the least and the greatest of them; {len(loads)} starts of everything, a"
        f" core for each of two ranks. The load average was {_span(loads, '{:.0f}')} when they began: above two, other"
        " programs lengthen steps, which the wall clock counts and the processor time does not.",
    )


def federated(results: Results) -> str:
    """Of docs/theory/federated.md: every policy, by devices."""
    rows = []
    for case in results.cases(", final accuracy"):
        base = case.endswith(": fedavg")
        reached = results.text(f"{case}, runs that reach the target", "{:.0f}")
        rows.append([
            case.replace(": ", ": `", 1) + "`",
            results.text(f"{case}, time to target", "{:.0f} s" if base else "{:.2f} times that") + f" ({reached} runs)",
            f"{results[f'{case}, final accuracy']:.1f} %",
            results.text(f"{case}, final accuracy lost to fedavg", "{:.2f}"),
            results.text(f"{case}, accuracy lost after as many rounds", "{:.2f}"),
            f"{results[f'{case}, rounds']:.0f}",
            f"{100 * results[f'{case}, waiting']:.0f} %",
        ])  # fmt: skip
    head = ["devices: policy", "emulated time to 90 %", "final accuracy", "points lost to `fedavg`",
            "after as many rounds", "rounds", "waiting"]  # fmt: skip
    return _table(head, rows)


BLOCKS: dict[str, tuple[str, Callable[[Results], str]]] = {
    "balanced": ("balanced", balanced),
    "stale": ("stale", stale),
    "stale real": ("stale", stale_real),
    "stale simulated": ("stale", stale_simulated),
    "pipeline": ("pipeline", pipeline),
    "pipeline besides": ("pipeline", pipeline_besides),
    "predictions": ("planning_real", predictions),
    "federated": ("federated", federated),
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
        return f"{match[1]}\n{text(Results(benchmark, results_root or root))}\n\n{match[3]}"

    return _BLOCK.sub(written, (root / page).read_text(encoding="utf-8"))


if __name__ == "__main__":
    for _page in PAGES:
        (ROOT / _page).write_text(page_with(_page), encoding="utf-8")
