"""What needs neither torch nor Lightning starts without them; names are registered whoever is imported first."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import lightning_hetero
from lightning_hetero import public
from lightning_hetero.cli.command import CONF

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
    imports = "import lightning_hetero.cli.report, lightning_hetero.plan.planner, lightning_hetero.doctor.checks"
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


HELPED = """
import contextlib
from lightning_hetero.cli import command, doctor, report
for flag in ("--version", "--help"):
    for main in (command.train, command.plan, lambda: doctor.main([flag]), lambda: report.main([flag])):
        sys.argv[1:] = [flag]
        with contextlib.suppress(SystemExit):
            main()
        print("----")
"""
INTERNAL = r"\blayer [A-Z]\b|``|[Pp]owered by|\bHydra\b|\bhydra\.|\bconf/|lightning_hetero/|struct\b|None\b"


def test_version_and_help_are_written_for_people_and_need_no_torch() -> None:
    *texts, heavy = said(f"{HELPED}\nprint({HEAVY})").split("----\n")
    assert heavy == "[]\n" and len(texts) == 8
    assert set(texts[:4]) == {f"lightning-hetero {lightning_hetero.__version__}\n"}
    for name, text in zip(("train", "plan", "doctor", "report"), texts[4:], strict=True):
        assert re.findall(INTERNAL, text) == [], name
        assert len(re.findall(rf"^ +lightning-hetero-{name}\b", text, flags=re.M)) == 3, name
        assert "--version" in text and max(map(len, text.splitlines())) < 150, name
    known = set(re.findall(r"^  (\w+)=", texts[5].partition("Keys, ")[2], flags=re.M))
    keys = [str(key) for key in OmegaConf.load(CONF / "plan.yaml") if key not in ("defaults", "hydra")]
    assert known == {"cluster", *keys} and "islands" in texts[5]


def test_public_names_are_those_of_the_package() -> None:
    named = {name for name in vars(public) if not name.startswith("_")} | {"__version__"}
    assert set(lightning_hetero.__all__) == named <= set(dir(lightning_hetero))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        lightning_hetero.__getattr__("nothing")
