"""What every predictor of one rank's compute time promises (layer P).

The time per sample: its exponentially weighted moving average, and its last value.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from inspect import get_annotations
from typing import Any, ClassVar, TypeAlias, TypeVar

from lightning_hetero.checked import real
from lightning_hetero.types import AffineCost

Memory: TypeAlias = Mapping[str, float | int | list[float]]
"""Names and first values of what `Predictor.update` changes."""

_P = TypeVar("_P", bound="Predictor")  # typing.Self needs Python 3.11
_Kind = TypeVar("_Kind", bound="type[Predictor]")

NONE_YET: list[float] = []
"""The first value of a memory that is a list; each predictor gets its own."""


class Predictor(ABC):
    """A running model of ONE rank's compute time: a line ``T(b) = fixed_s + per_sample_s * b``, perhaps above a floor.

    The balancing policy keeps one predictor per rank, feeds it every measurement in the order of the
    steps, and asks for `cost` before each decision. All ranks feed the same numbers and must come to
    the same decision, so a predictor is deterministic: no clock, no random numbers, no environment, and
    only operations that IEEE 754 rounds equally on every machine (+ - * / and sqrt; not log, exp or pow).

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
        MEMORY: names and first values (plain numbers, or lists of them) of the attributes that `update` changes.
            Must contain ``updates``, the number of measurements so far.
        WANTS_LOAD: whether it is to be `told` the host's load, which has to be measured.
    """

    MEMORY: ClassVar[Memory] = {"updates": 0}
    WANTS_LOAD: ClassVar[bool] = False
    updates: int

    def __init__(self) -> None:
        self._remember(self.MEMORY)

    @abstractmethod
    def update(self, samples: float, compute_s: float) -> None:
        """Learns from one step: ``samples`` samples took ``compute_s`` seconds of own work.

        Args:
            samples: samples computed on, or what their work is worth in samples, above 0.
            compute_s: own compute time [s], never any waiting for peers.

        Raises:
            ValueError: ``samples`` or ``compute_s`` is not a finite number above 0.
        """

    def told(self, *, free_cpu: float, free_mem: float) -> None:
        """Takes in the load during the step that the next `update` is of; only if `WANTS_LOAD`. Does nothing here.

        Args:
            free_cpu: part of its processors' time that others left free, in [0, 1]; NaN: not known.
            free_mem: part of its host's memory that is free, in [0, 1]; NaN: not known.
        """

    @abstractmethod
    def cost(self) -> AffineCost:
        """Returns the current model; all coefficients are finite and >= 0.

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

    def _remember(self, memory: Memory) -> None:
        for name, value in memory.items():
            setattr(self, name, _copied(value))

    def state_dict(self) -> dict[str, float | int | list[float]]:
        """Returns the memory as plain numbers and lists of them; settings are not part of it."""
        return {name: _copied(getattr(self, name)) for name in self.MEMORY}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the memory exactly: what follows is bitwise what it would have been.

        Raises:
            ValueError: a key is missing or unknown. Nothing has been changed then.
        """
        missing, unknown = set(self.MEMORY) - set(state), set(state) - set(self.MEMORY)
        if missing or unknown:
            raise ValueError(
                f"state of {type(self).__name__} does not fit: missing keys {sorted(missing)}, "
                f"unknown keys {sorted(map(str, unknown))}; load it into the kind of predictor that wrote it"
            )
        self._remember(state)

    @staticmethod
    def checked(samples: float, compute_s: float) -> tuple[float, float]:
        """Returns the arguments of `update` as plain floats, or raises ValueError if they make no sense."""
        return real("samples", samples, above=True), real("compute_s", compute_s, above=True)

    def check_ready(self) -> None:
        """Raises RuntimeError before the first measurement."""
        if not self.updates:
            raise RuntimeError(
                f"{type(self).__name__} has no measurement yet: call update() first, or split equally while "
                "ready is False"
            )


def remembering(kind: _Kind) -> _Kind:
    """Adds to a class's `MEMORY` what it declares with a first value, as ``rate_s: float = 0.0``."""
    own = [name for name, of in get_annotations(kind).items() if not str(of).startswith("ClassVar")]
    kind.MEMORY = {**kind.MEMORY, **{name: vars(kind)[name] for name in own}}
    return kind


def _copied(value: float | int | list[float]) -> float | int | list[float]:
    return list(value) if isinstance(value, list) else value


_MEMORY_OF_ERROR = 0.1  # weight of the newest squared error in `std_s`: about the last 20 steps
_FIRST_ERROR = 0.1  # relative; assumed until a second measurement says how far off predictions are


@remembering
class Ewma(Predictor):
    """Smoothed seconds per sample: ``rate <- (1 - weight) * rate + weight * T / b``, ``T(b) = rate * b``.

    The baseline of LB-BSP ("CPU": T = x / v) and its successors. It knows no fixed cost, so where one
    exists the split approaches the best one only by the fixed cost's share of the step per decision.

    Args:
        weight: weight of the newest measurement, in (0, 1]; 1 keeps the last value only.

    Raises:
        ValueError: ``weight`` is outside (0, 1].
    """

    rate_s: float = 0.0
    empty_s: float = 0.0  # of the last release, whose checkpoints hold it
    error_sq: float = _FIRST_ERROR**2

    def __init__(self, *, weight: float = 0.5) -> None:
        if not 0.0 < weight <= 1.0:
            raise ValueError(f"Ewma(weight={weight!r}) must lie in (0, 1]; 1 keeps the last value only")
        super().__init__()
        self.weight = weight

    def update(self, samples: float, compute_s: float) -> None:
        b, measured_s = self.checked(samples, compute_s)
        self.updates += 1
        rate_s = measured_s / b
        if self.rate_s > 0.0:
            # Clipped, so that a single glitch does not make every later prediction look worthless.
            error = min(rate_s / self.rate_s, 2.0) - 1.0
            self.error_sq += _MEMORY_OF_ERROR * (error * error - self.error_sq)
            rate_s = (1.0 - self.weight) * self.rate_s + self.weight * rate_s
        self.rate_s = rate_s

    def cost(self) -> AffineCost:
        self.check_ready()
        return AffineCost(fixed_s=0.0, per_sample_s=self.rate_s)

    def std_s(self, samples: float) -> float:
        # One-step errors of an EWMA under white noise have variance 2 / (2 - w) times the noise's, the
        # average itself w / (2 - w) times: hence the factor w / 2.
        return self.predict(samples) * math.sqrt(0.5 * self.weight * self.error_sq)


class LastValue(Ewma):
    """Seconds per sample of the last measurement: ``T(b) = b * T_last / b_last``.

    Fastest to follow a change and the noisiest: the limit ``weight=1`` of `Ewma`. A single slow step moves samples
    away for one decision.
    """

    def __init__(self) -> None:
        super().__init__(weight=1.0)
