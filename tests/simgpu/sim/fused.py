"""Kernels that only CUDA has: cells of recurrent networks, as cuDNN's place is taken by them where there is none."""

from __future__ import annotations

import torch
from torch import Tensor

_Optional = Tensor | None


def _sum(gates: Tensor, other: Tensor, one: _Optional, two: _Optional) -> Tensor:
    total = gates + other
    return total if one is None or two is None else total + one + two


def _lstm(
    input_gates: Tensor, hidden_gates: Tensor, cx: Tensor, input_bias: _Optional = None, hidden_bias: _Optional = None
) -> tuple[Tensor, Tensor, Tensor]:
    i, f, g, o = _sum(input_gates, hidden_gates, input_bias, hidden_bias).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def _lstm_backward(
    grad_hy: _Optional, grad_cy: _Optional, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[_Optional, _Optional, _Optional]:
    i, f, g, o = workspace.chunk(4, 1)
    reached = cy.tanh()
    of_hy = torch.zeros_like(cy) if grad_hy is None else grad_hy
    of_cy = of_hy * o * (1 - reached * reached) + (0 if grad_cy is None else grad_cy)
    gates = torch.cat(
        [of_cy * g * i * (1 - i), of_cy * cx * f * (1 - f), of_cy * i * (1 - g * g), of_hy * reached * o * (1 - o)], 1
    )
    return gates, of_cy * f, gates.sum(0) if has_bias else None


def _gru(
    input_gates: Tensor, hidden_gates: Tensor, hx: Tensor, input_bias: _Optional = None, hidden_bias: _Optional = None
) -> tuple[Tensor, Tensor]:
    given = input_gates if input_bias is None else input_gates + input_bias
    kept = hidden_gates if hidden_bias is None else hidden_gates + hidden_bias
    (ir, iz, i_n), (hr, hz, hn) = given.chunk(3, 1), kept.chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    n = (i_n + r * hn).tanh()
    return n + z * (hx - n), torch.cat([r, z, n, hx, hn], 1)


def _gru_backward(
    grad_hy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, _Optional, _Optional]:
    r, z, n, hx, hn = workspace.chunk(5, 1)
    of_z = grad_hy * (hx - n) * z * (1 - z)
    of_n = grad_hy * (1 - z) * (1 - n * n)
    of_r = of_n * hn * r * (1 - r)
    given, kept = torch.cat([of_r, of_z, of_n], 1), torch.cat([of_r, of_z, of_n * r], 1)
    return given, kept, grad_hy * z, given.sum(0) if has_bias else None, kept.sum(0) if has_bias else None


FUNCTIONS = {
    "_thnn_fused_lstm_cell": _lstm,
    "_thnn_fused_lstm_cell_backward_impl": _lstm_backward,
    "_thnn_fused_gru_cell": _gru,
    "_thnn_fused_gru_cell_backward": _gru_backward,
}
