"""Real interference: two ranks, a core each, and busy loops on one of the cores; nothing is emulated. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.kit.figures import Figure, markdown, named, paired

LEAST = 1.7  # of 2, what is possible beside two loops
NEVER = 1.05  # without any
NOTES = (
    "**Real work.** Two ranks, pinned to a core each, train a GPT-2 of transformers (0.6 M parameters) and a CNN of six"
    " convolutions, beside no, one or two busy loops on rank 1's core: all the time, or on every other stretch of 40"
    " steps, the same steps for every engine. Nothing is emulated. The system gives each of three processes on the core"
    " a third of it. So equal shares take 3 times as long as on a free core, and the best ones 3/2 times if the"
    " exchange of gradients costs nothing: half of DDP's time. *static split*: the best fixed shares in hindsight, told"
    " beforehand, with stock DDP. *free core alone*: rank 0 trains the whole global batch, rank 1 does nothing. DDP's"
    " time over the engine's in the same turn, median over the turns, each of which begins with another engine, from"
    " the first epoch's start on; *steady*: mean of the steps from the tenth on."
)
KEPT = {"whole_s": "whole run", "steady_s": "steady"}
Busy = Mapping[str, Mapping[str, Mapping[str, list[float]]]]


def figures(raw: Busy) -> list[Figure]:
    """Returns DDP's time over each engine's."""
    found: list[Figure] = []
    for case, runs in raw.items():
        for name in (name for name in runs if name != "DDP"):
            for kept, words in KEPT.items():
                if name == "stale" and kept == "steady_s":
                    continue  # its ranks pass batches in bursts: only the whole tells
                goal: dict[str, Any] = {}
                if (name, kept) == ("balanced", "steady_s") and "two busy loops, all" in case:
                    goal = {"least": LEAST}
                gain = paired(runs["DDP"][kept], runs[name][kept])
                found.append(named(case)(f"DDP / {name}, {words}", gain, "x", **goal))
        if "no busy loop" in case and "balanced" in runs:
            lost = paired(runs["balanced"]["whole_s"], runs["DDP"]["whole_s"])
            found.append(named(case)("balanced / DDP, whole run", lost, "x", most=NEVER))
    return found


def table(raw: Busy) -> str:
    """Returns the gains, whole run and steady, as a Markdown table."""
    engines = [name for name in dict.fromkeys(name for runs in raw.values() for name in runs) if name != "DDP"]
    kept = "whole_s"

    def gains(runs: Mapping[str, Mapping[str, list[float]]]) -> list[float | None]:
        return [paired(runs["DDP"][kept], runs[name][kept]) if name in runs else None for name in engines]

    return markdown(["DDP's time / time, whole run", *engines], [[case, *gains(runs)] for case, runs in raw.items()])
