"""docs/reference/plan.md and doctor.md: generated tables, keys, checks and commands are the code's."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any, cast

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf

from lightning_hetero.cli import doctor
from lightning_hetero.cli.command import CONF, overrides
from lightning_hetero.cli.plan import answer, plan_tables, read_setup, to_paste
from lightning_hetero.doctor.checks import CHECKS
from lightning_hetero.doctor.facts import Facts
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


def composed(command: str) -> dict[str, Any]:
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        cfg = compose("plan", overrides=overrides(shlex.split(command)))
    return cast("dict[str, Any]", OmegaConf.to_container(cfg, resolve=True))


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_plan_compose(command: str) -> None:
    given = composed(command)
    assert [given[name] for name in ("module", "formula", "run")].count(None) == 2


def test_the_printed_end_is_what_the_command_prints() -> None:
    given = composed(COMMANDS[1])
    setup, _ = read_setup(given)
    found = answer(setup, given)
    assert found.chosen is not None
    text = plan_tables(found, to_paste(found.chosen, given))
    assert text.endswith("\n\n" + block("printed by the second command", "text").rstrip())


def test_the_file_of_devices_is_read(tmp_path: Path) -> None:
    file = tmp_path / "my_cluster.yaml"
    file.write_text(block("my_cluster.yaml", "yaml"))
    given = composed(f"cluster={file} {shlex.join(shlex.split(COMMANDS[1])[1:])}")
    setup, notes = read_setup(given)
    assert [device.name for device in setup.cluster.devices] == ["new:0", "new:1", "old"]
    assert notes[-1] == f"devices as described in {file}"
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        cfg = compose("train", overrides=["strategy=hetero_pipeline", *overrides([f"cluster={file}"])])
    assert instantiate(cfg.strategy).plan_settings.cluster == setup.cluster
    file.write_text("nodes: 3")
    with pytest.raises(ValueError, match=r"my_cluster.yaml' must be .* a YAML file with one .*nodes=3 must be a list"):
        read_setup(given)


def block(mark: str, language: str) -> str:
    """The block of the page that is marked so."""
    (found,) = re.findall(rf"<!-- {mark} -->\n```{language}\n(.*?)```", PLAN.read_text(), flags=re.S)
    return found


def test_every_check_and_option_of_the_doctor_is_documented() -> None:
    table = {name.strip() for row in rows(DOCTOR.read_text()) for name in row[0].split(",")}
    bare = {finding.check.partition(",")[0] for check in CHECKS for finding in check(Facts())}
    assert bare <= table and {"gradients", "verdict", "CUDA architectures", "memory", "links"} <= table
    options = {
        text for action in doctor._parser()._actions for text in action.option_strings if text.startswith("--")
    }
    named = set(re.findall(r"(?<!-)--[a-z][a-z-]*", DOCTOR.read_text()))
    assert named <= options and {"--module", "--data", "--json", "--no-probe"} <= named
