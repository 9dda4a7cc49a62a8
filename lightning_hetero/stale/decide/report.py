"""What the server counts in a run, and what that says about ranks and staleness (layer P)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from lightning_hetero.record.ledger import too_few
from lightning_hetero.stale.decide.coordinator import Coordinator
from lightning_hetero.types import SpeedSample, StepReport

_MOST_STALE = 0.25  # of the samples; the measured price of more, with momentum, is several times the final loss
_ENOUGH = 8  # updates before that is judged


@dataclass(slots=True)
class Counts:
    """Totals since the start of the server.

    Attributes:
        updates, apply_s, longest_apply_s: updates, and the time they took [s].
        longest_queue: messages found waiting when the server looked, at most.
        pushes, samples: accepted, by rank.
        staleness: samples accepted, by the number of versions they were old.
        discarded: samples computed and wasted, by reason.
        reissued: samples given out again, by reason.
        hold_s: time from a worker's claim to its answer, by rank [s].
        compute_s: time the workers say they computed for their pushes, by rank [s].
        overflows: updates skipped because gradients overflowed.
    """

    updates: int = 0
    apply_s: float = 0.0
    longest_apply_s: float = 0.0
    longest_queue: int = 0
    pushes: Counter[int] = field(default_factory=Counter[int])
    samples: Counter[int] = field(default_factory=Counter[int])
    staleness: Counter[int] = field(default_factory=Counter[int])
    discarded: Counter[str] = field(default_factory=Counter[str])
    reissued: Counter[str] = field(default_factory=Counter[str])
    hold_s: Counter[int] = field(default_factory=Counter[int])
    compute_s: Counter[int] = field(default_factory=Counter[int])
    overflows: int = 0

    def applied(self, seconds: float) -> None:
        """An update took so long."""
        self.updates += 1
        self.apply_s += seconds
        self.longest_apply_s = max(self.longest_apply_s, seconds)

    def waiting(self, messages: int) -> None:
        """So many messages were waiting."""
        self.longest_queue = max(self.longest_queue, messages)

    def accepted(self, rank: int, samples: int, staleness: int, compute_s: float) -> None:
        """A contribution went into the pool."""
        self.pushes[rank] += 1
        self.samples[rank] += samples
        self.staleness[staleness] += samples
        self.compute_s[rank] += compute_s  # type: ignore[assignment]

    def held(self, rank: int, seconds: float) -> None:
        """A claim was answered after so long."""
        self.hold_s[rank] += seconds  # type: ignore[assignment]

    def stale_fraction(self) -> float:
        """Returns the part of the accepted samples that was computed on an older version; 0 without samples."""
        total = sum(self.staleness.values())
        return 1.0 - self.staleness[0] / total if total else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON, whose keys are words; ``stale_fraction`` besides."""
        plain = {name: _plain(getattr(self, name)) for name in self.__slots__}
        return {**plain, "stale_fraction": self.stale_fraction()}

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Counts:
        """Returns the counts that `as_dict` wrote; raises KeyError if one is missing."""
        return cls(**{name: _counted(plain[name]) for name in cls.__slots__})


def _plain(value: Any) -> Any:
    if not isinstance(value, Counter):
        return value
    counted = cast("Counter[Any]", value)
    return {str(key): counted[key] for key in sorted(counted)}


def _counted(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    plain = cast("Mapping[str, Any]", value)
    return Counter({int(key) if key.isdigit() else key: number for key, number in plain.items()})


@dataclass(frozen=True, kw_only=True, slots=True)
class Measures:
    """What the server has counted so far, and what it knows of now.

    Attributes:
        counts: totals since its start.
        epoch, global_step: the present batch.
        version_gap: versions the oldest work under way is behind.
        shares: per rank, from 0 on, samples of the present batch.
        predicted_s: time for them [s]; NaN where unknown.
    """

    counts: Counts
    epoch: int
    global_step: int
    version_gap: int
    shares: tuple[int, ...]
    predicted_s: tuple[float, ...]

    @classmethod
    def take(cls, counts: Counts, coordinator: Coordinator) -> Measures:
        """Returns what is known at this moment."""
        shares, live, version = coordinator.shares(), coordinator.live, coordinator.version
        predict_s = coordinator.speeds.predict_s
        return cls(
            counts=counts, epoch=coordinator.epoch, global_step=coordinator.global_step,
            version_gap=version - min(coordinator.bases(), default=version), shares=shares,
            predicted_s=tuple(predict_s(rank, n) if rank in live else math.nan for rank, n in enumerate(shares)),
        )  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON."""
        return {**{name: getattr(self, name) for name in self.__slots__}, "counts": self.counts.as_dict()}

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Measures:
        """Returns the measures that `as_dict` wrote, also from JSON; raises KeyError if one is missing."""
        values: dict[str, Any] = {name: plain[name] for name in cls.__slots__}
        values |= {name: tuple(plain[name]) for name in ("shares", "predicted_s")}
        values["counts"] = Counts.of(plain["counts"])
        return cls(**values)


class Since:
    """Turns totals of one server into what was added since the last time."""

    def __init__(self) -> None:
        self._last = Counts()

    def report(self, measures: Measures, ranks: int) -> StepReport | None:
        """Returns means per update since the last report; None, and nothing is taken, if there was no update.

        Args:
            measures: the server's.
            ranks: how many there are; those that did nothing, or are dead, have a record of zeros.
        """
        counts, last, step = measures.counts, self._last, measures.global_step
        updates = counts.updates - last.updates
        if updates < 1:
            return None
        self._last = counts

        def mean(totals: Counter[int], before: Counter[int], rank: int) -> float:
            return float(totals[rank] - before[rank]) / updates

        records = [
            SpeedSample(
                rank=rank, step=step, samples=round(mean(counts.samples, last.samples, rank)),
                compute_s=mean(counts.compute_s, last.compute_s, rank),
                wait_s=mean(counts.hold_s, last.hold_s, rank),
            )
            for rank in range(ranks)
        ]
        predicted_s = (*measures.predicted_s, *[math.nan] * ranks)[:ranks]
        return StepReport(epoch=measures.epoch, step=step, records=tuple(records), predicted_s=predicted_s)


def engine_metrics(measures: Measures, ranks: int) -> dict[str, float]:
    """Returns numbers for a logger, over all of the training so far.

    ``staleness_mean``, ``staleness_max`` of samples [versions], ``stale_fraction`` (staleness above 0), ``version_gap``
    (of the oldest work under way now), ``discarded_samples`` (computed in vain), ``reissued_samples`` (given to
    others), ``hold_s`` (mean per update of waiting, over all ranks), ``apply_s`` (mean per update), ``queue`` (longest,
    messages), ``contribution/rank{r}`` (part of the samples).
    """
    counts = measures.counts
    staleness = {age: count for age, count in counts.staleness.items() if count}
    samples = sum(staleness.values())
    updates = max(1, counts.updates)
    return {
        "staleness_mean": sum(age * count for age, count in staleness.items()) / samples if samples else 0.0,
        "staleness_max": float(max(staleness, default=0)),
        "stale_fraction": counts.stale_fraction(),
        "version_gap": float(measures.version_gap),
        "discarded_samples": float(sum(counts.discarded.values())),
        "reissued_samples": float(sum(counts.reissued.values())),
        "hold_s": sum(counts.hold_s.values()) / updates,
        "apply_s": counts.apply_s / updates,
        "queue": float(counts.longest_queue),
        **{f"contribution/rank{r}": counts.samples[r] / samples if samples else 0.0 for r in range(ranks)},
    }


def summary(measures: Measures, ranks: int) -> str | None:
    """Returns one line on who did how much and how stale it was; None without updates."""
    if not measures.counts.updates:
        return None
    numbers = engine_metrics(measures, ranks)
    parts = "/".join(f"{100 * numbers[f'contribution/rank{r}']:.0f}" for r in range(ranks))
    few = too_few(measures.counts.updates)
    return (
        f"hetero_stale: {measures.counts.updates} updates, of whose samples the ranks computed {parts} %;"
        f" {100 * numbers['stale_fraction']:.1f} % were stale, by at most {numbers['staleness_max']:.0f} versions,"
        f" {numbers['discarded_samples']:.0f} samples were wasted{few and f'; {few}'}"
    )


def advice(counts: Counts) -> str | None:
    """Returns what to tell somebody more than a quarter of whose samples are stale; None if all is well."""
    stale = counts.stale_fraction()
    if stale <= _MOST_STALE or counts.updates < _ENOUGH:
        return None
    return (
        f"{100 * stale:.0f} % of the samples so far were computed on older parameters than those they updated. With"
        " momentum and a learning rate tuned for fresh gradients, more than 25 % can cost several times the final loss."
        " Use policy='flexible', a larger grace (e.g. grace=0.25) or a smaller bound; lower the"
        " learning rate or the momentum; or use strategy='hetero_balanced' if the ranks' speeds are steady"
    )
