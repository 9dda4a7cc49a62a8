"""Arguments that all engines share are resolved through the bases, by jsonargparse as by Python."""

from __future__ import annotations

import inspect
import re
from datetime import timedelta
from typing import Any, get_args, get_type_hints

import pytest
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy, StrategyRegistry
from torch.nn.parallel import DistributedDataParallel

import lightning_hetero
from lightning_hetero import (
    AutoStrategy,
    BoundedStalenessStrategy,
    FederatedStrategy,
    HeteroPipelineStrategy,
    LoadBalancedStrategy,
    ShardedBalancedStrategy,
    predictors,
)
from lightning_hetero.base.arguments import DDPArguments, ModelParallelArguments
from lightning_hetero.base.strategy import HeteroStrategy
from lightning_hetero.predictors import PredictorName
from lightning_hetero.stale.decide import policy
from lightning_hetero.stale.decide.policy import PolicyName
from lightning_hetero.stale.runtime import layout

DDP_ENGINES = [LoadBalancedStrategy, BoundedStalenessStrategy, HeteroPipelineStrategy, FederatedStrategy]
ENGINES = [*DDP_ENGINES, ShardedBalancedStrategy]


def parsed(cls: type[Any], **options: object) -> Any:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--strategy", type=Strategy)
    given = [f"--strategy.{name}={value}" for name, value in options.items()]
    config = parser.parse_args([f"--strategy={cls.__module__}.{cls.__name__}", *given])
    return parser.instantiate(config).strategy


@pytest.mark.parametrize("cls", ENGINES)
def test_inherited_arguments_reach_the_constructor_from_a_command_line(cls: type[HeteroStrategy]) -> None:
    sharded = cls is ShardedBalancedStrategy
    name = "save_distributed_checkpoint" if sharded else "find_unused_parameters"
    strategy: Any = parsed(cls, global_batch_size=96, loss_reduction="sum", timeout="0:10:00", **{name: not sharded})
    assert isinstance(strategy, cls)
    assert (strategy.global_batch_size, strategy.timeout) == (96, timedelta(minutes=10))
    assert vars(strategy).get(f"_{name}", vars(strategy).get("_ddp_kwargs", {}).get(name)) is (not sharded)


def test_command_lines_offer_our_strategies_and_callbacks_and_nothing_internal() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--strategy", type=Strategy)
    parser.add_argument("--callback", type=Callback)
    offered = set(re.findall(r"lightning_hetero[\w.]+", "".join(parser.format_help().split())))
    public = {f"lightning_hetero.{name}" for name in lightning_hetero.__all__}
    assert {f"lightning_hetero.{cls.__name__}" for cls in ENGINES} <= offered
    theirs = {name for name in offered if name.startswith("lightning_hetero.cli.")}  # if a test has imported them
    assert offered - theirs <= public


@pytest.mark.parametrize("cls", ENGINES)
def test_a_value_out_of_range_is_refused_on_the_command_line(cls: type[HeteroStrategy]) -> None:
    with pytest.raises(Exception, match="mode"):
        parsed(cls, loss_reduction="mode")


@pytest.mark.stock_ddp("model_averaging_period", "stale", refused="the ranks' weights drift apart")
@pytest.mark.parametrize("cls", ENGINES)
@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"global_batch_size": 0}, ValueError, "global_batch_size=0"),
        ({"batch_sampler": "pols"}, ValueError, "batch_sampler='pols'"),
        ({"loss_reduction": "mode"}, ValueError, "loss_reduction='mode'"),
        ({"find_unused_parameter": True}, TypeError, "did you mean 'find_unused_parameters'"),
        ({"model_averaging_period": 4}, TypeError, "post-localSGD"),
    ],
)
def test_shared_arguments_are_checked_in_every_engine(
    cls: type[Any], arguments: dict[str, object], error: type[Exception], words: str
) -> None:
    if cls.engine == "sharded" and error is TypeError:  # it has none of DDP's
        words = f"have no argument '{next(iter(arguments))}'"
    with pytest.raises(error, match=words):
        Trainer(accelerator="cpu", devices=2, strategy=cls(**arguments), logger=False)  # type: ignore[arg-type]
    name = f"<{cls.__name__} for lightning.pytorch.Trainer: hetero_{cls.engine}, global batch"
    assert repr(cls()) == f"{name} of the loader>"
    assert repr(cls(global_batch_size=96)) == f"{name} 96>"


@pytest.mark.parametrize("cls", [*ENGINES, AutoStrategy])
def test_shared_arguments_stand_in_every_signature_and_docstring(cls: type[Any]) -> None:
    own, shared = (inspect.signature(of.__init__).parameters for of in (cls, HeteroStrategy))
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in list(own.values())[1:-1])
    assert {name: (p.default, p.annotation) for name, p in own.items() if name in shared and name != "stock"} == {
        name: (p.default, p.annotation) for name, p in shared.items() if name != "stock"
    }
    told = re.search(r"Args:\n(.*?)\n\n", inspect.getdoc(cls) or "", re.DOTALL)
    assert told is not None
    assert set(re.findall(r"^    \**(\w+):", told.group(1), re.MULTILINE)) == set(own) - {"self"}
    with pytest.raises(TypeError, match="positional"):
        cls(64)


def test_the_typed_arguments_are_those_of_ddp() -> None:
    """Of this torch; `DDPArguments` may know more, of later ones."""
    known = set(DDPArguments.__annotations__)
    for of in (DDPStrategy, DistributedDataParallel):
        names = set(inspect.signature(of.__init__).parameters) - {"self", "kwargs", "module", "accelerator"}
        names -= {"device_ids", "output_device", "dim", "check_reduction"}  # Lightning's; without effect
        assert names <= known, names - known
    stock = set(inspect.signature(ModelParallelStrategy.__init__).parameters)
    told = set(inspect.signature(ShardedBalancedStrategy.__init__).parameters) - {"stock"}
    assert set(ModelParallelArguments.__annotations__) == stock - told


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (LoadBalancedStrategy(min_samples=20, global_batch_size=9), "min_samples=20 asks for 40 samples on 2 ranks"),
        (LoadBalancedStrategy(global_batch_size=1), "the default minimum asks for 2 samples on 2 ranks"),
        (LoadBalancedStrategy(min_samples=[3, 3, 3]), "min_samples lists 3 ranks, but there are 2"),
        (ShardedBalancedStrategy(data_parallel_size=4), "data_parallel_size=4 times tensor_parallel_size=1 must"),
        (ShardedBalancedStrategy(tensor_parallel_size=3), "data_parallel_size=1 times tensor_parallel_size=3 must be"),
        (ShardedBalancedStrategy(min_samples=[3, 3, 3]), "min_samples lists 3 ranks, but there are 2"),
        (FederatedStrategy(max_samples=[3]), "max_samples lists 1 ranks, but there are 2"),
        (FederatedStrategy(min_clients=3), "min_clients=3 must be at most the number of ranks, 2"),
        (HeteroPipelineStrategy(cluster={"devices": [{"speed": 1}]}), "describes 1 devices, but the Trainer has 2"),
        (HeteroPipelineStrategy(plan={"groups": [{"ranks": [0, 3], "cuts": [0, 1, 2], "micro_batches": [2]}]}),
         r"the plan's ranks \[0, 3\] must be different ones of 0..1"),
        (HeteroPipelineStrategy(plan={"groups": [{"ranks": [0, 1], "cuts": [0, 2], "micro_batches": [2]}]}),
         r"cuts=\(0, 2\) must be 3 rising numbers"),
    ],
)  # fmt: skip
def test_what_needs_no_process_is_checked_when_the_trainer_is_made(strategy: Strategy, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_trainer(strategy)


def make_trainer(strategy: Strategy, devices: int = 2) -> Trainer:
    return Trainer(accelerator="cpu", devices=devices, strategy=strategy, logger=False)


@pytest.mark.stock_ddp("static_graph", "stale", "pipeline", differs="no effect, and a warning says so")
@pytest.mark.parametrize("cls", DDP_ENGINES)
def test_what_tunes_a_wrapper_that_is_not_there_is_said_once(cls: type[DDPStrategy]) -> None:
    silent = cls(static_graph=False, find_unused_parameters=True, process_group_backend="gloo")  # type: ignore[arg-type]
    make_trainer(silent)
    tuned = {"static_graph": True, "bucket_cap_mb": 3, "find_unused_parameters": True}
    make_trainer(cls(**tuned), devices=1)  # type: ignore[arg-type]
    strategy = cls(**tuned)  # type: ignore[arg-type]
    if cls is LoadBalancedStrategy:  # the wrapper is there
        make_trainer(strategy)
        return
    with pytest.warns(UserWarning, match="static_graph=True, bucket_cap_mb=3 has no effect with " + cls.__name__):
        make_trainer(strategy)
    strategy.set_world_ranks()  # again, when a fit begins


@pytest.mark.parametrize("cls", [BoundedStalenessStrategy, HeteroPipelineStrategy, FederatedStrategy])
@pytest.mark.parametrize("name", ["mixed_precision", "process_group", "device_mesh", "param_to_hook_all_reduce"])
def test_what_would_change_the_training_through_a_wrapper_is_refused(cls: type[DDPStrategy], name: str) -> None:
    make_trainer(cls(**{name: object()}), devices=1)  # type: ignore[arg-type]
    words = f"{cls.__name__} cannot honour {name}, .* there is no Distr.*'hetero_balanced'"
    with pytest.raises(TypeError, match=words):
        make_trainer(cls(**{name: object()}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cls", "wrong", "meant"),
    [
        (LoadBalancedStrategy, "dead_bnd", "dead_band"),
        (LoadBalancedStrategy, "global_batchsize", "global_batch_size"),
        (BoundedStalenessStrategy, "complession", "compression"),
        (HeteroPipelineStrategy, "backbon", "backbone"),
        (FederatedStrategy, "local_step", "local_steps"),
        (ShardedBalancedStrategy, "tensor_paralel_size", "tensor_parallel_size"),
        (HeteroPipelineStrategy, "time_out", "timeout"),
    ],
)
def test_a_misspelt_argument_comes_with_the_one_of_ours_that_is_near(
    cls: type[Any], wrong: str, meant: str
) -> None:
    with pytest.raises(TypeError, match=f"have no argument '{wrong}'; did you mean '{meant}'"):
        cls(**{wrong: 1})


WRONG: list[tuple[type[Any], str, object, str]] = [
    *((cls, "monitor", "no", "monitor='no' must be one of (True, False)") for cls in ENGINES),
    *((cls, "batch_weight", 5, "batch_weight=5 must be a function") for cls in ENGINES),
    *((cls, "timeout", 5, "timeout=5 must be a datetime.timedelta") for cls in ENGINES),
    *((cls, "start_method", "popn", "start_method='popn' must be one of") for cls in DDP_ENGINES),
    (ShardedBalancedStrategy, "data_parallel_size", 0, "data_parallel_size=0 must be a whole number >= 1"),
    (ShardedBalancedStrategy, "shard", "all", "shard='all' must be 'auto', a list of module classes"),
    (ShardedBalancedStrategy, "shard", [5], "shard=[5] must be 'auto', a list of module classes"),
    (LoadBalancedStrategy, "dead_band", "abc", "dead_band='abc' must be a finite number >= 0"),
    (LoadBalancedStrategy, "min_samples", "abc", "min_samples='abc' must be a whole number >= 0"),
    (LoadBalancedStrategy, "max_samples", [4, -1], "max_samples=-1 of rank 1 must be a whole number"),
    (LoadBalancedStrategy, "policy", "kalman", "policy='kalman' must be a BalancePolicy"),
    (LoadBalancedStrategy, "batch_cost", 5, "batch_cost=5 must be a function of the batch"),
    (LoadBalancedStrategy, "rebalance", "no", "rebalance='no' must be one of"),
    (BoundedStalenessStrategy, "grace", "abc", "Flexible(grace='abc') must be a number >= 0"),
    (BoundedStalenessStrategy, "liveness_s", "abc", "liveness_s='abc' must be a finite number > 0"),
    (BoundedStalenessStrategy, "compression", 5, "compression=5 must be None, 'bf16' or 'fp16'"),
    (HeteroPipelineStrategy, "cluster", "nope", "cluster='nope' must be 'probe', a description or a YAML file"),
    (HeteroPipelineStrategy, "cluster", 5, "cluster=5 must be a mapping"),
    (HeteroPipelineStrategy, "cluster", {"devises": []}, "devises"),
    (HeteroPipelineStrategy, "plan", 5, "plan=5 must be a mapping"),
    (HeteroPipelineStrategy, "plan", {"groups": []}, "plan.groups=[] must be a list of one or more groups"),
    (HeteroPipelineStrategy, "profile", 5, "profile=5 must be a mapping"),
    (HeteroPipelineStrategy, "backbone", 5, "backbone=5 must be the name of an attribute"),
    (HeteroPipelineStrategy, "emulate_links", 3, "emulate_links=3 must be one of (True, False)"),
]


@pytest.mark.parametrize(("cls", "name", "value", "words"), WRONG, ids=lambda v: getattr(v, "engine", str(v)))
def test_a_wrong_value_is_refused_by_name_when_it_is_given(
    cls: type[Any], name: str, value: object, words: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        cls(**{name: value})


def test_a_policy_that_has_no_use_for_an_argument_names_it_and_those_that_have() -> None:
    others = "flexible, saps, ssp"
    with pytest.raises(ValueError, match=f"policy='asp' has no use for bound=2; .*: {others}$"):
        BoundedStalenessStrategy(policy="asp", bound=2)
    with pytest.raises(ValueError, match=r"policy='bsp' has no use for bound=1 and grace=0.5; .*: flexible$"):
        BoundedStalenessStrategy(policy="bsp", bound=1, grace=0.5)


def test_bounds_for_another_number_of_ranks_are_refused_when_the_trainer_is_made() -> None:
    with pytest.raises(ValueError, match="min_samples lists 3 ranks, but there are 2"):
        make_trainer(LoadBalancedStrategy(min_samples=[1, 2, 3]))


def test_names_for_type_checkers_are_those_that_are_known() -> None:
    assert set(get_args(PredictorName)) == set(predictors._KNOWN)
    assert get_args(PolicyName) == tuple(policy._KNOWN)
    assert get_args(layout.CompressionName) == tuple(layout._NARROW)
    hints = get_type_hints(BoundedStalenessStrategy.__init__)
    assert str not in {kind for name in ("policy", "compression") for kind in get_args(hints[name])}


@pytest.mark.stock_ddp("strategy")
@pytest.mark.parametrize("cls", DDP_ENGINES)
def test_every_name_of_stock_ddp_has_its_counterpart(cls: type[DDPStrategy]) -> None:
    names = [name for name, entry in StrategyRegistry.items() if entry["strategy"] is DDPStrategy]
    assert "ddp_notebook_find_unused_parameters_false" in names
    for name in names:
        ours = StrategyRegistry[name.replace("ddp", f"hetero_{cls.engine}", 1)]  # type: ignore[attr-defined]
        assert type(ours["strategy"](**ours["init_params"])) is cls
        assert ours["init_params"] == StrategyRegistry[name]["init_params"]


def test_the_sharded_engine_has_one_name() -> None:
    ours = {name: entry for name, entry in StrategyRegistry.items() if name.startswith("hetero_sharded")}
    assert list(ours) == ["hetero_sharded"]
    assert isinstance(ours["hetero_sharded"]["strategy"](), ShardedBalancedStrategy)
