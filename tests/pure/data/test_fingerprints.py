"""What three samples tell: the same dataset, another one, or random augmentation."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_hetero.data.fingerprints import differs, fingerprints


@dataclass
class Record:
    x: Any
    of: Any


class Samples(Dataset[Any]):
    def __init__(self, make: Any) -> None:
        self.make, self.reads = make, 0

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return self.make(index)


def found(*makes: Any, **options: Any) -> tuple[int, int, str] | None:
    """What ranks with these samples find out."""
    loaders = [DataLoader(Samples(make), **options) for make in makes]
    first, again = ([fingerprints(it, [0, 4, 8], again=a) for it in loaders] for a in (False, True))
    return None if differs(first) is None else differs(first, again)


KINDS: list[Any] = [
    lambda i: torch.arange(4.0) + i,
    lambda i: (torch.tensor(i), i % 2),
    lambda i: {"text": f"the {i}th", "length": 3},
    lambda i: {"path": f"/nodes/{i}.png", "pair": [np.float32(i), None]},
    lambda i: Record(x=np.full((2, 2), i), of=complex(i, 1)),
    lambda i: [b"abc" * i, True],
    lambda i: [torch.zeros(2)] * (i + 1),
]


@pytest.mark.parametrize("make", KINDS)
def test_another_order_shows_and_the_same_one_does_not(make: Any) -> None:
    assert found(make, make) is None
    rank, number, place = found(make, lambda i: make(8 - i)) or (0, 0, "")
    assert (rank, number) == (1, 0) and "sample" in place


@pytest.mark.parametrize(
    "draw",
    [
        lambda: random.random(),
        lambda: float(np.random.rand()),
        lambda: torch.rand(5),
        lambda: np.random.default_rng().random(3),
    ],
)
def test_what_is_random_does_not_count_and_what_is_not_does(draw: Any) -> None:
    state = random.getstate(), torch.get_rng_state(), np.random.get_state()[1].tolist()  # type: ignore[index]
    assert found(lambda i: (draw(), i), lambda i: (draw(), i)) is None
    assert found(lambda i: (draw(), i), lambda i: (draw(), i + 1)) == (1, 0, "sample[1]")
    assert random.getstate() == state[0] and torch.equal(torch.get_rng_state(), state[1])
    assert np.random.get_state()[1].tolist() == state[2]  # type: ignore[index]


def test_generators_of_the_datasets_own_go_on_where_they_were() -> None:
    def make(seed: int) -> Samples:
        data: Any = Samples(lambda i: torch.rand(2, generator=data.generator))
        data.generator = torch.Generator().manual_seed(seed)
        return data

    one, two = make(1), make(2)
    first, again = ([fingerprints(DataLoader(d), [0, 8], again=a) for d in (one, two)] for a in (False, True))
    assert differs(first) is not None and differs(first, again) is None
    assert torch.equal(one[0], torch.rand(2, generator=torch.Generator().manual_seed(1)))


def test_one_read_a_sample_where_all_is_alike() -> None:
    data = Samples(lambda i: i)
    fingerprints(DataLoader(data), [0, 4, 8])
    assert data.reads == 3


def test_machines_may_round_and_decode_differently() -> None:
    picture = np.random.default_rng(0).integers(0, 255, (3, 32, 32), dtype=np.uint8)
    assert found(lambda i: picture, lambda i: picture ^ 1) is None
    assert found(lambda i: picture, lambda i: picture[:, ::-1]) is not None
    features = np.random.default_rng(0).normal(size=40)
    assert found(lambda i: features, lambda i: features * (1 + 1e-7)) is None
    assert found(lambda i: features, lambda i: features * 1.001) is not None
    assert found(lambda i: np.array([np.nan, np.inf, 1.0]), lambda i: np.array([np.nan, np.inf, 1.0])) is None


def test_what_cannot_be_read_or_compared_is_left_out() -> None:
    def fails(index: int) -> Any:
        raise OSError("no file")

    assert found(fails, fails) is None
    assert found(fails, lambda i: i) == (1, 0, "it can be read on one rank only")
    assert found(lambda i: (object(), i), lambda i: (object(), i)) is None


def test_samples_are_read_in_a_worker_where_the_loader_has_workers() -> None:
    data = Samples(lambda i: (i, "word"))
    loader = DataLoader(data, num_workers=2, multiprocessing_context="fork")
    prints = fingerprints(loader, [0, 4, 8])
    assert data.reads == 0 and differs([prints, fingerprints(DataLoader(data), [0, 4, 8])]) is None


def test_datasets_that_make_batches_are_asked_for_one_of_one() -> None:
    loader = DataLoader(Samples(lambda i: torch.tensor(i)), batch_size=None, sampler=[[0, 1], [2]])  # type: ignore[arg-type]
    assert fingerprints(loader, [4]) == [{"sample": ("integer", (1,), (4,))}]
