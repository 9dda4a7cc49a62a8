"""One call of the backbone as the runtime gets it: what it hands out, what comes back, what is refused."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.pipeline.runtime.step.cut import GraphInput
from lightning_hetero.pipeline.runtime.step.layer_calls.chain import NotAChainError
from tests.ranks.pipeline.cut_kit import assert_same, suspended


def test_a_call_under_no_grad_is_forward_only(carrier: ExitStack) -> None:
    x = torch.ones(2, requires_grad=True)

    def body(backbone: nn.Module) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            return backbone(x)

    step, call = suspended(carrier, body)
    assert (call.grad_enabled, call.value.requires_grad) == (False, False)
    assert call.autocast == {"cpu": torch.bfloat16}
    y = step.resume(call.reply(call.value * 2)).value
    assert not y.requires_grad


@pytest.mark.parametrize(
    ("args", "kwargs", "named"),
    [
        ((torch.ones(1), {1, 2}), {}, "argument 1, a set"),
        ((torch.ones(1),), {"rows": range(2)}, "rows=, a range"),
        (({"x": [torch.ones(1), object()]},), {}, "argument 0, a object"),
    ],
)
def test_what_cannot_travel_is_named(
    carrier: ExitStack, args: tuple[Any, ...], kwargs: dict[str, Any], named: str
) -> None:
    with pytest.raises(NotAChainError, match=f"layer 0 of the backbone is called with {named}, which cannot travel"):
        suspended(carrier, lambda backbone: backbone(*args, **kwargs))


def test_a_version_check_reaches_across_the_cut(carrier: ExitStack) -> None:
    """What a direct run refuses, overwriting what a layer has saved, is not silently wrong."""

    def body(backbone: nn.Module) -> Tensor:
        y = backbone(torch.ones(2, requires_grad=True) * 2)
        y.mul_(2)
        return y.sum()

    step, call = suspended(carrier, body)
    y = call.value.sigmoid()  # saves its output
    step.resume(call.reply(y)).value.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(*call.output_grads())


def test_a_graph_input_sums_what_comes_and_tells_what_comes_too_late() -> None:
    graph_input = GraphInput([torch.ones(2), torch.arange(2), torch.ones(2), torch.ones(1)], [True, True, False, True])
    a, integers, constant, unused = graph_input.take()
    assert [t.requires_grad for t in (a, integers, constant, unused)] == [True, False, False, True]
    (a * 2).sum().backward()
    (a * 3).sum().backward()
    late = (a * 5).sum()
    grads = graph_input.take_grads()
    assert grads[1:] == [None, None, None]
    assert_same(grads[0], torch.full((2,), 5.0))
    with pytest.raises(RuntimeError, match="the last must go back first"):
        late.backward()
