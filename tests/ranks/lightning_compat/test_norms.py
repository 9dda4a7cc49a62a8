"""Norms that torch and Lightning are asked for, answered elsewhere, under names imported before."""

from __future__ import annotations

import lightning
import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

from lightning_hetero import lightning_compat as compat

VERSIONS = f"torch {torch.__version__}, lightning {lightning.__version__}; checked with 2.13 and 2.6.6"


def module() -> nn.Module:
    found = nn.Linear(2, 1)
    for p in found.parameters():
        p.grad = torch.full_like(p, 3.0)
    return found


def test_norms_by() -> None:
    asked = []

    def total(gradients: object, order: float) -> torch.Tensor | None:
        asked.append(order)
        return torch.tensor(8.0) if order == 2.0 else None

    def each(parameters: object, order: float) -> list[float | None] | None:
        return [6.0, 8.0] if order == 2.0 else None

    stock = module()
    want = grad_norm(stock, 1.0), float(clip_grad_norm_(stock.parameters(), 1.0, norm_type=1.0))
    with compat.norms_by(total, each):
        ours = module()
        assert float(clip_grad_norm_(ours.parameters(), 4.0)) == 8.0, VERSIONS
        assert ours.bias.grad == pytest.approx(1.5, rel=1e-6)
        assert grad_norm(ours, 2, "|") == {
            "grad_2.0_norm|weight": 6.0, "grad_2.0_norm|bias": 8.0, "grad_2.0_norm_total": 10.0,
        }, VERSIONS  # fmt: skip
        ours = module()
        assert (grad_norm(ours, 1.0), float(clip_grad_norm_(ours.parameters(), 1.0, norm_type=1.0))) == want
        assert float(torch.nn.utils.get_total_norm([torch.ones(4)])) == 8.0
        with pytest.raises(ValueError, match="norm_type"):
            grad_norm(ours, -1)
    assert asked == [2.0, 1.0, 2.0] and float(get_total_norm([torch.ones(4)])) == 2.0
    assert grad_norm(module(), 1.0) == want[0]
