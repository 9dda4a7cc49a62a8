"""What cannot be trained apart is refused on all ranks, with the reason and a way out; nobody hangs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from lightning_hetero import FederatedStrategy
from lightning_hetero.federated.policy import LbBsp
from lightning_hetero.optim import UnevenZeroOptimizer
from tests.ranks.federated.kit import Plain, data, federated, fit, own
from tests.ranks.harness import run_ranks

# ---- arguments ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"local_steps": 0}, "local_steps=0 must be a whole number >= 1"),
        ({"policy": "fast"}, "unknown policy 'fast'"),
        ({"min_samples": -1}, "min_samples=-1 must be a whole number >= 0"),
        ({"proximal": -0.1}, "proximal=-0.1 must be a finite number >= 0"),
    ],
)
def test_an_argument_out_of_range_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        FederatedStrategy(**arguments)


def test_what_is_no_policy_or_makes_no_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match="policy=3 must be a name or a lightning_hetero"):
        FederatedStrategy(policy=3)  # type: ignore[arg-type]
    for wrong in ("fedavgm", list):
        with pytest.raises(TypeError, match=r"server=.* must make an optimizer of the parameters"):
            FederatedStrategy(server=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="momentum"):
        FederatedStrategy(server=partial(torch.optim.SGD, momentum=-1.0))
    assert isinstance(FederatedStrategy().policy, LbBsp)


# ---- fits --------------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return iter(data())


class OwnBatchSampler(BatchSampler):
    pass


class Lbfgs(Plain):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class UnevenZero(Plain):
    def configure_optimizers(self) -> Any:
        return UnevenZeroOptimizer(self.parameters(), torch.optim.Adam)


class Synced(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.SyncBatchNorm(6)


class ByHand(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Odd(torch.optim.SGD):
    """Keeps whole numbers, as optimizers of 8 bits do."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for p in self.param_groups[0]["params"]:
            self.state[p]["codes"] = torch.zeros_like(p, dtype=torch.uint8)
        return loss


class EightBit(Plain):
    def configure_optimizers(self) -> Any:
        return Odd(self.parameters(), lr=0.1)


class OtherNames(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch[1:])
        self.log(f"loss{self.global_rank}", loss, sync_dist=True, on_epoch=True, on_step=False, batch_size=4)
        return loss


def batches_of(rank: int) -> DataLoader:
    return own(range(rank * 16, rank * 16 + 16), 4)


def stream(rank: int) -> DataLoader:
    return DataLoader(Stream(), batch_size=4)


def empty(rank: int) -> DataLoader:
    return own(range(16) if rank else [], 4)


def too_few(rank: int) -> DataLoader:
    return own(range(16) if rank else range(3), 4, drop_last=True)


def sampled(rank: int) -> DataLoader:
    return DataLoader(data(), batch_sampler=OwnBatchSampler(SequentialSampler(data()), 4, False))


def two(rank: int) -> Any:
    return [batches_of(rank), batches_of(rank)]


def uneven(rank: int) -> DataLoader:
    return own(range(16 + 8 * rank), 4)


CASES: dict[str, tuple[Callable[[], Any], Callable[[int], Any], dict[str, Any], type[Exception], str]] = {
    "a stream": (Plain, stream, {}, TypeError, "IterableDataset, and nobody has said when a rank's data end: say"),
    "no data": (Plain, empty, {}, ValueError, "rank(s) 0 have no batch of training data (samples per rank: [0, 16])"),
    "too little": (Plain, too_few, {}, ValueError, "with drop_last=True a loader with fewer samples than"),
    "re-sizing": (Plain, sampled, {"policy": "lb-bsp"}, TypeError, "has a custom batch sampler, which decides"),
    "two loaders": (Plain, two, {}, TypeError, "several train loaders: a rank's own data are one loader"),
    "ZeRO": (UnevenZero, batches_of, {}, TypeError, "UnevenZeroOptimizer divides the optimizer's state"),
    "LBFGS": (Lbfgs, batches_of, {}, TypeError, "LBFGS keeps a history of steps and directions"),
    "SyncBatchNorm": (Synced, batches_of, {}, TypeError, "makes every rank wait for all others"),
    "manual, uneven": (ByHand, uneven, {}, ValueError, "with manual optimization no rank can rest"),
    "manual, steps": (ByHand, batches_of, {"policy": "adaptive_steps"}, ValueError, "with manual optimization no rank"),
    "manual, FedProx": (ByHand, batches_of, {"proximal": 0.1}, ValueError, "proximal > 0 with manual optimization"),
    "eight bits": (EightBit, batches_of, {}, TypeError, "the state of Odd cannot be averaged: 'codes' is a tensor of"),
    "other names": (OtherNames, batches_of, {}, RuntimeError, "the ranks have logged other names in this epoch"),
    "a batch size": (Plain, batches_of, {"global_batch_size": 8}, ValueError, "would ignore global_batch_size"),
    "a sum": (Plain, batches_of, {"loss_reduction": "sum"}, ValueError, "would ignore loss_reduction"),
    "a pool": (Plain, batches_of, {"batch_sampler": "pool", "max_samples": 4}, ValueError, "max_samples, batch_samp"),
}


def job(rank: int, world: int, name: str) -> str:
    make, loader, arguments, kind, _ = CASES[name]
    with pytest.raises(kind) as error:
        fit(rank, world, federated(**arguments), loader(rank), module=make())
    return str(error.value)


@pytest.mark.parametrize("name", CASES)
def test_a_fit_that_cannot_be_is_refused_on_all_ranks(name: str) -> None:
    words = CASES[name][-1]
    for message in run_ranks(2, job, name):
        assert words in message


def finding(rank: int, world: int) -> str:
    with pytest.raises(TypeError) as error:
        fit(rank, world, federated(), batches_of(rank), module=Plain(), callbacks=[LearningRateFinder(1e-3, 1.0, 5)])
    return str(error.value)


def test_a_learning_rate_finder_is_refused() -> None:
    """PL#19611: it was taken for several train loaders."""
    for message in run_ranks(2, finding):
        assert "a learning-rate finder needs the loss of one update after the other" in message


def differing(rank: int, world: int) -> str:
    with pytest.raises(ValueError) as error:
        fit(rank, world, federated(local_steps=2 + rank), batches_of(rank))
    return str(error.value)


def test_ranks_that_are_configured_differently_are_told() -> None:
    for message in run_ranks(2, differing):
        assert "local_steps is {0: '2', 1: '3'}" in message
