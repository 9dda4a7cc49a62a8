"""``python -m benchmarks.replanning [--quick]``: how fast the pipeline engine answers, and how long a change holds up.

- *healing*: four ranks, 1:1:1/2:1/4 by sleeps in the user's own layers, reversed after 20 of 40 batches. Steps of the
  last batches before the change and of the last of all, against the ideal: all devices busy all the time. Beside it
  stock DDP on equal devices of the mean speed, which sleep exactly the ideal: what the machine makes of the ideal.
- *pause*: layers with Adam's state change hands between two ranks; against 1.5 times what gloo needs to send as many
  bytes in one piece, in the same run, plus 50 ms.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from benchmarks.replanning import healing
from benchmarks.report import write_results
from benchmarks.torchrun import launch

HEALED, ALLOWED, ALLOWED_S = 1.25, 1.5, 0.05
AFTER = 10  # batches to heal in


def healing_figures(raw: dict[str, dict[str, list[list[float]]]]) -> list[dict[str, Any]]:
    """Medians of the steps from the eleventh after the start, and after the change, over the ideal; and of what the
    processor is needed for besides the sleeps."""
    figures: list[dict[str, Any]] = []
    for engine, runs in raw.items():
        for when, first, end in (("", AFTER, healing.TURN), (", reversed", healing.TURN + AFTER, healing.BATCHES)):
            value = statistics.median(statistics.median(run[first:end]) for run in runs["steps_s"]) / healing.IDEAL_S
            ours = engine == "ours"
            figures.append(
                {
                    "name": f"healing, {engine}{when}: step / ideal",
                    "value": value,
                    "unit": "x",
                    "goal": f"<= {HEALED:g}" if ours else None,
                    "holds": value <= HEALED if ours else None,
                }
            )
    for engine, runs in raw.items():
        used_ms = statistics.median(statistics.median(run[AFTER:]) for run in runs["used_s"]) * 1e3
        name = f"healing, {engine}: processor per batch and rank"
        figures.append({"name": name, "value": used_ms, "unit": "ms", "goal": None, "holds": None})
    return figures


def pause_figures(raw: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Medians over the moves but the first, whose memory is new."""
    figures: list[dict[str, Any]] = []
    for size, rows in raw.items():
        rows = rows[1:]
        pauses_s, sent_s = ([row[key] for row in rows] for key in ("pause_s", "sent_s"))
        allowed = [row["pause_s"] / (ALLOWED * row["sent_s"] + ALLOWED_S) for row in rows]
        value = statistics.median(allowed)
        figures += [
            {"name": f"pause, {size}: {name}", "value": found, "unit": unit, "goal": None, "holds": None}
            for name, found, unit in (
                ("the move", statistics.median(pauses_s) * 1e3, "ms"),
                ("as many bytes by gloo", statistics.median(sent_s) * 1e3, "ms"),
            )
        ]
        name = f"pause, {size}: the move / allowed"
        figures.append({"name": name, "value": value, "unit": "x", "goal": "<= 1", "holds": value <= 1.0})
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one run per engine, two moves; under a minute")
    parser.add_argument("--repeats", type=int, default=5, help="runs per engine; moves are four times as many")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder for results.json, results.md")
    args = parser.parse_args()
    repeats = 1 if args.quick else args.repeats
    raw = {
        "healing": launch("benchmarks.replanning.healing", healing.RANKS, repeats),
        "pause": launch("benchmarks.replanning.pause", 2, 3 if args.quick else 4 * repeats),
    }
    notes = (
        f"Healing: {healing.LAYERS} layers, a global batch of {healing.SAMPLES} samples, the ideal step is"
        f" {healing.IDEAL_S * 1e3:.1f} ms; medians over runs of medians over the batches from the eleventh on, of the"
        " slowest rank's batch. Four processes share two cores, all but the sleeps is real. Pause: two processes on two"
        f" cores; allowed is {ALLOWED:g} times the time of the bytes plus {ALLOWED_S * 1e3:g} ms, of the same turn;"
        " medians but for the first turn. A move sends the same bytes with names and shapes, and puts"
        " them where parameters and optimizer keep them."
    )
    figures = [*healing_figures(raw["healing"]), *pause_figures(raw["pause"])]
    write_results(args.out, title="Changes of plan: healing and pause", figures=figures, raw=raw, notes=notes)


if __name__ == "__main__":
    main()
