"""Starts a script in ranks on simulated GPUs, for trying things.

    python -m tests.simgpu.run [--nccl] [--serial] [--at-once] [--gpus N] RANKS script.py [arguments]

Each rank runs the script as ``__main__`` with torchrun's variables and writes to the screen; races and orders that
may hang NCCL are told at the end.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

from tests.simgpu import sim
from tests.simgpu.harness import run_sim_ranks


def _play(rank: int, world: int, script: str, arguments: list[str]) -> None:
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nccl", action="store_true", help='"nccl" is a backend, with NCCL\'s rules')
    parser.add_argument("--serial", action="store_true", help="kernels of communicators run one after the other")
    parser.add_argument("--at-once", action="store_true", help="copies deliver at once, and nobody looks for races")
    parser.add_argument("--gpus", type=int, help="devices; fewer than ranks: they share")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds")
    parser.add_argument("ranks", type=int)
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    if reason := sim.why_not():
        parser.error(reason)
    run_sim_ranks(
        asked.ranks, _play, str(Path(asked.script).resolve()), asked.arguments, gpus=asked.gpus, nccl=asked.nccl,
        serial=asked.serial, asynchronous=not asked.at_once, timeout_s=asked.timeout, screen=True,
    )  # fmt: skip


if __name__ == "__main__":
    from tests.simgpu import run

    run.main()  # not this module's: ranks import the job by its module's name
