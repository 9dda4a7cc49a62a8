"""Pictures of what is measured, for README.md and docs/; ``python -m benchmarks.pictures`` writes them all.

A picture is drawn from the committed results of one benchmark, and only if there are any.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.pictures import engines, others, steps
from benchmarks.pictures.sheet import BOTH, Paper, Picture, svg
from benchmarks.provenance import ROOT
from benchmarks.results import Results, measured

FOLDER = "docs/pictures"

PICTURES: dict[str, tuple[str, Callable[[Results], Picture], Paper]] = {
    "timeline-light": ("balanced", steps.timeline, "light"),
    "timeline-dark": ("balanced", steps.timeline, "dark"),
    "shares": ("balanced", steps.shares, BOTH),
    "balanced": ("balanced", engines.balanced, BOTH),
    "federated": ("federated", engines.federated, BOTH),
    "joint": ("joint", others.joint, BOTH),
    "peers": ("peers", others.peers, BOTH),
    "pipeline": ("pipeline", engines.pipeline, BOTH),
    "planner": ("planner", others.planner, BOTH),
    "stale": ("stale", engines.stale, BOTH),
}
"""File -> the benchmark it is drawn from, what draws it, and for which paper."""


def files(root: Path = ROOT) -> dict[str, str]:
    """Returns the pictures of all results that there are: name of the file -> SVG."""
    known = measured(root)
    return {
        f"{name}.svg": svg(draw(Results(benchmark, root)), paper)
        for name, (benchmark, draw, paper) in PICTURES.items()
        if benchmark in known
    }
