"""What every predictor of one rank's compute time promises (layer P)."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from lightning_hetero.types import AffineCost

__all__ = ["Predictor"]

_P = TypeVar("_P", bound="Predictor")  # typing.Self needs Python 3.11


class Predictor(ABC):
    """A running model ``T(b) = fixed_s + per_sample_s * b`` of ONE rank's compute time.

    The balancing policy keeps one predictor per rank, feeds it every measurement in the order of the
    steps, and asks for `cost` before each decision. All ranks feed the same numbers and must come to
    the same decision, so a predictor is deterministic: no clock, no random numbers, no environment, and
    only operations that IEEE 754 rounds alike on every machine (+ - * / and sqrt; not log, exp or pow).

    To write one, implement `update`, `cost` and `std_s`, and name the attributes that are memory
    (rather than settings) in `MEMORY`; `fresh` and the state round trip follow from that::

        class Slowest(Predictor):
            MEMORY = {"updates": 0, "worst_s": 0.0}

            def update(self, samples, compute_s):
                samples, compute_s = self.checked(samples, compute_s)
                self.updates += 1
                self.worst_s = max(self.worst_s, compute_s / max(samples, 1.0))

            def cost(self):
                self.check_ready()
                return AffineCost(fixed_s=0.0, per_sample_s=self.worst_s)

            def std_s(self, samples):
                self.check_ready()
                return 0.0

    Attributes:
        MEMORY: names and first values (plain numbers) of the attributes that `update` changes.
            Must contain ``updates``, the number of measurements so far.
    """

    MEMORY: ClassVar[Mapping[str, float | int]] = {"updates": 0}
    updates: int

    def __init__(self) -> None:
        self._remember(self.MEMORY)

    @abstractmethod
    def update(self, samples: int, compute_s: float) -> None:
        """Learns from one step: ``samples`` samples took ``compute_s`` seconds of own work.

        Args:
            samples: samples computed on; 0 is a step without data and tells only the fixed cost.
            compute_s: own compute time [s], never any waiting for peers.

        Raises:
            ValueError: ``samples`` is negative or ``compute_s`` is not a finite number above 0.
        """

    @abstractmethod
    def cost(self) -> AffineCost:
        """Returns the present model; both coefficients are finite and >= 0.

        Raises:
            RuntimeError: there is no measurement yet.
        """

    @abstractmethod
    def std_s(self, samples: float) -> float:
        """Returns one standard deviation [s] of `predict`, i.e. of the mean time, not of a single step.

        Raises:
            RuntimeError: there is no measurement yet.
        """

    def predict(self, samples: float) -> float:
        """Returns the modelled compute time [s] of ``samples`` samples.

        Raises:
            RuntimeError: there is no measurement yet.
        """
        return self.cost().seconds(samples)

    @property
    def ready(self) -> bool:
        """Whether there is at least one measurement."""
        return self.updates > 0

    def fresh(self: _P) -> _P:
        """Returns a predictor with the same settings and no memory (one prototype -> one per rank)."""
        new = copy.copy(self)
        new._remember(self.MEMORY)
        return new

    def _remember(self, memory: Mapping[str, float | int]) -> None:
        for name, value in memory.items():
            setattr(self, name, value)

    def state_dict(self) -> dict[str, float | int | list[float]]:
        """Returns the memory as plain numbers; settings are not part of it."""
        return {name: getattr(self, name) for name in self.MEMORY}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the memory exactly: what follows is bitwise what it would have been.

        Raises:
            ValueError: a key is missing or unknown, or a value is not a finite number. Nothing has
                been changed then.
        """
        missing, unknown = set(self.MEMORY) - set(state), set(state) - set(self.MEMORY)
        if missing or unknown:
            raise ValueError(
                f"state of {type(self).__name__} does not fit: missing keys {sorted(missing)}, "
                f"unknown keys {sorted(map(str, unknown))}; load it into the kind of predictor that wrote it"
            )
        for name, value in state.items():
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(
                    f"state of {type(self).__name__}: {name}={value!r} must be a finite number; "
                    "pass what state_dict() returned"
                )
        self._remember(state)

    @staticmethod
    def checked(samples: float, compute_s: float) -> tuple[float, float]:
        """Returns the arguments of `update` as plain floats, or raises ValueError if they make no sense."""
        plain_samples, plain_s = float(samples), float(compute_s)  # NumPy scalars are slow and not plain
        if not 0.0 <= plain_samples < math.inf:
            raise ValueError(f"samples={samples!r} must be a finite number >= 0")
        if not 0.0 < plain_s < math.inf:
            raise ValueError(
                f"compute_s={compute_s!r} must be a finite number of seconds > 0; drop steps without a time"
            )
        return plain_samples, plain_s

    def check_ready(self) -> None:
        """Raises RuntimeError before the first measurement."""
        if not self.updates:
            raise RuntimeError(
                f"{type(self).__name__} has no measurement yet: call update() first, or split equally while "
                "ready is False"
            )
