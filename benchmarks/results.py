"""What a benchmark has measured, by the names of its figures: one that is no longer there is an error, not a gap."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.provenance import ROOT

DASH = "–"


def measured(root: Path = ROOT) -> list[str]:
    """Returns the names of the benchmarks that have results."""
    return sorted(path.parent.name for path in (root / "benchmarks").glob("*/results.json"))


def faster(less: float) -> float:
    """Returns how many times as fast something is that takes ``less`` less time [%]."""
    return 1.0 / (1.0 - less / 100.0)


class Results:
    """What one benchmark has measured.

    Args:
        name: of the benchmark.
        root: of the checkout.
    """

    def __init__(self, name: str, root: Path = ROOT) -> None:
        report = json.loads((root / "benchmarks" / name / "results.json").read_text(encoding="utf-8"))
        self.name, self.root, self.raw = name, root, report["raw"]
        self.title: str = report["title"]
        self.rows: list[dict[str, Any]] = report["figures"]
        self.figures: dict[str, dict[str, Any]] = {figure["name"]: figure for figure in self.rows}

    def __getitem__(self, figure: str) -> float:
        """Returns the value of a figure.

        Raises:
            KeyError: there is none of this name.
        """
        return self._figure(figure)["value"]

    def __contains__(self, figure: str) -> bool:
        return figure in self.figures

    def _figure(self, figure: str) -> dict[str, Any]:
        if figure not in self.figures:
            raise KeyError(f"benchmarks/{self.name}/results.json has no figure {figure!r}: mend what asks for it")
        return self.figures[figure]

    def text(self, figure: str, form: str) -> str:
        """Returns a value in a format, e.g. ``{:.0f} ms``; a dash where there is no such figure."""
        return form.format(self[figure]) if figure in self else DASH

    def cases(self, ending: str) -> list[str]:
        """Returns what stands before ``ending`` in the names of figures, in their order.

        Raises:
            KeyError: no name ends like this.
        """
        found = [name.removesuffix(ending) for name in self.figures if name.endswith(ending)]
        if not found:
            raise KeyError(f"no figure in benchmarks/{self.name}/results.json ends with {ending!r}")
        return found

    def starting(self, beginning: str) -> tuple[str, float]:
        """Returns the one figure whose name begins like this: the rest of the name, and its value."""
        (name,) = [name for name in self.figures if name.startswith(beginning)]
        return name.removeprefix(beginning), self[name]

    def other(self, name: str) -> Results:
        """Returns another benchmark's of the same checkout."""
        return Results(name, self.root)
