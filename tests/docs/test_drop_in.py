"""docs/reference/drop_in.md: a row for each feature of Lightning's, a cell for each engine, as the tests show it."""

from __future__ import annotations

import inspect
import re
from fnmatch import fnmatch
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningDataModule, Trainer, callbacks, loggers, profilers
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks

from tests.docs import features as listed
from tests.docs.stock_ddp import PAGE, marks, page_with, table

KINDS = (ModelHooks, DataHooks, CheckpointHooks, Callback, LightningDataModule)
HOOKS = {name for kind in KINDS for name, value in vars(kind).items()
         if callable(value) and not name.startswith(("_", "from_", "load_from"))}  # fmt: skip
LIGHTNINGS = {
    "argument of the Trainer": set(inspect.signature(Trainer).parameters),
    "hook": {*HOOKS, "backward", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step",
             "configure_gradient_clipping", "configure_optimizers", "configure_callbacks"},
    "callback": set(callbacks.__all__),
    "logger": set(loggers.__all__),
    "profiler": set(profilers.__all__),
}  # fmt: skip


def test_tables_are_what_tests_show() -> None:
    """A row that no test shows for an engine, and an unknown key of a mark, are errors of their own."""
    assert PAGE.read_text() == page_with(table(marks())), "run: python -m tests.docs.stock_ddp"


@pytest.mark.parametrize("kind", LIGHTNINGS)
def test_everything_of_lightnings_has_a_row(kind: str) -> None:
    rows = [text for group in listed.features().values() for text in group.values()]
    quoted = " ".join(quote for text in rows for quote in re.findall("`([^`]+)`", text))
    named = re.findall(r"[\w*]+", quoted)
    missing = {name for name in LIGHTNINGS[kind] if not any(fnmatch(name, one) for one in named)}
    assert missing <= set(listed.ELSEWHERE), f"a {kind} without a row in tests/docs/features.py"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda found: [*found, found[0]._replace(said="no: never")], "contradict one another"),
        (lambda found: [mark for mark in found if "lbfgs" not in mark.rows], r"no test shows.*lbfgs \(stale\)"),
    ],
)
def test_holes_and_contradictions_are_errors(change: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        table(change(marks()))


@pytest.mark.parametrize("line", ["lbfgs: once more", "another: `torch.optim.LBFGS`", "nothing"])
def test_a_row_is_there_once_and_says_something(monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    monkeypatch.setattr(listed, "ROWS", f"{listed.ROWS}{line}\n")
    with pytest.raises(ValueError, match="neither of them twice"):
        listed.features()


def test_a_mark_points_to_a_row_and_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listed, "ROWS", listed.ROWS.replace("\nlbfgs: ", "\nlbfgs_renamed: "))
    with pytest.raises(ValueError, match=r"::test_.*: no row \['lbfgs'\]"):
        marks()
