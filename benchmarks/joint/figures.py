"""From raw step times to figures and tables; no torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from benchmarks.joint.courses import CONTENDERS, ORACLE, OURS, REACTING, Course, played
from benchmarks.kit.figures import TAKEN, Figure, markdown, named, percentile

WITHIN = 1.25  # of the best time in a state: from there on a change is taken as answered
IN_A_ROW = 3
MOVING = 0.15  # batches per layer, in the base scenario
NOISE = 1.0  # two runs of the same differ by so much [%]


def steps_of(raw: Mapping[str, Any], name: str) -> list[float]:
    """Returns a contender's step times over the whole scenario [s]: measured, or made up of those of each state."""
    one = raw["measured"][name]
    if name in REACTING:
        return one["steps_s"]
    return played(raw["phases"], raw["unit"], raw["batches"], one["by_state_s"])


def answers(raw: Mapping[str, Any], steps: Sequence[float]) -> list[tuple[int, bool]]:
    """Returns for each change how many batches it took until three in a row were within 1.25 of the state's best.

    Returns:
        Batches, and whether it came so far before the next change, or the end; if not, all batches until then.
    """
    best_s = [statistics.median(times) for times in raw["measured"][ORACLE]["by_state_s"]]
    begins_s = [0.0, *accumulate(steps)]
    at = range(len(steps)) if raw["unit"] == "batch" else begins_s[:-1]
    starts = [next((i for i, when in enumerate(at) if when >= start), len(steps)) for start, _ in raw["phases"]]
    found: list[tuple[int, bool]] = []
    for (first, end), (_, state) in zip(pairwise([*starts[1:], len(steps)]), raw["phases"][1:], strict=True):
        good = [step_s <= WITHIN * best_s[state] for step_s in steps[first:end]]
        after = next((i for i in range(len(good)) if all(good[i : i + IN_A_ROW])), None)
        found.append((len(good) if after is None else after, after is not None))
    return found


def migrations(one: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the changes of plan for which layers moved."""
    return [replan for replan in one.get("replans", ()) if replan["kind"] != "shares" and not replan["cancelled"]]


def layer_batches(raw: Mapping[str, Any], one: Mapping[str, Any]) -> float | None:
    """Returns how long training stood still per layer that moved [batches of the first state]; None: none did."""
    moved, paused_s = sum(one.get("moved", ())), sum(replan["pause_s"] for replan in migrations(one))
    batch_s = statistics.median(raw["measured"][ORACLE]["by_state_s"][0])
    return paused_s / moved / batch_s if moved else None


def course_figures(course: Course, raw: Mapping[str, Any]) -> list[Figure]:
    """Holds the controller against all others."""
    put, whole = named(course.case.name), {name: sum(steps_of(raw, name)) for name in raw["measured"]}
    figures = [put("controller, all batches", whole[OURS], "s")]
    for name in (name for name in CONTENDERS if name in whole and name not in (OURS, ORACLE)):
        wanted = course.less_than.get(name)
        least = -NOISE if wanted == 0.0 else wanted  # as fast, within the noise
        figures.append(put(f"less time than {name}", 100.0 * (1.0 - whole[OURS] / whole[name]), "%", least=least))
    above = 100.0 * (whole[OURS] / whole[ORACLE] - 1.0)
    figures.append(put("above the oracle", above, "%", most=course.above_oracle))
    ours = raw["measured"][OURS]
    late = max(n for n, _ in answers(raw, steps_of(raw, OURS)))
    figures.append(put(f"batches until within {WITHIN:g} of the best, longest after a change", late, "batches"))
    figures.append(put("migrations", len(migrations(ours)), ""))
    each = layer_batches(raw, ours)
    if each is not None:
        most = MOVING if course.above_oracle is not None else None
        figures.append(put("moving a layer", each, "batches", most=most))
    taken = max(one["taken"] for one in raw["measured"].values())
    figures.append(put("emulated work, taken / asked, greatest of all", taken, "x", most=TAKEN))
    return figures


def table(titles: Mapping[str, str], every: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns all contenders of all scenarios, in Markdown.

    Args:
        titles: of the scenarios, by file.
        every: raw, likewise.
    """
    head = [
        "scenario", "contender", "all batches [s]", "mean [ms]", "median [ms]", "p95 [ms]", "longest [ms]",
        "modelled mean [ms]", "batches until within 1.25 of the best, by change", "migrations", "sent [MB]",
        "pauses [s]",
    ]  # fmt: skip
    rows: list[list[str]] = []
    for stem, raw in every.items():
        for name, one in raw["measured"].items():
            steps, moves = steps_of(raw, name), migrations(one)
            modelled = raw["modelled_s"].get(name)
            times = [statistics.mean(steps), statistics.median(steps), percentile(steps, 95), max(steps)]
            row = [titles[stem], name, f"{sum(steps):.1f}", *(f"{1e3 * t:.0f}" for t in times)]
            row.append("–" if modelled is None else f"{1e3 * modelled:.0f}")
            row.append(" ".join(f"{n}" if came else f"never in {n}" for n, came in answers(raw, steps)))
            if name in REACTING:
                sent, paused_s = sum(m["bytes"] for m in moves) / 1e6, sum(m["pause_s"] for m in moves)
                row += [str(len(moves)), f"{sent:.1f}", f"{paused_s:.2f}"]
            else:
                row += ["–"] * 3
            rows.append(row)
    return markdown(head, rows)
