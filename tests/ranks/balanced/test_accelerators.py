"""What hetero_balanced does otherwise where the host runs ahead of its device: on a CPU that says it were one."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch.utils.data import DataLoader

from lightning_hetero.balanced.fit import loaders as balanced_loaders
from lightning_hetero.balanced.fit import run as balanced_run
from lightning_hetero.measure.device import HostDevice
from lightning_hetero.shares.policy import ShareDecision
from lightning_hetero.types import SpeedSample
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Scripted, Toy, Weights, balanced, rank_trainer, regression, single, weights

BATCH, STEPS = 128, 8


class Ahead(HostDevice):
    asynchronous = True

    def tensor_cores(self) -> bool:
        return True

    def tunes_each_shape(self) -> bool:
        return True


class Noting(Scripted):
    """Notes whether all ranks were measured, by step."""

    def __init__(self) -> None:
        super().__init__()
        self.whole: dict[int, bool] = {}

    def observe(self, records: Sequence[SpeedSample]) -> ShareDecision:
        self.whole[records[0].step] = True
        return super().observe(records)

    def take_incomplete(self, records: Sequence[SpeedSample]) -> None:
        self.whole[records[0].step] = False
        super().take_incomplete(records)


def on_accelerators(rank: int, world: int, precision: Any) -> tuple[dict[int, bool], list[int], list[str], Weights]:
    device = Ahead(torch.device("cpu"))
    policy = Noting()
    strategy, samples = balanced(policy=policy, quantum="auto"), []
    module = Toy()
    module.on_train_batch_start = (  # type: ignore[method-assign]
        lambda *_: samples.append(strategy.current_samples())
    )
    with (
        mock.patch.object(balanced_run, "device_of", lambda _: device),
        mock.patch.object(balanced_loaders, "device_of", lambda _: device),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        trainer = rank_trainer(rank, world, strategy, max_epochs=1, precision=precision)
        trainer.fit(module, DataLoader(regression(BATCH * STEPS), batch_size=BATCH // world, shuffle=True))
    told = [str(w.message) for w in caught if "cudnn.benchmark" in str(w.message)]
    return policy.whole, samples, told, weights(module)


def test_few_sizes_of_which_the_first_step_is_not_believed() -> None:
    expected = Toy()
    single(expected, regression(BATCH * STEPS), BATCH, max_epochs=1)
    ranks = run_ranks(2, on_accelerators, "64-true")
    sizes = [samples for _, samples, _, _ in ranks]
    assert all(n % 8 == 0 for samples in sizes for n in samples) and len(set(sizes[0])) > 2
    new = {step for samples in sizes for step, n in enumerate(samples) if n not in samples[:step]}
    for rank, (whole, _, told, trained) in enumerate(ranks):
        assert len(told) == (rank == 0) and all("Trainer(benchmark=False)" in text for text in told)
        assert [step for step, complete in whole.items() if not complete] == [
            step for step in sorted(new) if step in whole
        ]
        assert any(whole.values()), whole  # a size that comes again is
        assert trained.distance(weights(expected)) <= 1e-12
