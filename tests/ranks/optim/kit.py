"""What the tests of `UnevenZeroOptimizer` share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

EXACT = 1e-12


def differing(ours: Any, plain: Any) -> list[str]:
    """Where two states of optimizers are not equal: keys, types, shapes, numbers."""
    found = [] if ours["param_groups"] == plain["param_groups"] else ["groups"]
    found += [] if ours["state"].keys() == plain["state"].keys() else ["parameters"]
    for index, state in plain["state"].items():
        mine = ours["state"][index]
        found += [] if mine.keys() == state.keys() else [f"{index}: {sorted(mine)}"]
        for name, value in state.items():
            if not isinstance(value, Tensor):
                same = mine[name] == value
            else:
                same = (mine[name].shape, mine[name].dtype) == (value.shape, value.dtype)
                same = same and torch.allclose(mine[name].double(), value.double(), rtol=EXACT, atol=1e-15)
                same = same and mine[name].stride() == value.stride()
            found += [] if same else [f"{index}: {name}"]
    return found
