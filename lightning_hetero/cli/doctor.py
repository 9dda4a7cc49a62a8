"""``lightning-hetero-doctor``: will this machine and this setting train, and what to do if not (layer A).

The exit code is 1 if something will not train.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from lightning_hetero.cli.command import command_parser
from lightning_hetero.doctor.checks import examine
from lightning_hetero.doctor.facts import findings_text, worst


def _parser() -> argparse.ArgumentParser:
    made = command_parser(
        "doctor",
        "Will this machine and this setting train, and what to do if not? The exit code is 1 if something will not.",
        ["", "--module my_package.model:Model --data my_package.data:Data --devices 2", "--accelerator cpu --json"],
    )
    made.add_argument("--module", help="import path of a LightningModule, pkg.mod:Name: its gradients are compared")
    made.add_argument("--data", help="import path of its DataModule, DataLoader or Dataset")
    made.add_argument("--backbone", help="attribute that holds the layers, as in strategy=hetero_pipeline")
    made.add_argument("--devices", type=int, help="of the Trainer, per node; default: all there are")
    made.add_argument("--num-nodes", type=int, help="of the Trainer")
    made.add_argument("--accelerator", choices=("auto", "cpu", "gpu"), default="auto", help="of the Trainer")
    made.add_argument(
        "--global-batch", type=int, help="samples per update; default: the loader's batch size times the devices"
    )
    made.add_argument("--no-probe", dest="probe", action="store_false", help="do not measure speeds and links")
    made.add_argument("--json", action="store_true", help="print findings as JSON")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``lightning-hetero-doctor`` and ``python -m lightning_hetero.cli.doctor``; returns its code."""
    asked = _parser().parse_args(arguments)
    from lightning_hetero.cli.machine import find_out  # imports torch, which --help does not need

    findings = examine(find_out(asked))
    level = worst(findings)
    if asked.json:
        print(json.dumps({"level": level, "findings": [asdict(finding) for finding in findings]}, indent=1))
    else:
        print(findings_text(findings))
    return 1 if level == "fail" else 0


if __name__ == "__main__":
    sys.exit(main())
