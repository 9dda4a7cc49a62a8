"""A push says of each gradient in its slot whether it is finite, whenever and however it got there."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_hetero.stale.runtime.layout import FINITE, NONFINITE, FlatLayout
from lightning_hetero.stale.runtime.work.gradient_writer import GradientWriter
from tests.ranks.transport.in_process import lone_link

NONE = torch.empty(0, dtype=torch.uint8)  # there are no buffers
WHEN = ("in backward", "in place afterwards", "replaced afterwards", "gone afterwards")


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("compression", [None, "fp16"], ids=str)
@pytest.mark.parametrize("when", WHEN)
def test_what_is_in_the_slot_at_the_push_counts(when: str, compression: Any, overlap: bool) -> None:
    parameters = [Parameter(torch.ones(4, 3)), Parameter(torch.ones(5)), Parameter(torch.ones(2))]
    layout = FlatLayout.of([(str(i), p) for i, p in enumerate(parameters)], compression=compression)
    link = lone_link(layout.slot_bytes, layout.bytes)
    writer = GradientWriter(link, layout, parameters, torch.device("cpu"), overlap=overlap)

    def push() -> list[int]:
        writer.write(NONE, NONE, lambda numbers: None)
        return layout.flags_of(link.gradient)[0].tolist()

    def backward(poison: float) -> Tensor:
        (parameters[0].sum() + parameters[1][2] * poison).backward()
        gradient = parameters[1].grad
        assert gradient is not None
        return gradient

    assert push() == [0, 0, 0]
    backward(2.0)
    assert push() == [FINITE, FINITE, 0]
    gradient = backward(math.inf if when in ("in backward", "gone afterwards") else 1.0)
    if when == "in place afterwards":
        gradient[2] = math.nan
    elif when == "replaced afterwards":
        parameters[1].grad = torch.full((5,), -math.inf)
    elif when == "gone afterwards":
        gradient.nan_to_num_(posinf=1.0)
    assert push() == [FINITE, FINITE if when == "gone afterwards" else NONFINITE, 0]
    backward(3.0)
    assert push() == [FINITE, FINITE, 0]
    writer.detach()
    link.close()


def test_what_overflows_in_the_slot_is_not_finite() -> None:
    parameter = Parameter(torch.ones(3))
    layout = FlatLayout.of([("p", parameter)], compression="fp16")
    link = lone_link(layout.slot_bytes, layout.bytes)
    writer = GradientWriter(link, layout, [parameter], torch.device("cpu"), overlap=False)
    for scale, flag in ((6e4, FINITE), (7e4, NONFINITE)):  # float16 ends at 65504, which the first's sum exceeds, too
        (parameter.sum() * scale).backward()
        writer.write(NONE, NONE, lambda numbers: None)
        assert layout.flags_of(link.gradient)[0].tolist() == [flag]
    link.close()
