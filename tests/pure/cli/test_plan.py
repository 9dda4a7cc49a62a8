"""``lightning-hetero-plan`` without its process: what is asked, the tables, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from lightning_hetero.cli.plan import CONF, answer, plan_tables, read_setup, to_paste
from lightning_hetero.plan.planner import plan
from tests.pure.report.kit import written

pytestmark = pytest.mark.pure
FORMULA = "formula={kind: layers, layers: 4, params: 1e6, flops_per_sample: 1e9, flops_per_s: 1e12}"


def asked(*overrides: str) -> dict[str, Any]:
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return OmegaConf.to_container(compose("plan", overrides=list(overrides)), resolve=True)  # type: ignore[return-value]


def test_a_formula_on_a_described_cluster() -> None:
    given = asked("cluster=two_fast_two_slow", FORMULA, "global_batch=16")
    setup, notes = read_setup(given)
    assert setup.ranks == 4 and "costs by formula: 4 layers" in notes[0]
    found = answer(setup, given)
    assert found.chosen is not None
    paste = to_paste(found.chosen, given)
    text = plan_tables(found, paste)
    assert all(engine in text for engine in ("ddp", "balanced", "pipeline", "stale"))
    assert paste is not None and text.endswith(paste)
    assert f"{found.verdict}\nNot counted: data loading" in text and "rank 3 (quarter): " in text


def test_a_recorded_run(tmp_path: Path) -> None:
    written(tmp_path / "events", [[(8, 0.1, 0.32), (8, 0.4, 0.02)]] * 6)
    given = asked(f"run={tmp_path}", "engines=[ddp,hetero_balanced]")
    setup, notes = read_setup(given)
    found = answer(setup, given)
    assert notes == [f"as recorded in {tmp_path}"] and setup.global_batch == 16
    assert {e.engine for e in found.estimates} == {"ddp", "balanced"}
    given = asked(f"run={tmp_path}", "exchange_s=0.5")
    setup, _ = read_setup(given)
    assert setup.exchange_s == 0.5


def test_what_cannot_train_is_in_the_table() -> None:
    given = asked("cluster=small_memory", FORMULA, "global_batch=8")
    setup, _ = read_setup({**given, "formula": {**given["formula"], "params": 1e9}})
    text = plan_tables(plan(setup))
    assert text.count("cannot train this") >= 2 and "nan" not in text and "no engine can train this" in text


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], "give one of module, formula and run, here are none of them"),
        ([FORMULA, "run=here"], "here are ['formula', 'run']"),
        ([FORMULA, "cluster=equal4"], "global_batch=null: no loader tells it"),
        (["run=nowhere"], "no trace in nowhere"),
        (["module=no.such:Thing", "cluster=equal4"], "module='no.such:Thing' cannot be imported"),
        (["module=pathlib:Path", "cluster=equal4"], "it must be a LightningModule"),
        (["module=lightning_hetero.demo:DigitsCNN", "datamodule=pathlib:Path"], "it must be a LightningDataModule"),
    ],
)
def test_what_is_not_enough_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises((TypeError, ValueError, FileNotFoundError), match=re.escape(words)):
        read_setup(asked(*overrides))


def test_no_engine_is_refused() -> None:
    given = asked("cluster=equal4", FORMULA, "global_batch=64")
    setup, _ = read_setup(given)
    with pytest.raises(ValueError, match=re.escape("engines=[] must be one or more")):
        answer(setup, {**given, "engines": []})
