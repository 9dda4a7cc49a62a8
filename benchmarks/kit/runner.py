"""One runner for all benchmarks: cases one after the other, each kept when it is through, then figures and results."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.kit import load
from benchmarks.kit.figures import Figure
from benchmarks.kit.minutes import MINUTES
from benchmarks.provenance import ROOT, provenance
from benchmarks.report import write_results

Raw = dict[str, Any]
Cases = Mapping[str, Callable[[], Any]]


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One of the ten.

    Attributes:
        name: of its folder.
        title: of its page.
        repeats: of each case.
        cases: told whether it is a quick run, and the repeats; returns what measures each case, by name: plain JSON
            values come of it. A case is the unit that a run that was stopped goes on with.
        report: told what each case has given, and whether it is quick; returns figures, raw values, notes.
    """

    name: str
    title: str
    repeats: int
    cases: Callable[[bool, int], Cases]
    report: Callable[[Raw, bool], tuple[list[Figure], Raw, str]]

    def main(self, arguments: list[str] | None = None) -> None:
        """Measures and writes.

        Raises:
            SystemExit: other programs are at work, so committed results are not replaced.
        """
        parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{self.name}", description=self.title)
        parser.add_argument("--quick", action="store_true", help="few and short cases, about a minute; see --out")
        parser.add_argument("--repeats", type=int, default=self.repeats, help="of each case")
        parser.add_argument("--only", default="", metavar="WORDS", help="cases whose names hold this; see --out")
        parser.add_argument("--out", type=Path, help="folder of the results; else its own, of a part .cache")
        said = parser.parse_args(arguments)
        home = ROOT / "benchmarks" / self.name
        whole = not (said.quick or said.only)  # nothing less replaces the results that are kept
        out = said.out or (home if whole else home / ".cache" / self.name)
        repeats = 1 if said.quick else said.repeats
        cases = {name: run for name, run in self.cases(said.quick, repeats).items() if said.only in name}
        if not cases:
            sys.exit(f"no case of {self.name} has {said.only!r} in its name")
        kept = Kept(home / ".cache" / f"{provenance(self.name)['digest']}.jsonl")
        began_s, loads, found = time.monotonic(), list[float](), Raw()
        for number, (name, run) in enumerate(cases.items(), 1):
            key = json.dumps([name, said.quick, repeats])
            again = " (kept)" if key in kept else ""
            at = f"{(time.monotonic() - began_s) / 60:.1f} of {MINUTES.get(self.name, 0)} min"
            print(f"[{self.name} {number}/{len(cases)}, {at}] {name}{again}", flush=True)
            one = kept(key, lambda run=run: {"load": _load(out == home, said.quick), "found": run()})
            loads.append(one["load"])
            found[name] = one["found"]
        after = load.others()
        if out == home and max(after, *loads) > load.MOST:
            out = home / ".cache" / self.name
            print(f"others were at work ({max(after, *loads):.1f} tasks): what was measured is in {out}", flush=True)
        figures, raw, notes = self.report(found, said.quick)
        write_results(
            out, title=self.title, figures=figures, raw=raw, notes=notes, load={"before": max(loads), "after": after}
        )
        kept.forget()


def _load(committed: bool, quick: bool) -> float:
    found = load.others(2) if quick else load.quiet() if committed else load.others()
    if committed and found > load.MOST:
        sys.exit(f"{found:.1f} other tasks are at work, at most {load.MOST:g}: committed results are not replaced")
    return found


class Kept:
    """Plain values by what they were computed for, a line each in a file, so that a run can be stopped and go on.

    Args:
        path: of the file; made if there is none. A last line that was cut short does not count.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._known = path, Raw()
        path.parent.mkdir(parents=True, exist_ok=True)
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            try:
                self._known.update([json.loads(line)])
            except json.JSONDecodeError:
                continue

    def __contains__(self, key: str) -> bool:
        return key in self._known

    def __call__(self, key: str, compute: Callable[[], Any]) -> Any:
        """Returns what is known, or computes and keeps it."""
        if key not in self._known:
            line = json.dumps([key, compute()])
            with self._path.open("a", encoding="utf-8") as out:
                out.write("\n" * self._cut() + line + "\n")
            self._known.update([json.loads(line)])  # as it will be read again
        return self._known[key]

    def _cut(self) -> bool:
        text = self._path.read_text(encoding="utf-8") if self._path.exists() else ""
        return bool(text) and not text.endswith("\n")

    def forget(self) -> None:
        """All is measured: the next run begins anew."""
        self._path.unlink(missing_ok=True)
