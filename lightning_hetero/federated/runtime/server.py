"""What the server makes of the average of a round: the average itself, or a step towards it (layer T).

    d = previous - average        the round's pseudo-gradient
    FedAvgM   m <- beta m + d;                                       parameters = previous - lr m
    FedAdam   m <- b1 m + (1 - b1) d;  v <- b2 v + (1 - b2) d^2;     parameters = previous - lr m / (sqrt v + eps)

FedAvgM: Hsu, Qi and Brown (2019). FedAdam: Reddi et al. (ICLR 2021), without bias correction, as there. There is no
server process: all ranks hold the same average and make the same step.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

ServerName: TypeAlias = Literal["fedavgm", "fedadam"]


def _number(name: str, value: Any, most: float = math.inf) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < most:
        raise ValueError(f"{name}={value!r} must be a number >= 0" + (f" and < {most:g}" if most < math.inf else ""))
    return float(value)


class ServerOptimizer(ABC):
    """A step from the last average towards the new one; keeps what it needs between rounds."""

    def __init__(self) -> None:
        self._kept: dict[str, list[Tensor]] = {}

    @abstractmethod
    def step(self, previous: Sequence[Tensor], averaged: Sequence[Tensor]) -> None:
        """Replaces the average, in place.

        Args:
            previous: the parameters that all ranks began the round with.
            averaged: the average of what they have ended it with; the same shapes.
        """

    def _memory(self, name: str, like: Sequence[Tensor]) -> list[Tensor]:
        """Returns what is kept under a name, zeros at first, of the shapes and on the devices of ``like``."""
        kept = self._kept.get(name, [])
        if [t.shape for t in kept] != [t.shape for t in like]:
            kept = [torch.zeros_like(t) for t in like]
        self._kept[name] = [k.to(t.device) for k, t in zip(kept, like, strict=True)]
        return self._kept[name]

    def settings(self) -> str:
        """Returns the settings in words, for ranks to compare."""
        named = sorted((name, value) for name, value in vars(self).items() if not name.startswith("_"))
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in named)})"

    def forget(self) -> None:
        """Begins again, in another fit."""
        self._kept.clear()

    def state_dict(self) -> dict[str, list[Tensor]]:
        """Returns what is kept between rounds."""
        return dict(self._kept)

    def load_state_dict(self, state: Mapping[str, Sequence[Tensor]]) -> None:
        """Restores `state_dict`."""
        self._kept = {name: [tensor.clone() for tensor in tensors] for name, tensors in state.items()}


class FedAvgM(ServerOptimizer):
    """Momentum on the server.

    Args:
        lr: of the server, >= 0.
        momentum: in [0, 1).
    """

    def __init__(self, *, lr: float = 1.0, momentum: float = 0.9) -> None:
        super().__init__()
        self.lr, self.momentum = _number("lr", lr), _number("momentum", momentum, 1.0)

    @torch.no_grad()
    def step(self, previous: Sequence[Tensor], averaged: Sequence[Tensor]) -> None:
        for before, after, m in zip(previous, averaged, self._memory("momentum", averaged), strict=True):
            m.mul_(self.momentum).add_(before - after)
            after.copy_(before - self.lr * m)


class FedAdam(ServerOptimizer):
    """Adam on the server.

    Args:
        lr: of the server, >= 0.
        betas: of the two moments, in [0, 1).
        eps: degree of adaptivity, >= 0.
    """

    def __init__(self, *, lr: float = 0.01, betas: Sequence[float] = (0.9, 0.99), eps: float = 1e-3) -> None:
        super().__init__()
        self.lr, self.eps = _number("lr", lr), _number("eps", eps)
        if len(betas) != 2:
            raise ValueError(f"betas={betas!r} must be two numbers in [0, 1)")
        self.betas = tuple(_number("betas", beta, 1.0) for beta in betas)

    @torch.no_grad()
    def step(self, previous: Sequence[Tensor], averaged: Sequence[Tensor]) -> None:
        first, second = self.betas
        moments = zip(self._memory("mean", averaged), self._memory("square", averaged), strict=True)
        for before, after, (m, v) in zip(previous, averaged, moments, strict=True):
            d = before - after
            m.mul_(first).add_(d, alpha=1.0 - first)
            v.mul_(second).addcmul_(d, d, value=1.0 - second)
            after.copy_(before - self.lr * m / (v.sqrt() + self.eps))


_KNOWN: dict[str, Callable[[], ServerOptimizer]] = {"fedavgm": FedAvgM, "fedadam": FedAdam}


def server_by_name(given: ServerName | ServerOptimizer | None) -> ServerOptimizer | None:
    """Returns the optimizer that was given, or a new one of that name with default settings.

    Raises:
        ValueError: the name is unknown.
        TypeError: it is neither a name nor an optimizer.
    """
    if given is None or isinstance(given, ServerOptimizer):
        return given
    if not isinstance(given, str):
        raise TypeError(f"server={given!r} must be a ServerOptimizer, one of {tuple(_KNOWN)}, or None")
    if given not in _KNOWN:
        raise ValueError(f"server={given!r} must be one of {tuple(_KNOWN)}, a ServerOptimizer, or None")
    return _KNOWN[given]()
