"""Which layers are the same: kept profiles, and the structure they are known by."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F

from lightning_hetero.pipeline.runtime.measure.layer_identity import structure_of
from lightning_hetero.pipeline.runtime.measure.layers import profile_key
from tests.ranks.pipeline.measured_kit import BYTES, Counting, D, profile, rows


def test_a_profile_is_kept_by_structure(tmp_path: Path) -> None:
    timer = Counting()

    def marks(layers: Sequence[nn.Module], x: Tensor | None = None, **settings: Any) -> int:
        before = timer.marks
        profile(layers, rows() if x is None else x, cache_folder=tmp_path, timer=timer, **settings)
        return timer.marks - before

    assert marks([nn.Linear(D, D), nn.ReLU()]) > 0
    assert marks([nn.Linear(D, D), nn.ReLU()]) == 0  # other weights
    assert marks([nn.Linear(D, D), nn.ReLU()], optimizer=optim.Adam) == 0
    again = profile([nn.Linear(D, D), nn.ReLU()], rows(), cache_folder=tmp_path, optimizer=optim.Adam)
    assert [layer.state_bytes for layer in again.layers] == [4 * BYTES, 0.0]
    for other in (
        lambda: marks([nn.Linear(D, D), nn.GELU()]),
        lambda: marks([nn.Linear(D, 2 * D), nn.ReLU()]),
        lambda: marks([nn.Linear(D, D).eval(), nn.ReLU()]),
        lambda: marks([nn.Linear(D, D).requires_grad_(False), nn.ReLU()]),
        lambda: marks([nn.Linear(D, D), nn.ReLU()], rows(8)),
        lambda: marks([nn.Linear(D, D), nn.ReLU()], micro_samples=[1, 2]),
        lambda: marks([nn.Linear(D, D), nn.ReLU()], names=["a", "b"]),
    ):
        assert other() > 0
    for path in tmp_path.iterdir():
        path.write_text(path.read_text().replace("forward", "foreword"))
    assert marks([nn.Linear(D, D), nn.ReLU()]) > 0  # what another version wrote


def test_the_key_follows_autocast() -> None:
    layers, x = [nn.Linear(D, D)], rows()
    plain = profile_key(layers, x, micro_samples=[1, 2])
    with torch.autocast("cpu", torch.bfloat16):
        assert profile_key(layers, x, micro_samples=[1, 2]) != plain


class Settings:
    def __init__(self, width: int) -> None:
        self.width = width


class Windowed(nn.Module):
    def __init__(self, window: Any) -> None:
        super().__init__()
        self.window = window


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (nn.Linear(2, 3), nn.Linear(2, 3), True),
        (nn.Linear(2, 3), nn.Linear(3, 2), False),
        (nn.Dropout(0.1), nn.Dropout(0.2), False),
        (Windowed(3), Windowed(4), False),
        (Windowed({"a": [1, None]}), Windowed({"a": [1, None]}), True),
        (Windowed({1, 2}), Windowed({2, 1}), True),
        (Windowed(Settings(3)), Windowed(Settings(3)), True),
        (Windowed(Settings(3)), Windowed(Settings(4)), False),
        (Windowed(F.relu), Windowed(F.gelu), False),
        (Windowed(torch.zeros(2)), Windowed(torch.ones(2)), True),
        (Windowed(torch.zeros(2)), Windowed(torch.zeros(3)), False),
        (nn.Sequential(nn.ReLU(), nn.Tanh()), nn.Sequential(nn.Tanh(), nn.ReLU()), False),
    ],
)
def test_structure_tells_layers_apart_by_what_they_do(a: nn.Module, b: nn.Module, same: bool) -> None:
    assert (structure_of(a) == structure_of(b)) is same
    assert (structure_of(a, exact=True) == structure_of(b, exact=True)) is same


def test_what_cannot_be_read_is_the_same_only_if_it_is_the_same_object() -> None:
    one, other = (lambda: 1), (lambda: 2)
    assert structure_of(Windowed(one)) == structure_of(Windowed(other))
    assert structure_of(Windowed(one), exact=True) != structure_of(Windowed(other), exact=True)
    assert structure_of(Windowed(one), exact=True) == structure_of(Windowed(one), exact=True)


def test_ties_are_part_of_the_structure() -> None:
    tied, free = (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2))
    tied[1].weight = tied[0].weight  # pyright: ignore
    assert structure_of(tied) != structure_of(free)
