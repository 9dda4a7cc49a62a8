"""What stock DDP can pickle we can: a Trainer after a fit, with its module, its loaders and its strategy."""

from __future__ import annotations

import io
import warnings
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_hetero import BoundedStalenessStrategy, HeteroPipelineStrategy, LoadBalancedStrategy
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Toy, rank_trainer, regression


class OwnLoader(DataLoader):
    """With a required argument, which a rebuilt loader would lack."""

    def __init__(self, samples: int, **options: Any) -> None:
        super().__init__(regression(samples), **options)


def saving_job(rank: int, world: int) -> dict[str, str]:
    found: dict[str, str] = {}
    strategies: list[Any] = [
        LoadBalancedStrategy(process_group_backend="gloo"),
        BoundedStalenessStrategy(process_group_backend="gloo"),
        HeteroPipelineStrategy(process_group_backend="gloo", backbone="net"),
    ]
    for strategy in strategies:
        module = Toy()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = rank_trainer(rank, world, strategy, max_epochs=1)
            trainer.fit(module, OwnLoader(24, batch_size=4))
            file = io.BytesIO()
            try:
                torch.save(trainer, file)
            except Exception as error:
                found[strategy.engine] = f"{type(error).__name__}: {error}"
                continue
            file.seek(0)
            loaded = torch.load(file, weights_only=False)
        again, saved = loaded.train_dataloader, loaded.lightning_module.parameters()
        equal = all(torch.equal(a, b) for a, b in zip(saved, module.parameters(), strict=True))
        found[strategy.engine] = (
            f"{equal} {type(again).__name__} {type(again.sampler).__name__} {again.batch_size}"
        )
    return found


def test_a_trainer_can_be_saved_after_a_fit() -> None:
    expected = "True OwnLoader SequentialSampler 4"
    assert run_ranks(2, saving_job) == [dict.fromkeys(("balanced", "stale", "pipeline"), expected)] * 2
