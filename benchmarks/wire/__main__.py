"""``python -m benchmarks.wire [--quick] [--namespaces]``: a message between two stages beside gloo's send and receive.

Two processes, one thread each, over the loopback device, or with ``--namespaces`` each in a network of its own, joined
by a pair of virtual devices (needs root and ``ip``). The two ways take turns, message by message. *Takes*: half of the
way there and back.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.report import write_results
from benchmarks.torchrun import launch

NOTES = (
    "Two processes, one thread each besides gloo's. *gloo*: `dist.send` and `dist.recv` of a tensor that is there."
    " *link*: a message of the pipeline engine: packed with its place in the step, received into new memory.\n"
)
GOAL = 2.0
NODES = {"lh-wire-0": "10.87.0.1", "lh-wire-1": "10.87.0.2"}


def ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=not check)


def in_namespaces(rounds: int) -> dict[str, Any]:
    """Returns what `launch` would, with each rank in a network of its own."""
    first, second = NODES
    try:
        for node in NODES:
            ip("netns", "add", node)
        ip("link", "add", "lhw0", "netns", first, "type", "veth", "peer", "name", "lhw1", "netns", second)
        for i, (node, address) in enumerate(NODES.items()):
            ip("-n", node, "addr", "add", f"{address}/24", "dev", f"lhw{i}")
            for device in (f"lhw{i}", "lo"):
                ip("-n", node, "link", "set", device, "up")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "result.json"
            ranks = []
            for i, node in enumerate(NODES):
                given = {"MASTER_ADDR": NODES[first], "MASTER_PORT": "29511", "RANK": str(i), "WORLD_SIZE": "2"}
                command = [sys.executable, "-m", "benchmarks.wire.ranks", str(path), str(rounds)]
                environment = {**os.environ, **given, "GLOO_SOCKET_IFNAME": f"lhw{i}"}
                ranks.append(subprocess.Popen(["ip", "netns", "exec", node, *command], env=environment))
            if any([rank.wait() for rank in ranks]):
                raise RuntimeError("a rank failed")
            return json.loads(path.read_text())
    finally:
        for node in NODES:
            ip("netns", "del", node, check=False)


def figures(raw: dict[str, dict[str, dict[str, list[float]]]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for net, sizes in raw.items():
        for size, ways in sizes.items():
            of = {way: (statistics.median(s), statistics.quantiles(s, n=20)[-1]) for way, s in ways.items()}
            for i, name in enumerate(("median", "95 % in")):
                for way, both in of.items():
                    found.append({"name": f"{net}, {size}, {way}: {name}", "value": both[i] * 1e3, "unit": "ms",
                                  "goal": None, "holds": None})  # fmt: skip
                ratio = of["link"][i] / of["gloo"][i]
                found.append({"name": f"{net}, {size}: link / gloo, {name}", "value": ratio, "unit": "x",
                              "goal": f"<= {GOAL:g}", "holds": ratio <= GOAL})  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the messages")
    parser.add_argument("--namespaces", action="store_true", help="between two network namespaces, too")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder for results.json, results.md")
    args = parser.parse_args()
    rounds = 200 if args.quick else 2000
    raw = {"loopback": launch("benchmarks.wire.ranks", 2, rounds)}
    if args.namespaces:
        raw["two networks"] = in_namespaces(rounds)
    write_results(args.out, title="A message between two stages", figures=figures(raw), raw=raw, notes=NOTES)


if __name__ == "__main__":
    main()
