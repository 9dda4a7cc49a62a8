"""Costs from sizes: against published counts, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_hetero.plan.formula import model_from_formula
from lightning_hetero.plan.setup import whole_step

pytestmark = pytest.mark.pure
GPT2 = {"kind": "transformer", "layers": 12, "width": 768, "window": 1024, "vocabulary": 50257, "flops_per_s": 1e12}


def test_gpt2_has_its_parameters_and_flops() -> None:
    model = model_from_formula(GPT2)
    params = sum(part.param_bytes for part in (model.before, *model.layers, model.head)) / 2
    assert params == pytest.approx(124.4e6, rel=0.01)  # Radford et al., 2019
    # 6 N per token (Kaplan et al., 2020, N without embeddings) and attention's 12 L d s
    per_token = 6 * 12 * 12 * 768**2 + 12 * 12 * 768 * 1024 + 6 * 768 * 50257
    assert whole_step(model).per_sample_s == pytest.approx(1024 * per_token / 1e12)
    assert len(model.layers) == 12 and model.layers[0].output_bytes == 1024 * 768 * 2


def test_activations_are_korthikantis() -> None:
    layer = model_from_formula({**GPT2, "heads": 12}).layers[0]
    assert layer.activation_bytes == 1024 * 768 * (34 + 5 * 12 * 1024 / 768)
    assert layer.state_bytes == 16 * 12 * 768**2


def test_layers_of_a_known_total() -> None:
    model = model_from_formula({
        "kind": "layers", "layers": 5, "params": 25.6e6, "flops_per_sample": 8.2e9, "flops_per_s": 8.2e12,
        "step_s": 0.03, "activation_bytes_per_sample": 1e8, "output_bytes_per_sample": 3e6,
        "bytes_per_value": 4,
    })  # fmt: skip
    step = whole_step(model)
    assert step.per_sample_s == pytest.approx(3e-3) and step.fixed_s == pytest.approx(0.03)
    assert sum(layer.param_bytes for layer in model.layers) == pytest.approx(4 * 25.6e6)
    assert sum(layer.activation_bytes for layer in model.layers) == pytest.approx(1e8)


@pytest.mark.parametrize(
    ("formula", "error", "words"),
    [
        ([], TypeError, "must be a mapping"),
        ({"kind": "cnn"}, ValueError, "formula.kind='cnn' must be one of transformer, layers"),
        ({**GPT2, "depth": 3}, ValueError, r"kind=transformer has unknown keys \['depth'\]: it takes kind, layers"),
        ({"kind": "transformer", "layers": 2}, ValueError, r"lacks \['width', 'window', 'flops_per_s'\]"),
        ({**GPT2, "width": 0}, ValueError, "formula.width=0 must be a finite number > 0"),
        ({**GPT2, "flops_per_s": "fast"}, ValueError, "formula.flops_per_s='fast' must be"),
    ],
)
def test_what_cannot_be_is_refused(formula: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        model_from_formula(formula)
