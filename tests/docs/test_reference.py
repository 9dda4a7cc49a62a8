"""Reference tables: every argument, option, metric and key of a result is in them, with its default."""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from omegaconf import OmegaConf
from torch.nn.parallel import DistributedDataParallel

import lightning_hetero
from lightning_hetero import AutoStrategy, BalancePolicy, LyapunovController, Scenario, StragglerMonitor, predictors
from lightning_hetero.balanced import policy as balanced_policy
from lightning_hetero.balanced.decide.controller import ExchangeClock
from lightning_hetero.callbacks.reporting import Reporting
from lightning_hetero.cli import train
from lightning_hetero.controller.replans import Replan, ReplanLog
from lightning_hetero.federated import policy as federated_policies
from lightning_hetero.federated.decide import policy as federated_policy
from lightning_hetero.federated.decide import rounds as federated_rounds
from lightning_hetero.federated.decide.rounds import ClientRow
from lightning_hetero.predictors import Kalman, kalman
from lightning_hetero.record.ledger import RankFigures
from lightning_hetero.shares import policy as share_policy
from lightning_hetero.stale import policy as stale_policy
from lightning_hetero.stale.decide.policy import _KNOWN, Asynchronous, by_name
from lightning_hetero.stale.decide.report import Counts, Measures, engine_metrics
from lightning_hetero.types import SpeedSample, StepReport
from tests.docs.kit import ENGINES, REFERENCE, ROOT, THEORY, Engine, rows, section

METRICS = REFERENCE / "metrics.md"

# ---- the strategy's arguments --------------------------------------------------------------------


def test_every_engine_is_among_these() -> None:
    shipped = {path for path in (ROOT / "conf/hetero/strategy").glob("hetero_*.yaml")}
    assert shipped == {engine.group for engine in ENGINES}
    for engine in ENGINES:
        target = yaml.safe_load(engine.group.read_text())["_target_"]
        assert target == f"lightning_hetero.{engine.strategy.__name__}"


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_every_argument_is_in_the_table_with_its_default(engine: Engine) -> None:
    table = rows(section(engine.page, "Arguments"))
    documented = {name: row for row in table for name in re.findall(r"`\**(\w+)`", row[0].split("(")[0])}
    assert set(documented) == set(engine.parameters)
    for name, row in documented.items():
        if "Strategy" not in row[1] and row[1] != "as there":
            default = re.split("[:;]", row[1])[0].strip("`")
            assert ast.literal_eval(default) == engine.parameters[name].default, name


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_every_argument_is_in_the_group_file_or_listed_as_not(engine: Engine) -> None:
    paragraphs = re.split(r"\n\n", section(engine.page, "Arguments"))
    paragraph = next(p for p in paragraphs if "**Not in the group file**" in p)
    omitted = set(re.findall(r"`(\w+)`", paragraph.partition("**Not in the group file**")[2]))
    group = set(yaml.safe_load(engine.group.read_text())) - {"_target_", "_convert_"}
    assert omitted <= set(engine.parameters)
    assert omitted.isdisjoint(group)
    assert omitted | group >= set(engine.parameters)


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_the_group_file_keeps_the_defaults(engine: Engine) -> None:
    """Choosing the option in Hydra is choosing the name in Python."""
    alone = OmegaConf.create({"strategy": OmegaConf.load(engine.group)})  # without other groups
    group = OmegaConf.to_container(alone, resolve=True)["strategy"]  # type: ignore[index,call-overload]
    ddp = inspect.signature(DistributedDataParallel).parameters
    for name, value in group.items():
        if name == "controller" and name not in engine.parameters:
            assert value is None  # only what is asked for is refused
        elif (name, value) == ("shard", "auto"):
            assert engine.parameters[name].default is None  # a module without configure_model could not train
        elif name not in ("_target_", "_convert_"):
            assert value == {**ddp, **engine.parameters}[name].default, name


def test_policies_are_documented_with_their_defaults() -> None:
    table = {row[0].split("`")[1]: row for row in rows(section(THEORY / "stale.md", "The policies"))}
    assert table.keys() == _KNOWN.keys()
    for name, row in table.items():
        said = dict(re.findall(r"`(\w+)` \(([\d.]+)\)", " ".join(row)))
        known = by_name(name).settings()
        assert {argument: float(value) for argument, value in said.items()} == {a: known[a] for a in said}, name
        waits = {"never": "never", "grace": "at most `grace`"}.get(_KNOWN[name].holds)
        assert row[1].startswith(waits) if waits else row[1] != "never", name
        assert ("worth n/B" in row[3]) == issubclass(_KNOWN[name], Asynchronous), name


def test_federated_policies_are_documented() -> None:
    table = {row[0].strip("`") for row in rows(section(THEORY / "federated.md", "The policies"))}
    assert table == federated_policy._KNOWN.keys()


def test_numbers_among_the_formulas_are_the_defaults() -> None:
    """``name (number)`` in the text is what the code has."""
    text = section(THEORY / "balanced.md", "Formulas")
    found = {name: float(number) for name, number in re.findall(r"\b([a-z_]+) \(([\d.]+)\)", text)}
    owners = (BalancePolicy, Kalman, ExchangeClock)
    known = {name: p.default for owner in owners for name, p in inspect.signature(owner).parameters.items()}
    constants = {**vars(kalman), **vars(share_policy)}
    known |= {name.strip("_").lower(): value for name, value in constants.items() if name.isupper()}
    assert found == {name: known[name] for name in found}
    assert {"drift", "gate", "dead_band", "noise_guard", "surprise", "period_s"} <= set(found)


# ---- metrics and results -------------------------------------------------------------------------


MEASURES = Measures(
    counts=Counts(
        updates=1, staleness=Counter({0: 6, 1: 2}), hold_s={0: 0.1}, apply_s=0.1, longest_queue=1,
        samples=Counter({0: 4, 1: 4}),
    ),
    epoch=0, global_step=1, version_gap=0, shares=(4, 4), predicted_s=(0.1, 0.1),
)  # fmt: skip


class Measuring(Reporting):
    """Stands in for a strategy."""

    report: StepReport
    metrics: dict[str, float]
    root_device = torch.device("cpu")
    meets: Any = True

    def step_report(self) -> StepReport:
        return self.report

    def engine_metrics(self) -> dict[str, float]:
        return self.metrics


class Log:
    """Stands in for a logger that collects the names it is given."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.names |= set(metrics)


def logged_names(engine_metrics: dict[str, float], *, meets: bool = True) -> set[str]:
    """What `StragglerMonitor` reports for two ranks of an engine with such metrics, with ``{r}`` for the rank."""
    monitor, log = StragglerMonitor(), Log()
    records = [SpeedSample(rank=r, step=0, samples=4, compute_s=0.1, wait_s=0.1) for r in range(2)]
    strategy = Measuring()
    strategy.report = StepReport(epoch=0, step=0, records=tuple(records), predicted_s=(0.1, 0.1))
    strategy.metrics, strategy.meets = engine_metrics, meets
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(_batches_that_stepped=0))
    trainer: Any = SimpleNamespace(
        is_last_batch=True, is_global_zero=True, log_every_n_steps=1, strategy=strategy, loggers=[log], fit_loop=loop,
        world_size=2, _logger_connector=SimpleNamespace(_progress_bar_metrics={}),
    )
    module: Any = None
    monitor.on_train_start(trainer, module)
    monitor.on_train_batch_start(trainer, module, (), 0)
    monitor.on_train_batch_end(trainer, module, None, (), 0)
    return {re.sub(r"rank\d+", "rank{r}", name) for name in log.names}


def replan_metrics() -> dict[str, float]:
    """What the pipeline engine logs of changes of plan, one of which has been in force for long enough."""
    record = Replan(step=1, kind="plan", reason="", generation=1, predicted_gain=0.1, realised_gain=0.1)
    return ReplanLog([record]).metrics()


def federated_metrics() -> dict[str, float]:
    """What the federated engine logs of a round of two ranks."""
    row = ClientRow(**dict.fromkeys(ClientRow._fields, 1.0))
    return federated_rounds.engine_metrics(1, [row, row], 2)


@pytest.mark.parametrize("engine", [e for e in ENGINES if e.strategy is not AutoStrategy], ids=str)
def test_every_logged_metric_is_documented_and_no_other(engine: Engine) -> None:
    engine_name = engine.strategy.engine
    table = rows(section(METRICS, "Under every engine"))
    own = [row for row in rows(section(METRICS, "Under one engine")) if engine_name in row[2].split(", ")]
    names = {name for row in table + own for name in re.findall(r"`(hetero/[^`]+)`", row[0])}
    listed = next(row[2] for row in table if "{name}" in row[0])
    columns = {name.split("/")[1] for name in names if name.endswith("/rank{r}")} & set(re.findall(r"\w+", listed))
    spread = {name.replace("{name}", column) for name in names if "{name}" in name for column in columns}
    metrics = {
        "stale": lambda: engine_metrics(MEASURES, 2),
        "pipeline": replan_metrics,
        "balanced": dict,
        "sharded": dict,
        "federated": federated_metrics,
    }
    logged = logged_names(metrics[engine_name](), meets=engine_name in ("balanced", "sharded"))
    assert {name for name in names if "{name}" not in name} | spread == logged


def test_every_public_name_is_on_a_page_of_the_api() -> None:
    page = "".join(page.read_text() for page in sorted((REFERENCE / "api").glob("*.md")))
    shown_as = r"^\.\. auto(?:class|function|data):: (?:lightning_hetero\.)?([\w.]+)$"
    documented = set(re.findall(shown_as, page, flags=re.M))
    assert set(lightning_hetero.__all__) - {"__version__"} <= documented
    for module in (predictors, balanced_policy, stale_policy, federated_policies):
        here = module.__name__.removeprefix("lightning_hetero.")
        shown = {name.removeprefix(f"{here}.") for name in documented} | {"PredictorName", "PolicyName"}
        assert set(module.__all__) <= shown, here


def test_every_key_of_result_json_is_documented() -> None:
    tree = ast.parse(inspect.getsource(train.collect_result))
    result = next(node.value for node in ast.walk(tree) if isinstance(node, ast.Return))
    keys = {key.value for key in getattr(result, "keys", ()) if isinstance(key, ast.Constant)}
    keys |= {"fit_s", "steps", "batches"}  # what FitClock has written
    table = rows(section(REFERENCE / "configuration.md", "result.json"))
    assert {name for row in table for name in re.findall(r"`(\w+)`", row[0])} == keys
    ranks = next(row[2] for row in table if row[0] == "`ranks`")
    assert {field.name for field in fields(RankFigures)} == set(re.findall(r"`(\w+)`", ranks))


def test_every_argument_of_a_scenario_is_documented() -> None:
    names = {row[0].strip("`") for row in rows(section(REFERENCE / "emulation.md", "Scenario"))}
    assert names == {field.name for field in fields(Scenario)}


def test_every_option_of_every_group_is_documented() -> None:
    table = {row[0].strip("`"): row[1] for row in rows(section(REFERENCE / "configuration.md", "The command"))}
    roots = (ROOT / "conf/hetero", ROOT / "lightning_hetero/cli/conf")
    folders = {path.name: path for root in roots for path in root.iterdir() if any(path.glob("*.yaml"))}
    assert set(table) == set(folders)
    for group, folder in folders.items():
        named = set(re.findall(r"`(\w+)`", table[group]))
        options = {path.stem for path in folder.glob("*.yaml")}
        assert named <= options if "..." in table[group] else named == options, group
    emulation = {row[0].strip("`") for row in rows(section(REFERENCE / "emulation.md", "Scenarios that ship"))}
    assert emulation == {path.stem for path in folders["emulation"].glob("*.yaml")}


def test_every_setting_of_the_controller_is_in_the_table_with_its_default() -> None:
    table = rows(section(REFERENCE / "controller.md", "Settings"))
    documented = {row[0].strip("`"): ast.literal_eval(row[1].split(":")[0].strip("`")) for row in table}
    assert documented == {f.name: f.default for f in fields(LyapunovController)}
