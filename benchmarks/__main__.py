"""``python -m benchmarks [--quick] [--fresh] [names...]``: all ten, one after the other: some three hours.

Each benchmark is a process of its own and prints what it takes. A run that was stopped goes on: what is
through, with the code as it is, is not run again, and of the one that was stopped only the cases that are missing;
``--fresh`` begins anew. A benchmark that fails does not stop the others. In the end the results pages, the tables of
README.md and ``docs/`` and the pictures are written. ``--quick`` is a smoke test: few and short cases, of two
benchmarks at a time, whose results stay in ``.cache/``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.kit.minutes import MINUTES
from benchmarks.provenance import ROOT, provenance

STATE = ROOT / "benchmarks" / ".cache" / "evening.json"
WRITERS = ("benchmarks.report", "benchmarks.tables", "benchmarks.pictures")
Start = Callable[[Sequence[str]], int]


def start(command: Sequence[str]) -> int:
    """Runs ``python -m command`` and returns its code."""
    return subprocess.run([sys.executable, "-m", *command], cwd=ROOT).returncode


def there(root: Path = ROOT) -> list[str]:
    """Returns the benchmarks that there are, in the order of an evening."""
    return [name for name in MINUTES if (root / "benchmarks" / name / "__main__.py").is_file()]


def evening(
    names: Sequence[str], *, quick: bool, state: Path = STATE, run: Start = start,
    digest: Callable[[str], str] = lambda name: provenance(name)["digest"],
) -> list[str]:  # fmt: skip
    """Runs these benchmarks and returns those that failed.

    Args:
        names: in this order.
        quick: passed on; these are two at a time, because no time counts.
        state: file that says what is through; none of a quick run.
        run: starts a module with arguments and returns its code.
        digest: of a benchmark's code.
    """
    done: dict[str, str] = json.loads(state.read_text()) if state.exists() and not quick else {}
    began_s = time.monotonic()

    def succeeds(number: int, name: str) -> bool:
        code = digest(name)
        passed = f"{(time.monotonic() - began_s) / 60:.0f} min so far"
        if done.get(name) == code:
            print(f"== {number}/{len(names)} {name}: is through", flush=True)
            return True
        share = "" if quick else f", it takes some {MINUTES[name]} min"
        print(f"== {number}/{len(names)} {name} ({passed}{share})", flush=True)
        if run([f"benchmarks.{name}", *(["--quick"] if quick else [])]):
            return False
        if not quick:
            done[name] = code
            state.parent.mkdir(parents=True, exist_ok=True)
            state.write_text(json.dumps(done))
        return True

    with ThreadPoolExecutor(2) as pool:
        ran = (pool.map if quick else map)(succeeds, range(1, len(names) + 1), names)
        failed = [name for name, succeeded in zip(names, ran, strict=True) if not succeeded]
    if not quick and not failed:  # the next call measures these anew
        state.write_text(json.dumps({name: code for name, code in done.items() if name not in names}))
        failed += [writer for writer in WRITERS if run([writer])]
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="name", help=f"some of {', '.join(there())}; else all")
    parser.add_argument("--quick", action="store_true", help="few and short cases of each, ten minutes in all")
    parser.add_argument("--fresh", action="store_true", help="also what is through already")
    said = parser.parse_args()
    if unknown := set(said.names) - set(there()):
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}: choose from {', '.join(there())}")
    if said.fresh:
        STATE.unlink(missing_ok=True)
    if failed := evening(said.names or there(), quick=said.quick):
        sys.exit(f"failed: {', '.join(failed)}; the same command goes on with what is missing")


if __name__ == "__main__":
    main()
