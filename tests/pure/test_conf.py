"""The shipped YAML: every key belongs to its ``_target_``'s constructor, and everything composes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import get_class, instantiate
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from omegaconf import DictConfig, ListConfig, OmegaConf
from torch.nn.parallel import DistributedDataParallel

from lightning_hetero import LyapunovController
from lightning_hetero.balanced.policy import BalancePolicy
from lightning_hetero.callbacks import ThrottleCallback
from lightning_hetero.cli.train import FitClock, build, make_trainer
from lightning_hetero.demo import DigitsCNN, DigitsData
from lightning_hetero.predictors import Ewma, LastValue
from lightning_hetero.stale.decide.policy import Asp, Flexible, Saps, Ssp

ROOT = Path(__file__).resolve().parents[2]
OFFERED = ROOT / "conf" / "hetero"  # what every Hydra app finds
CONF = ROOT / "lightning_hetero" / "cli" / "conf"  # the command's own
FILES = sorted([*OFFERED.rglob("*.yaml"), *CONF.rglob("*.yaml")])
# Given by the command line, not by YAML.
INJECTED = {"lightning.pytorch.Trainer": {"strategy", "callbacks", "logger"}}


def names(group: str) -> list[str]:
    return sorted(path.stem for root in (OFFERED, CONF) for path in (root / group).glob("*.yaml"))


def nodes_with_target(node: Any) -> Iterator[DictConfig]:
    if isinstance(node, DictConfig):
        if "_target_" in node:
            yield node
        for key in node:
            yield from nodes_with_target(node._get_node(key))
    elif isinstance(node, ListConfig):
        for index in range(len(node)):
            yield from nodes_with_target(node._get_node(index))


def parameters(target: type) -> tuple[dict[str, inspect.Parameter], set[str]]:
    """The constructor's named parameters, and what it takes besides through ``**kwargs``."""
    named = dict(inspect.signature(target).parameters)
    further: set[str] = set()
    if any(p.kind is p.VAR_KEYWORD for p in named.values()):
        stock = next((one for one in target.__mro__ if one in (DDPStrategy, ModelParallelStrategy)), target)
        for base in target.__mro__[: target.__mro__.index(stock) + 1]:
            further |= set(inspect.signature(base).parameters)
        further |= set(inspect.signature(DistributedDataParallel).parameters)
    return named, further


def check_keys(node: DictConfig) -> None:
    target = get_class(node._target_)
    named, further = parameters(target)
    keys = {str(key) for key in node} - {"_target_", "_convert_"}
    unknown = keys - set(named) - further - {"controller"}  # the group of that name: refused where there is none
    assert not unknown, f"{node._target_} does not take {sorted(unknown)}"
    required = {
        name
        for name, p in named.items()
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    }
    assert required <= keys, f"{node._target_} also needs {sorted(required - keys)}"
    assert not keys & INJECTED.get(node._target_, set())


def composed(*overrides: str, hydra: bool = False) -> DictConfig:
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return compose(
            "train", overrides=["paths.output_dir=out", *overrides], return_hydra_config=hydra
        )


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_key_is_an_argument_of_its_target(path: Path) -> None:
    for node in nodes_with_target(OmegaConf.load(path)):
        check_keys(node)


def test_a_wrong_key_is_noticed() -> None:
    good = {"_target_": "lightning_hetero.demo.DigitsData", "batch_size": 4}
    check_keys(OmegaConf.create(good))
    with pytest.raises(AssertionError, match="does not take"):
        check_keys(OmegaConf.create({**good, "bath_size": 4}))
    ddp = {"_target_": "lightning.pytorch.strategies.DDPStrategy", "find_unused_parameters": True}
    check_keys(OmegaConf.create(ddp))
    with pytest.raises(AssertionError, match="does not take"):
        check_keys(OmegaConf.create({**ddp, "unused": True}))


@pytest.mark.parametrize("group", ["strategy", "cluster", "controller", "trainer", "emulation", "callbacks", "logger"])
def test_every_option_composes_into_the_default(group: str) -> None:
    assert names(group)
    for name in names(group):
        cfg = composed(f"{group}={name}")
        OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)


def test_a_controller_is_the_engines_own_none_or_one_with_budgets() -> None:
    def built(*overrides: str) -> Any:
        return build(composed("strategy=hetero_pipeline", *overrides).strategy).controller

    assert built() == "lyapunov" and built("controller=none") is None
    bought = built("controller=lyapunov", "controller.budget.money_per_sample=2e-6", "controller.v=20")
    assert bought == LyapunovController(v=20, budget={"money_per_sample": 2e-6})


@pytest.mark.parametrize("debug", [[], *([f"debug={name}"] for name in names("debug"))], ids=str)
@pytest.mark.parametrize("experiment", names("experiment"))
def test_every_experiment_composes(experiment: str, debug: list[str]) -> None:
    cfg = composed(f"experiment={experiment}", *debug)
    plain = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    assert isinstance(plain, dict)
    for node in nodes_with_target(cfg):
        check_keys(node)


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (["experiment=topics", "model.block_size=32"], "data.block_size", 32),
        (["experiment=topics"], "callbacks.checkpoint.monitor", "val_perplexity"),
        (["experiment=topics"], "callbacks.checkpoint.mode", "min"),
        (["debug=fast"], "trainer.devices", 2),
        (["debug=fast"], "emulation.scenario", None),
        (["debug=fast", "emulation=equal"], "emulation.scenario.speeds", [1.0]),
        (["experiment=stale_digits"], "strategy._target_", "lightning_hetero.BoundedStalenessStrategy"),
        (["experiment=stale_digits", "strategy=ddp"], "strategy._target_", "lightning.pytorch.strategies.DDPStrategy"),
        (["experiment=stale_digits", "emulation=dying_rank"], "emulation.scenario.faults.0.kind", "kill"),
        (["strategy=hetero_pipeline"], "strategy.cluster", None),
        (["strategy=hetero_pipeline", "cluster=probe"], "strategy.cluster", "probe"),
        (["experiment=pipeline_gpt", "cluster=equal4"], "strategy.cluster.devices.0.count", 4),
        (["experiment=pipeline_gpt", "emulation=none"], "emulation.scenario", None),
        # Real devices are not slowed down unless somebody says so.
        (["trainer=gpu"], "emulation.scenario", None),
        (["trainer=gpu"], "trainer.accelerator", "gpu"),
        (["trainer=gpu", "experiment=digits"], "emulation.scenario", None),
        (["trainer=gpu", "emulation=equal"], "emulation.scenario.speeds", [1.0]),
        (["trainer=gpu", "experiment=stale_digits"], "emulation.scenario._target_", "lightning_hetero.Scenario"),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_choice_brings(overrides: list[str], key: str, value: Any) -> None:
    found: Any = OmegaConf.to_container(composed(*overrides), resolve=True)
    for part in key.split("."):
        found = found[int(part) if part.isdecimal() else part]
    assert found == value


POLICY = "strategy.policy._target_=lightning_hetero.stale.decide.policy"
BALANCED, STALE = "strategy=hetero_balanced", "strategy=hetero_stale"


@pytest.mark.parametrize(
    ("overrides", "policy"),
    [
        ([BALANCED], BalancePolicy()),
        ([BALANCED, "strategy.policy=predictive", "strategy.dead_band=0.1"], BalancePolicy(dead_band=0.1)),
        ([BALANCED, "strategy.predictor=last"], BalancePolicy(predictor=LastValue())),
        ([BALANCED, "strategy.policy={_target_:lightning_hetero.balanced.policy.BalancePolicy,warmup:9}"],
         BalancePolicy(warmup=9)),
        ([BALANCED, "strategy.predictor={_target_:lightning_hetero.predictors.Ewma,weight:0.3}"],
         BalancePolicy(predictor=Ewma(weight=0.3))),
        ([STALE], Flexible()),
        ([STALE, "strategy.bound=1", "strategy.grace=0.0"], Flexible(bound=1, grace=0.0)),
        ([STALE, "strategy.policy=asp"], Asp()),
        ([STALE, "strategy.policy=ssp", "strategy.bound=4"], Ssp(bound=4)),
        ([STALE, f"+{POLICY}.Saps", "+strategy.policy.micro=2"], Saps(micro=2)),
        ([STALE, "strategy.policy={_target_:lightning_hetero.stale.decide.policy.Ssp,bound:2}"], Ssp(bound=2)),
    ],
    ids=lambda given: str(given) if isinstance(given, list) else "",
)  # fmt: skip
def test_policies_are_chosen_by_name_or_as_objects(overrides: list[str], policy: Any) -> None:
    chosen = build(composed(*overrides).strategy).policy
    assert type(chosen) is type(policy) and chosen.settings() == policy.settings()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([BALANCED, "strategy.policy=narx"], "policy='narx' must be a BalancePolicy, 'predictive' or None"),
        ([BALANCED, "+strategy.cooldown=2"], "have no argument 'cooldown'"),
        ([BALANCED, "controller=lyapunov"], "LoadBalancedStrategy has no controller: drop it"),
        ([STALE, "controller=lyapunov"], "BoundedStalenessStrategy has no controller: drop it"),
        ([STALE, "strategy.policy=fast"], "unknown policy 'fast': choose one of flexible, saps"),
        ([STALE, "strategy.policy=asp", "strategy.grace=0.1"], "policy='asp' has no use for grace=0.1; drop it, or"),
        ([STALE, f"+{POLICY}.Asp", "strategy.bound=1"], "give either a whole policy, or bound"),
        ([STALE, "strategy.liveness_s=0"], "liveness_s=0 must be a finite number > 0"),
        ([STALE, "strategy.compression=zip"], "must be None"),
    ],
)
def test_what_an_engine_does_not_take_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(Exception, match=re.escape(words)):
        build(composed(*overrides).strategy)


@pytest.mark.parametrize("sweep", names("sweep"))
def test_every_sweep_names_options_that_exist(sweep: str) -> None:
    cfg = composed(f"sweep={sweep}", hydra=True)
    assert cfg.hydra.mode.name == "MULTIRUN"
    for group, choices in cfg.hydra.sweeper.params.items():
        assert set(choices.split(",")) <= set(names(group))
    assert sorted(cfg.hydra.sweeper.params.strategy.split(",")) == names("strategy")


@pytest.mark.parametrize(("group", "read"), [("emulation", "scenario"), ("cluster", "spec")])
def test_a_key_that_nobody_reads_is_refused_with_its_place(group: str, read: str) -> None:
    cfg = composed(f"+{group}.speeds=[1,0.5]")
    with pytest.raises(ValueError, match=re.escape(f"nobody reads {group}.speeds")) as error:
        make_trainer(cfg, Path("out"))
    assert f"{group}.{read}.speeds=" in str(error.value)


def test_a_cluster_for_an_engine_that_reads_none_is_said() -> None:
    for strategy in ("ddp", "hetero_balanced", "hetero_stale"):
        with pytest.warns(UserWarning, match="the chosen cluster has no effect"):
            make_trainer(composed(f"strategy={strategy}", "cluster=islands"), Path("out"))
    make_trainer(composed("strategy=hetero_pipeline", "cluster=islands"), Path("out"))


def of_example(*overrides: str) -> DictConfig:
    """Composes the app of examples/02_hydra_app, which is laid out like lightning-hydra-template."""
    with initialize_config_dir(version_base="1.3", config_dir=str(ROOT / "examples/02_hydra_app/configs")):
        return compose("train", overrides=list(overrides))


@pytest.mark.parametrize("trainer", ["ddp", "default"])
@pytest.mark.parametrize("name", [name for name in names("strategy") if name != "ddp"])
def test_an_app_that_reads_its_strategy_from_the_trainer_takes_ours(trainer: str, name: str) -> None:
    at = "trainer.strategy"
    balanced = [f"{at}.min_samples=[2,2,2,2]", f"{at}.predictor=ewma"]
    more = {"hetero_balanced": balanced, "hetero_pipeline": ["+hetero/cluster=islands"]}.get(name, [])
    cfg = of_example(f"trainer={trainer}", "trainer.devices=4", f"+hetero/strategy@{at}={name}", *more)
    trainer_of = instantiate(cfg.trainer, callbacks=[], logger=False)
    strategy = trainer_of.strategy
    assert type(strategy).__name__ == cfg.trainer.strategy._target_.rpartition(".")[2] and strategy.world_size == 4
    if name == "hetero_balanced":
        assert strategy.settings.bounds.lower == [2, 2, 2, 2] and type(strategy.policy.prototype).__name__ == "Ewma"
    if name == "hetero_pipeline":
        assert [device.speed for device in strategy.plan_settings.cluster.devices] == [1.0, 1.0, 0.5, 0.5]


def test_an_app_that_builds_callbacks_by_name_takes_an_emulation() -> None:
    cfg = of_example("trainer=ddp", "+hetero/emulation@callbacks.throttle=one_straggler")
    callback = instantiate(cfg.callbacks.throttle)
    assert isinstance(callback, ThrottleCallback) and callback.scenario.speed(0, 0) == 0.25


def test_the_whole_configuration_becomes_objects() -> None:
    cfg = composed("trainer.default_root_dir=null")
    assert isinstance(build(cfg.model), DigitsCNN) and isinstance(build(cfg.data), DigitsData)
    for emulation, throttled in (("two_fast_two_slow", 1), ("none", 0)):
        cfg = composed(f"emulation={emulation}")
        trainer = make_trainer(cfg, Path("out"))
        assert isinstance(trainer.strategy, DDPStrategy) and trainer.num_devices == 4
        kinds = [type(callback) for callback in vars(trainer)["callbacks"]]
        assert kinds.count(ThrottleCallback) == throttled and kinds.count(FitClock) == 1
        assert [type(logger).__name__ for logger in trainer.loggers] == ["CSVLogger"]
    empty = make_trainer(composed("logger=none", "callbacks=none", "emulation=none"), Path("out"))
    assert empty.loggers == [] and FitClock in map(type, vars(empty)["callbacks"])
