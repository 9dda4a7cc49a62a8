"""What needs neither torch nor Lightning starts without them; names are registered whoever is imported first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import lightning_hetero
from lightning_hetero import public

ROOT = Path(__file__).parents[2]
HEAVY = "[m for m in ('torch', 'lightning', 'torchmetrics') if m in sys.modules]"
MADE = "print(type(StrategyRegistry.get('hetero_stale_find_unused_parameters_true')).__name__)"


def said(program: str) -> str:
    """Returns what a program prints in a fresh Python."""
    done = subprocess.run(
        [sys.executable, "-c", f"import gc, sys; gc.disable()\n{program}"],
        capture_output=True, text=True, cwd=ROOT, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_reading_a_trace_and_planning_need_no_torch() -> None:
    imports = "import lightning_hetero.cli.report, lightning_hetero.plan.planner, lightning_hetero.doctor.training"
    assert said(f"{imports}; print({HEAVY})") == "[]\n"


def test_names_are_registered_when_lightning_is_imported_later() -> None:
    """From inside one of our own modules, even, of which another is half imported then."""
    first = "import lightning_hetero.balanced.strategy; from lightning.pytorch.strategies import StrategyRegistry"
    assert said(f"{first}; {MADE}") == "BoundedStalenessStrategy\n"


def test_a_command_line_finds_the_classes_by_their_names() -> None:
    """`jsonargparse` looks for them among the classes that are imported."""
    program = """
import lightning_hetero
from jsonargparse import ArgumentParser
from lightning.pytorch.strategies import Strategy
parser = ArgumentParser()
parser.add_argument("--strategy", type=Strategy)
print(parser.parse_args(["--strategy=LoadBalancedStrategy", "--strategy.global_batch_size=64"]).strategy.class_path)
"""
    assert said(program) == "lightning_hetero.LoadBalancedStrategy\n"


def test_public_names_are_those_of_the_package() -> None:
    named = {name for name in vars(public) if not name.startswith("_")} | {"__version__"}
    assert set(lightning_hetero.__all__) == named <= set(dir(lightning_hetero))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        lightning_hetero.__getattr__("nothing")
