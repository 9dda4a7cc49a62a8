"""Demo data and models: fixed splits, shapes, causality, the metrics they log, and that they learn."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.demo import CharTransformer, DigitsCNN, DigitsData, TopicsText

SMALL = {"block_size": 8, "width": 16, "heads": 2, "layers": 1}


@pytest.fixture
def digits() -> DigitsData:
    data = DigitsData(batch_size=8)
    data.setup("fit")
    return data


def all_rows(dataset: Any) -> list[tuple[bytes, int]]:
    images, labels = dataset.tensors
    return [
        (image.numpy().tobytes(), int(label)) for image, label in zip(images, labels, strict=True)
    ]


def test_the_split_is_a_partition_and_the_same_for_everybody(digits: DigitsData) -> None:
    other = DigitsData(batch_size=64)
    other.setup("validate")
    assert all_rows(digits.train) == all_rows(other.train)
    assert all_rows(digits.val) == all_rows(other.val)
    everything = DigitsData(val_samples=1)
    everything.setup("fit")
    split = sorted(all_rows(digits.train) + all_rows(digits.val))
    assert split == sorted(all_rows(everything.train) + all_rows(everything.val))
    assert (len(all_rows(digits.train)), len(all_rows(digits.val))) == (1440, 357)


def test_a_batch_of_digits_is_what_the_model_takes(digits: DigitsData) -> None:
    images, labels = next(iter(digits.train_dataloader()))
    assert images.shape == (8, 1, 8, 8) and images.dtype is torch.float32
    assert float(images.min()) == 0.0 and float(images.max()) == 1.0
    assert labels.shape == (8,) and labels.dtype is torch.int64
    model = DigitsCNN()
    assert model(images).shape == (8, 10)
    assert sum(p.numel() for p in model.parameters()) == 21_546


def test_without_scikit_learn_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"\.\[examples\]"):
        DigitsData().setup("fit")


def test_the_topics_are_windows_that_follow_one_another_and_are_split() -> None:
    data = TopicsText(batch_size=4, block_size=16, max_train_windows=10)
    data.setup("fit")
    inputs, targets = next(iter(data.train_dataloader()))
    assert inputs.shape == targets.shape == (4, 16) and torch.equal(inputs[:, 1:], targets[:, :-1])
    assert data.train is not None and data.val is not None and len(data.train) == 10
    assert torch.equal(data.train[1][0][0], data.train[0][1][-1])  # the next window begins where this one ends
    assert 16 * len(data.val) > 30_000


@given(st.integers(0, 7))
def test_a_position_does_not_see_later_characters(changed: int) -> None:
    torch.manual_seed(0)
    model = CharTransformer(**SMALL).eval()
    inputs = torch.arange(8).reshape(1, 8)
    other = inputs.clone()
    other[0, changed] = 90
    with torch.no_grad():
        difference = (model(inputs) - model(other)).abs().amax(dim=(0, 2))
    assert torch.all(difference[:changed] < 1e-6)
    assert difference[changed] > 1e-4
