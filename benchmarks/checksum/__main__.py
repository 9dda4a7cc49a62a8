"""``python -m benchmarks.checksum [--quick]``: what `check_parameters_every` costs a rank per optimizer step, on a CPU.

Ten million float32 parameters, one thread. *step*: summing a part of them; *take*: the number that travels, once per
exchange. Nothing else is added to a step: it travels with the measurements.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import write_results
from benchmarks.steps import percentile
from lightning_hetero.balanced.runtime.checksum import ParameterChecksum
from lightning_hetero.measure.device import device_of


def measure(every: int, steps: int) -> dict[str, list[float]]:
    """Returns seconds of each step and take."""
    parameters = [torch.randn(1000, 1000) for _ in range(10)] + [torch.randn(1000) for _ in range(10)]
    checksum = ParameterChecksum(every, lambda: parameters, device=device_of("cpu"))
    taken: dict[str, list[float]] = {"step": [], "take": []}
    for _ in range(steps):
        for name, call in (("step", checksum.stepped), ("take", checksum.take)):
            before_s = time.perf_counter()
            call()
            taken[name].append(time.perf_counter() - before_s)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder for results.json, results.md")
    args = parser.parse_args()
    torch.set_num_threads(1)
    figures: list[dict[str, Any]] = []
    raw: dict[str, Any] = {}
    for every in (100, 1000, 10000):
        taken = measure(every, 300 if args.quick else 3000)
        for name, seconds in taken.items():
            spread = {f"p{percent}": percentile(seconds, percent) * 1e6 for percent in (10, 50, 90)}
            raw[f"check_parameters_every={every}: {name}"] = spread
            figures += [
                {"name": f"check_parameters_every={every}: {name}, {which}", "value": value, "unit": "us", "goal": None,
                 "holds": None}
                for which, value in spread.items()
            ]  # fmt: skip
    write_results(args.out, title="Checksum of 10 million parameters", figures=figures, raw=raw)


if __name__ == "__main__":
    main()
