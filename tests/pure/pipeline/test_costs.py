"""A model's cost survives JSON."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.pipeline.decide.costs import layer_from_plain, layer_to_plain, model_from_plain, model_to_plain
from lightning_hetero.types import AffineCost, LayerCost, ModelCost

positive = st.floats(0.0, allow_nan=False, allow_infinity=False)
times = st.builds(AffineCost, fixed_s=positive, per_sample_s=positive)
layers = st.builds(
    LayerCost,
    name=st.text(),
    forward=times,
    backward=times,
    param_bytes=positive,
    state_bytes=positive,
    activation_bytes=positive,
    output_bytes=positive,
)
models = st.builds(ModelCost, layers=st.lists(layers, min_size=1, max_size=3).map(tuple), before=layers, head=layers)


@given(models)
def test_every_cost_comes_back_from_strict_json(model: ModelCost) -> None:
    assert model_from_plain(json.loads(json.dumps(model_to_plain(model), allow_nan=False))) == model


def test_what_another_version_wrote_is_refused() -> None:
    zero = AffineCost(fixed_s=0.0, per_sample_s=0.0)
    plain = layer_to_plain(LayerCost(name="a", forward=zero, backward=zero))
    del plain["state_bytes"]
    with pytest.raises(ValueError, match=re.escape("lacks ['state_bytes']")):
        layer_from_plain(plain)
    with pytest.raises(ValueError, match=re.escape("lacks ['before', 'head']")):
        model_from_plain({"layers": []})


