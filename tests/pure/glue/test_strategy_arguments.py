"""Arguments that all engines share are resolved through the bases, by jsonargparse as by Python."""

from __future__ import annotations

from datetime import timedelta

import pytest
from jsonargparse import ArgumentParser
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy, StrategyRegistry

from lightning_hetero import BoundedStalenessStrategy, HeteroPipelineStrategy, LoadBalancedStrategy

ENGINES = [LoadBalancedStrategy, BoundedStalenessStrategy, HeteroPipelineStrategy]


def parsed(cls: type[DDPStrategy], **options: object) -> DDPStrategy:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--strategy", type=Strategy)
    given = [f"--strategy.{name}={value}" for name, value in options.items()]
    config = parser.parse_args([f"--strategy={cls.__module__}.{cls.__name__}", *given])
    return parser.instantiate(config).strategy


@pytest.mark.parametrize("cls", ENGINES)
def test_inherited_arguments_reach_the_constructor_from_a_command_line(cls: type[DDPStrategy]) -> None:
    strategy = parsed(cls, global_batch_size=96, loss_reduction="sum", timeout="0:10:00", find_unused_parameters="true")
    assert isinstance(strategy, cls)
    assert (strategy.global_batch_size, strategy.timeout) == (96, timedelta(minutes=10))  # type: ignore[attr-defined]
    assert strategy._ddp_kwargs["find_unused_parameters"] is True


@pytest.mark.parametrize("cls", ENGINES)
def test_a_value_out_of_range_is_refused_on_the_command_line(cls: type[DDPStrategy]) -> None:
    with pytest.raises(Exception, match="mode"):
        parsed(cls, loss_reduction="mode")


@pytest.mark.stock_ddp(
    "optimization: post-localSGD", "stale", refused="ranks drift apart, and their batches are of unequal size"
)
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
    cls: type[DDPStrategy], arguments: dict[str, object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Trainer(accelerator="cpu", devices=2, strategy=cls(**arguments), logger=False)  # type: ignore[arg-type]
    assert repr(cls()) == f"<{cls.__name__} for lightning.pytorch.Trainer>"


@pytest.mark.stock_ddp("launching: the registry's names, e.g. `ddp_spawn_find_unused_parameters_true`",
                       "balanced", "stale", "pipeline")
@pytest.mark.parametrize("cls", ENGINES)
def test_every_name_of_stock_ddp_has_its_counterpart(cls: type[DDPStrategy]) -> None:
    names = [name for name, entry in StrategyRegistry.items() if entry["strategy"] is DDPStrategy]
    assert "ddp_notebook_find_unused_parameters_false" in names
    for name in names:
        ours = StrategyRegistry[name.replace("ddp", f"hetero_{cls.engine}", 1)]  # type: ignore[attr-defined]
        assert ours["strategy"] is cls
        assert ours["init_params"] == StrategyRegistry[name]["init_params"]
