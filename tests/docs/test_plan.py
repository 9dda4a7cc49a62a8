"""docs/reference/plan.md and doctor.md: generated tables, keys, checks and commands are the code's."""

from __future__ import annotations

import re
import shlex

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from lightning_hetero.cli import doctor
from lightning_hetero.cli.plan import CONF
from lightning_hetero.doctor.facts import Facts
from lightning_hetero.doctor.training import CHECKS
from lightning_hetero.plan.what_if import _KINDS
from tests.docs.kit import REFERENCE, rows, section

PLAN, DOCTOR = REFERENCE / "plan.md", REFERENCE / "doctor.md"
COMMANDS = re.findall(r"^lightning-hetero-plan (\S.*)$", PLAN.read_text(), flags=re.M)


def test_every_key_of_the_plan_is_in_the_table_with_its_default() -> None:
    known = OmegaConf.to_container(OmegaConf.load(CONF / "plan.yaml"))
    assert isinstance(known, dict)
    listed = {row[0].strip("`"): row[1].strip("`") for row in rows(section(PLAN, "What is asked"))}
    keys = {str(key) for key in known if key not in ("defaults", "hydra")} | {"cluster"}
    assert set(listed) == keys
    said = {"cluster": "probe", "engines": "all", **{k: v for k, v in known.items() if k in keys and k != "engines"}}
    assert {k: "null" if v is None else str(v) for k, v in said.items()} == listed


def test_every_kind_of_change_is_shown() -> None:
    text = section(PLAN, "What is asked")
    assert all(f"{{{kind}: " in text or f"{{{kind}: [" in text for kind in _KINDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_plan_compose(command: str) -> None:
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        cfg = compose("plan", overrides=shlex.split(command))
    assert [cfg.module, cfg.formula, cfg.run].count(None) == 2


def test_every_check_and_option_of_the_doctor_is_documented() -> None:
    table = {name.strip() for row in rows(DOCTOR.read_text()) for name in row[0].split(",")}
    bare = {finding.check.partition(",")[0] for check in CHECKS for finding in check(Facts())}
    assert bare <= table and {"gradients", "verdict", "CUDA architectures", "memory", "links"} <= table
    options = {
        text for action in doctor._parser()._actions for text in action.option_strings if text.startswith("--")
    }
    named = set(re.findall(r"(?<!-)--[a-z][a-z-]*", DOCTOR.read_text()))
    assert named <= options and {"--module", "--data", "--json", "--no-probe"} <= named
