"""Partitions among clients: each sample once, the same for a seed, as unlike as asked."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.data import partition_by_group, partition_by_labels

LABELS = [i % 10 for i in range(500)]


@given(clients=st.integers(1, 8), alpha=st.sampled_from([0.1, 0.3, 1.0, 100.0]), seed=st.integers(0, 50))
def test_every_sample_goes_to_one_client(clients: int, alpha: float, seed: int) -> None:
    parts = partition_by_labels(LABELS, clients, alpha=alpha, seed=seed)
    assert sorted(i for part in parts for i in part) == list(range(500))
    assert all(part == sorted(part) and part for part in parts)
    assert parts == partition_by_labels(torch.tensor(LABELS), clients, alpha=alpha, seed=seed)


def kinds_per_client(alpha: float) -> float:
    parts = partition_by_labels(LABELS, 5, alpha=alpha, seed=1)
    return sum(len({LABELS[i] for i in part}) for part in parts) / 5


def test_small_alpha_gives_few_labels_and_seeds_differ() -> None:
    assert kinds_per_client(0.05) < 6 < 9 < kinds_per_client(100.0)
    assert partition_by_labels(LABELS, 5, seed=1) != partition_by_labels(LABELS, 5, seed=2)


def test_groups_stay_whole() -> None:
    groups = [f"writer{i % 7}" for i in range(100)]
    parts = partition_by_group(groups, 3, seed=4)
    assert sorted(i for part in parts for i in part) == list(range(100))
    owners = [{groups[i] for i in part} for part in parts]
    assert sum(map(len, owners)) == 7 and max(map(len, parts)) - min(map(len, parts)) <= 15
    assert parts == partition_by_group(groups, 3, seed=4)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: partition_by_labels(LABELS, 0), "clients=0 must be a whole number >= 1"),
        (lambda: partition_by_labels(LABELS, 4, alpha=0), "alpha=0 must be a finite number > 0"),
        (lambda: partition_by_labels(LABELS, 4, least=200), "least=200 for each of 4 clients is more than the"),
        (lambda: partition_by_labels(LABELS, 8, alpha=0.01, least=60), "in 1000 drawings some client always had"),
        (lambda: partition_by_group(["a", "b"], 3), "must be at most the number of groups, which is 2"),
    ],
)
def test_what_cannot_be_divided_is_refused(call: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()  # type: ignore[operator]
