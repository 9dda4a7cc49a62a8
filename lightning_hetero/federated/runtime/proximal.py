"""FedProx (Li et al., MLSys 2020): a local step is pulled towards the last average (layer T).

    local loss + mu / 2 |w - w_average|^2        added as its gradient, mu (w - w_average)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["add_proximal_"]


@torch.no_grad()
def add_proximal_(parameters: Sequence[Tensor], average: Sequence[Tensor], mu: float) -> None:
    """Adds the term's gradient to those of the parameters; one without a gradient is not trained and gets none.

    Args:
        parameters: as they are.
        average: as they were after the last average.
        mu: strength; under a loss scale, times the scale.
    """
    for parameter, before in zip(parameters, average, strict=True):
        if parameter.grad is not None:
            parameter.grad.add_(parameter.detach() - before, alpha=mu)
