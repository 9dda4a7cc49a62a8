"""What our messages print to be pasted is run: every ``Trainer(...)``, strategy, command and ``pip install`` in them.

Texts are found in the package's sources, so a new one is tested as soon as it is written. What the planner and the
doctor print `lightning_hetero.plan.paste` makes: tests/pure/plan/test_pipelines.py, tests/ranks/cli/test_paste.py.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
from hydra import compose, initialize_config_dir
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import StrategyRegistry
from omegaconf import OmegaConf
from packaging.requirements import Requirement

import lightning_hetero
from lightning_hetero import public
from lightning_hetero.cli import doctor, report
from lightning_hetero.cli.command import CONF, overrides
from lightning_hetero.cli.loading import load_data, load_module
from tests.docs.kit import source_nodes

WORD = r"(?:--[\w-]+|-m|'[^']*'|[\w@/.+]+=[^\s,;)]+|[A-Z_]+/\w+)"
COMMAND = re.compile(rf"lightning-hetero-(train|plan|doctor|report)\b((?: {WORD})*)(?!:)")
NAMED = re.compile(r"strategy=(['\"]?)(\w*(?:hetero_|ddp)[\w{}]*)\1")
CALLS = re.compile(rf"(?<![\w.])(?:lightning\.pytorch\.)?(?:Trainer|{'|'.join(lightning_hetero.__all__[:-1])})\(")
INSTALL = re.compile(r"pip install ((?:-e )?(?:'[^']*'|[\w.>=<\[\]{}-]+))")
MODULE = re.compile(r"python -m ([\w.]+)")
FILLED = {  # what fields of texts hold, in the order in which they stand
    "strategy='hetero_{}'": ["balanced"],
    "pip install '{}{}'": ["torch", ">=2.6"],
    "Trainer(limit_train_batches={})": [4],
    "LyapunovController({}=...)": ["prices"],
    "FederatedStrategy(policy={})": ["'fedavg'"],
}
ELLIPSES = {  # what is left to the reader
    "precision": "'32-true'", "strategy": "'ddp'", "gradient_clip_val": "1.0", "controller": "None", "dirpath": "'.'",
    "batch_cost": "len", "compression": "'bf16'", "prices": "1.0",
}  # fmt: skip


def texts() -> Iterator[tuple[str, str]]:
    """Every string of the package that is no docstring, with its place; fields of f-strings as ``{}``."""
    for path, nodes in source_nodes():
        silent = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        silent |= {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(p.value) if isinstance(p, ast.Constant) else "{}" for p in node.values)
                yield f"{path}:{node.lineno}", text
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in silent:
                yield f"{path}:{node.lineno}", node.value


TEXTS = list(texts())


def found(pattern: re.Pattern[str]) -> dict[str, tuple[str, re.Match[str]]]:
    """What of this kind is in the texts: each once, with a place and its match."""
    return {match[0]: (place, match) for place, text in TEXTS for match in pattern.finditer(text)}


def filled(text: str) -> str:
    for template, values in FILLED.items():
        if template in text:
            text = text.replace(template, template.format(*values))
    assert "{}" not in text, f"say in FILLED what stands in {text!r}"
    return text


def calls() -> Iterator[tuple[str, str]]:
    """Calls that are written out in messages, to their closing bracket."""
    for place, text in TEXTS:
        for match in CALLS.finditer(text):
            depth = 0
            for end, sign in enumerate(text[match.start() :], match.start()):
                depth += {"(": 1, ")": -1}.get(sign, 0)
                if sign == ")" and depth == 0:
                    if (call := text[match.start() : end + 1]) not in ("Trainer({})", f"{match[0]}...)"):
                        yield place, call  # else a template, or no more than a name
                    break


@pytest.mark.parametrize("call", sorted({call for _, call in calls()}))
def test_a_call_in_a_message_is_made(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    quiet = partial(Trainer, accelerator="cpu", logger=False, enable_checkpointing=False)
    monkeypatch.setattr(lightning.pytorch, "Trainer", quiet)
    text = re.sub(r"(\w+)=\.\.\.", lambda m: f"{m[1]}={ELLIPSES[m[1]]}", filled(call))
    assert eval(text, {**vars(public), "lightning": lightning, "Trainer": quiet}) is not None


@pytest.mark.parametrize("text", sorted(found(NAMED)))
def test_a_strategy_that_a_message_names_exists(text: str) -> None:
    match = NAMED.fullmatch(filled(text))
    assert match is not None and match[2] in StrategyRegistry.available_strategies()
    if not match[1]:  # as a command line has it
        with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
            assert "Strategy" in compose("train", overrides=[text]).strategy._target_


@pytest.mark.parametrize("text", sorted(found(COMMAND)))
def test_a_command_in_a_message_is_read(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, match = found(COMMAND)[text]
    name, words = match[1], overrides(shlex.split(match[2]))
    bare = not words and (name in ("train", "doctor") or place.startswith("cli/"))  # or a command's own name
    if bare or {"--help", "--version"} & set(words):
        return
    if name == "doctor":
        doctor._parser().parse_args(words)
    elif name in ("train", "plan"):
        (tmp_path / "my_package").mkdir()
        (tmp_path / "my_package" / "model.py").write_text("from lightning_hetero.demo import DigitsCNN as Model\n")
        (tmp_path / "my_package" / "data.py").write_text("from lightning_hetero.demo import DigitsData as Data\n")
        monkeypatch.syspath_prepend(tmp_path)
        with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
            given: Any = OmegaConf.to_container(compose(name, overrides=words))
        if name == "plan":
            assert [given[key] for key in ("module", "formula", "run")].count(None) == 2, place
            assert load_module(given["module"]) and load_data(given["datamodule"])
    else:
        assert report.main(words) == 2  # there is no such run


def test_what_is_installed_exists_and_is_not_us() -> None:
    """No index has this package: from one, strangers' code might come under our name."""
    for text, (place, match) in found(INSTALL).items():
        *_, word = shlex.split(filled(match[0]))
        if not word.startswith("."):  # of a checkout
            assert Requirement(word).name != "lightning-hetero", f"{place}: {text}"


def test_modules_that_are_run_exist() -> None:
    for text, (place, match) in found(MODULE).items():
        assert find_spec(match[1]) is not None, f"{place}: {text}"


def test_each_kind_is_found() -> None:
    """Or these tests would pass by finding nothing."""
    assert len(found(NAMED)) >= 4 and len(found(COMMAND)) >= 2 and found(INSTALL)
    assert {"Trainer(devices=1)", "LoadBalancedStrategy(rebalance=False)", "HeteroTrace()"} <= {c for _, c in calls()}
