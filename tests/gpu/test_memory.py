"""Memory that really runs out: `set_per_process_memory_fraction` leaves a process a part of its card."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.gpu.kit import BATCH, PRECISIONS, SIMULATED, Model, card_trainer, engine, moved, oracle, weights
from tests.gpu.ranks import run_card_ranks
from tests.ranks.kit import Weights, regression
from tests.ranks.pipeline.kit import WIDTH, Block

MIB = 2**20
SAMPLE_BYTES = (1 if SIMULATED else 16) * MIB  # a simulated card's memory is the host's
BESIDE_BYTES = 0 if SIMULATED else 64 * MIB  # parameters and what cuBLAS takes for itself


class Wide(Block):
    """Takes thrice `SAMPLE_BYTES` for each sample, forward and backward together."""

    def forward(self, x: Tensor) -> Tensor:
        wide = (x.repeat(1, SAMPLE_BYTES // (4 * WIDTH)) * 0.5).tanh()
        return super().forward(wide.reshape(len(x), -1, WIDTH).mean(1))


class Large(Model):
    """Its fifth block is a `Wide` one."""

    def backbone(self, dropout: float = 0.0) -> nn.Module:
        blocks = super().backbone(dropout)
        assert isinstance(blocks, nn.Sequential)
        blocks[4] = Wide()
        return blocks


@contextmanager
def memory_for(samples: int, rank: int = 0) -> Iterator[None]:
    """Leaves a rank `SAMPLE_BYTES` times so many of its card, of which a sample takes three."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((samples * SAMPLE_BYTES + BESIDE_BYTES) / total, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        torch.cuda.empty_cache()


def fitted(rank: int, world: int, name: str) -> Weights:
    module = Large()
    data = DataLoader(regression(208, dtype=torch.float32), batch_size=BATCH // world, shuffle=True)
    card_trainer(rank, world, engine(name)).fit(module, data)
    return weights(module)


def recovering(rank: int, world: int) -> tuple[Weights, list[str]]:
    with memory_for(16 if rank == 1 else 64, rank), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained = fitted(rank, world, "balanced")
    return trained, [str(warning.message) for warning in caught]


def test_the_balanced_engine_goes_on() -> None:
    expected = oracle(Large())
    outcomes = run_card_ranks(2, recovering)
    for trained, _ in outcomes:
        assert moved(trained, expected, weights(Large())) <= PRECISIONS["32-true"]
    told = [text for _, texts in outcomes for text in texts if "ran out of memory with" in text]
    assert told and told[0].startswith("rank 1 ")


def failing(rank: int, world: int) -> tuple[str, float]:
    """Returns what a rank says when rank 0, which holds the wide block, has no room, and after how long [s]."""
    started_s = time.monotonic()
    said = "trained"
    with memory_for(6 if rank == 0 else 64, rank):
        try:
            fitted(rank, world, "pipeline 1x2")
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
    return said, time.monotonic() - started_s


def test_the_pipeline_ends_on_all_ranks_with_the_cause() -> None:
    for said, after_s in run_card_ranks(2, failing):
        assert "memory" in said, said
        assert after_s < 60.0


def test_what_a_card_says_without_memory_is_understood() -> None:
    (said,) = run_card_ranks(1, filling)
    assert said == []


def filling(rank: int, world: int) -> list[str]:
    """Asks for memory in several ways; returns the texts that are not known to mean that there is none."""
    from lightning_hetero.measure.device import is_out_of_memory

    unknown, matrix = [], torch.ones(64, 64, device="cuda")
    asks: list[Any] = [
        lambda: torch.empty(256 * SAMPLE_BYTES, dtype=torch.uint8, device="cuda"),
        lambda: matrix.repeat(512, 512) @ matrix.repeat(512, 512),
    ]
    with memory_for(4):
        for ask in asks:
            try:
                ask()
            except Exception as error:
                if not is_out_of_memory(error):
                    unknown.append(f"{type(error).__name__}: {error}")
    return unknown
