"""Demo data and models: fixed splits, shapes, causality, the metrics they log, and that they learn."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from lightning_hetero.demo import CharTransformer, DigitsCNN, DigitsData, TopicsText
from lightning_hetero.demo.text import ALPHABET, VOCABULARY, Windows, encode

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
    other = DigitsData(batch_size=64, num_workers=0)
    other.setup("validate")
    assert all_rows(digits._train) == all_rows(other._train)
    assert all_rows(digits._val) == all_rows(other._val)
    everything = DigitsData(val_samples=1)
    everything.setup("fit")
    split = sorted(all_rows(digits._train) + all_rows(digits._val))
    assert split == sorted(all_rows(everything._train) + all_rows(everything._val))
    assert (len(all_rows(digits._train)), len(all_rows(digits._val))) == (1440, 357)


def test_another_seed_holds_out_other_images(digits: DigitsData) -> None:
    other = DigitsData(split_seed=1)
    other.setup("fit")
    assert all_rows(other._val) != all_rows(digits._val)


def test_a_batch_of_digits_is_what_the_model_takes(digits: DigitsData) -> None:
    images, labels = next(iter(digits.train_dataloader()))
    assert images.shape == (8, 1, 8, 8) and images.dtype is torch.float32
    assert float(images.min()) == 0.0 and float(images.max()) == 1.0
    assert labels.shape == (8,) and labels.dtype is torch.int64
    model = DigitsCNN()
    assert model(images).shape == (8, 10)
    assert sum(p.numel() for p in model.parameters()) == 21_546


@pytest.mark.parametrize(
    "arguments", [{"batch_size": 0}, {"val_samples": 0}, {"val_samples": 1797}]
)
def test_impossible_digits_are_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(
        ValueError, match=f"{next(iter(arguments))}={next(iter(arguments.values()))}"
    ):
        DigitsData(**arguments)


def test_without_scikit_learn_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"lightning-hetero\[examples\]"):
        DigitsData().setup("fit")


@given(
    length=st.integers(2, 60),
    block=st.integers(1, 12),
    limit=st.one_of(st.none(), st.integers(1, 10)),
)
def test_windows_cover_the_text_once(length: int, block: int, limit: int | None) -> None:
    ids = torch.arange(length)
    if length - 1 < block:
        with pytest.raises(ValueError, match=f"block_size={block} needs {block + 1} characters"):
            Windows(ids, block, limit)
        return
    windows = Windows(ids, block, limit)
    inputs = [int(i) for x, _ in (windows[n] for n in range(len(windows))) for i in x]
    whole = (length - 1) // block
    assert inputs == list(range(block * (whole if limit is None else min(limit, whole))))
    assert all(torch.equal(x + 1, y) for x, y in (windows[n] for n in range(len(windows))))
    with pytest.raises(IndexError):
        windows[len(windows)]


@given(st.text(st.sampled_from(ALPHABET), max_size=30))
def test_known_characters_survive_encoding(text: str) -> None:
    assert "".join(ALPHABET[i] for i in encode(text)) == text


def test_unknown_characters_share_the_last_id() -> None:
    assert encode("é\t").tolist() == [VOCABULARY - 1, VOCABULARY - 1]


def test_the_topics_are_split_without_overlap() -> None:
    data = TopicsText(batch_size=4, block_size=16, max_train_windows=10)
    data.setup("fit")
    inputs, targets = next(iter(data.train_dataloader()))
    assert inputs.shape == targets.shape == (4, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert data._train is not None and data._val is not None
    assert len(data._train) == 10 and len(data._train.ids) + len(data._val.ids) > 300_000
    # Both halves are views of one tensor: training ends where validation starts.
    assert data._train.ids.data_ptr() + 8 * len(data._train.ids) == data._val.ids.data_ptr()


@pytest.mark.parametrize(
    "arguments", [{"batch_size": 0}, {"block_size": 0}, {"max_train_windows": 0}]
)
def test_impossible_windows_are_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(arguments))}=0"):
        TopicsText(**arguments)


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


@pytest.mark.parametrize("arguments", [{"width": 10, "heads": 4}, {"layers": 0}])
def test_impossible_transformers_are_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        CharTransformer(**arguments)


def test_too_long_an_input_is_refused() -> None:
    with pytest.raises(ValueError, match="got 9 characters, block_size=8"):
        CharTransformer(**SMALL)(torch.zeros(1, 9, dtype=torch.int64))


def logged(model: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    values: dict[str, Any] = {}
    monkeypatch.setattr(model, "log", lambda name, value, **kwargs: values.update({name: value}))
    return values


def test_validated_perplexity_is_the_exponential_of_the_mean_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = CharTransformer(**SMALL).eval()
    values = logged(model, monkeypatch)
    batches = [torch.randint(0, VOCABULARY, (size, 9)) for size in (4, 1)]  # uneven on purpose
    with torch.no_grad():
        for index, ids in enumerate(batches):
            model.validation_step((ids[:, :-1], ids[:, 1:]), index)
        logits = torch.cat([model(ids[:, :-1]).flatten(0, 1) for ids in batches])
        targets = torch.cat([ids[:, 1:].flatten() for ids in batches])
        expected = math.exp(float(F.cross_entropy(logits, targets)))
    assert float(values["val_perplexity"].compute()) == pytest.approx(expected, rel=1e-4)


def test_validated_accuracy_is_the_part_that_is_right(
    monkeypatch: pytest.MonkeyPatch, digits: DigitsData
) -> None:
    model = DigitsCNN().eval()
    values = logged(model, monkeypatch)
    right = total = 0
    for index, (images, labels) in enumerate(digits.val_dataloader()):
        with torch.no_grad():
            model.validation_step((images, labels), index)
            right += int((model(images).argmax(1) == labels).sum())
        total += len(labels)
    assert total == 357
    assert float(values["val_acc"].compute()) == pytest.approx(right / total)


def learned(
    model: Any, batch: Any, monkeypatch: pytest.MonkeyPatch, steps: int
) -> tuple[float, float]:
    logged(model, monkeypatch)
    optimizer = model.configure_optimizers()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model.training_step(batch, 0)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses[0], losses[-1]


def test_the_cnn_learns(monkeypatch: pytest.MonkeyPatch, digits: DigitsData) -> None:
    first, last = learned(DigitsCNN(), next(iter(digits.train_dataloader())), monkeypatch, 25)
    assert last < 0.5 * first


def test_the_transformer_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = encode("the quick brown fox jumps over the lazy dog")[:36].reshape(4, 9)
    first, last = learned(CharTransformer(**SMALL), (ids[:, :-1], ids[:, 1:]), monkeypatch, 40)
    assert last < 0.7 * first
