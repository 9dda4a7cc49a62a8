"""Ordinary code of strangers on two ranks: which strategy, what it ended with, and the oracle beside it.

A test module has one function per situation, ``def situation(rank, world, engine) -> facts``, whose docstring names the
thread it comes from. `ends` runs it; a test compares the facts with the oracle's, or expects a refusal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor, nn

from lightning_hetero import BoundedStalenessStrategy, FederatedStrategy, HeteroPipelineStrategy, LoadBalancedStrategy
from tests.ranks.harness import run_ranks
from tests.ranks.kit import quiet_trainer, rank_trainer, weights

ENGINES = ("balanced", "stale", "pipeline")
UNEVEN: dict[str, Any] = {"min_samples": [12, 4], "max_samples": [12, 4]}  # shares 12 and 4 of 16, without a clock
_CLASSES: dict[str, Any] = {
    "balanced": LoadBalancedStrategy,
    "stale": BoundedStalenessStrategy,
    "pipeline": HeteroPipelineStrategy,
    "federated": FederatedStrategy,
}


def two_stages(*cuts: int, samples: int = 16, micro_samples: int = 4) -> dict[str, Any]:
    """A plan of one group of two stages: ``cuts`` are the backbone's layers at which stages begin and end."""
    return {"groups": [{"ranks": [0, 1], "cuts": list(cuts), "samples": samples, "micro_samples": micro_samples}]}


def strategy(engine: str, **by_engine: dict[str, Any]) -> Any:
    """The strategy of an engine; ``by_engine`` has its options: ``strategy(engine, balanced=UNEVEN)``."""
    if engine == "ddp":
        return "ddp"
    return _CLASSES[engine](monitor=False, process_group_backend="gloo", **by_engine.get(engine, {}))


def trainer(
    rank: int, world: int, engine: str, by_engine: dict[str, dict[str, Any]] | None = None, **kwargs: Any
) -> Trainer:
    """A quiet trainer of this rank; ``engine`` "single" has one device and no strategy: the oracle."""
    kwargs.setdefault("max_epochs", 1)
    if engine == "single":
        return quiet_trainer(devices=1, **kwargs)
    return rank_trainer(rank, world, strategy(engine, **(by_engine or {})), **kwargs)


def everyone(value: Any) -> list[Any]:
    """The value of every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def off(own: dict[str, Tensor], oracle: nn.Module) -> float:
    """Largest difference between `weights` and those of a module."""
    return max(float((own[name] - value).abs().max()) for name, value in oracle.state_dict().items())


def difference(module: nn.Module, oracle: nn.Module) -> float:
    """Largest difference between two modules' parameters and buffers."""
    return off(weights(module), oracle)


def ends(situation: Callable[..., Any], engine: str, *args: Any, ranks: int = 2, timeout_s: float = 60.0) -> list[Any]:
    """What each rank ended with."""
    return run_ranks(ranks, situation, engine, *args, timeout_s=timeout_s)


def refusal(situation: Callable[..., Any], engine: str, *args: Any, ranks: int = 2, timeout_s: float = 60.0) -> str:
    """The message with which the situation is refused on some rank.

    Raises:
        AssertionError: it was not refused.
    """
    try:
        ended = ends(situation, engine, *args, ranks=ranks, timeout_s=timeout_s)
    except (TypeError, ValueError, RuntimeError) as error:
        return str(error)
    raise AssertionError(f"not refused: {ended}")
