"""What the server makes of the average of a round: a step of an optimizer from the last average towards it (layer T).

    previous - average      the round's pseudo-gradient, which stands for the gradient at ``previous``

With torch's SGD with momentum that is FedAvgM (Hsu, Qi and Brown, 2019), with its Adam FedAdam (Reddi et al., ICLR
2021) with the bias corrected. There is no server process: all ranks hold the same average and make the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

ServerOptimizer: TypeAlias = Callable[[Iterable[Tensor]], Optimizer]
"""Makes the server's optimizer for the parameters that it gets, e.g. ``partial(torch.optim.SGD, lr=1.0)``."""


class ServerStep:
    """The server's optimizer, and what it keeps between rounds.

    Args:
        make: makes it.

    Raises:
        TypeError: ``make`` does not.
    """

    def __init__(self, make: ServerOptimizer) -> None:
        tried = make([torch.zeros(1)]) if callable(make) else None
        if not isinstance(tried, Optimizer):
            raise TypeError(
                f"server={make!r} must make an optimizer of the parameters that it gets, e.g."
                " functools.partial(torch.optim.SGD, lr=1.0, momentum=0.9)"
            )
        self._make, self._told = make, repr(tried)
        self.forget()

    def settings(self) -> str:
        """Returns the settings in words, for ranks to compare."""
        return self._told

    def forget(self) -> None:
        """Begins again, in another fit."""
        self._at: list[Tensor] = []
        self._optimizer: Optimizer | None = None
        self._restored: Mapping[str, Any] = {}

    def step(self, previous: Sequence[Tensor], averaged: Sequence[Tensor]) -> None:
        """Replaces the average, in place.

        Args:
            previous: the parameters that all ranks began the round with.
            averaged: the average of what they have ended it with; the same shapes.
        """
        if [at.shape for at in self._at] != [one.shape for one in averaged]:
            self._at = [torch.empty_like(one) for one in averaged]
            self._optimizer = self._make(self._at)
        assert self._optimizer is not None
        if self._restored:
            self._optimizer.load_state_dict(dict(self._restored))
            self._restored = {}
        for at, before, after in zip(self._at, previous, averaged, strict=True):
            at.copy_(before)
            at.grad = before - after
        self._optimizer.step()
        for at, after in zip(self._at, averaged, strict=True):
            after.copy_(at)

    def state_dict(self) -> Mapping[str, Any]:
        """Returns what is kept between rounds; nothing before the first."""
        return self._restored or ({} if self._optimizer is None else self._optimizer.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`, at the next step."""
        self._restored = state
