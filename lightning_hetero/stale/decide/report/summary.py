"""What the server's counts say about ranks and staleness (layer P)."""

from __future__ import annotations

import math
from collections.abc import Mapping

from lightning_hetero.stale.decide.report.counts import Counts, Measures
from lightning_hetero.types import SpeedSample, StepReport

_MOST_STALE = 0.25  # of the samples; the measured price of more, with momentum, is several times the final loss
_ENOUGH = 8  # updates before that is judged


class Since:
    """Turns totals into what was added since the last time."""

    def __init__(self) -> None:
        self._updates = 0
        self._totals: dict[tuple[str, int], float] = {}

    def report(self, measures: Measures, ranks: int) -> StepReport | None:
        """Returns means per update since the last report; None, and nothing is taken, if there was no update.

        Args:
            measures: the server's.
            ranks: how many there are; those that did nothing, or are dead, have a record of zeros.
        """
        counts = measures.counts
        if counts.updates < self._updates:  # the server was started again
            self._updates, self._totals = 0, {}
        updates = counts.updates - self._updates
        if updates < 1:
            return None
        self._updates += updates
        records: list[SpeedSample] = []
        for rank in range(ranks):
            samples, compute_s, wait_s = (
                self._added(name, rank, totals) / updates
                for name, totals in (
                    ("samples", counts.samples), ("compute_s", counts.compute_s), ("hold_s", counts.hold_s),
                )
            )  # fmt: skip
            records.append(
                SpeedSample(
                    rank=rank, step=measures.tick, samples=round(samples), compute_s=compute_s, wait_s=wait_s
                )
            )
        predicted_s = (*measures.predicted_s, *[math.nan] * ranks)[:ranks]
        return StepReport(
            epoch=measures.epoch, step=measures.tick, records=tuple(records), predicted_s=predicted_s
        )

    def _added(self, name: str, rank: int, totals: Mapping[int, float]) -> float:
        total = float(totals.get(rank, 0.0))
        before = self._totals.get((name, rank), 0.0)
        self._totals[name, rank] = total
        return total - before if total >= before else total


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
    """Returns one line on who did how much, how stale it was, and what equal parts would cost; None without updates."""
    if not measures.counts.updates:
        return None
    numbers = engine_metrics(measures, ranks)
    parts = "/".join(f"{100 * numbers[f'contribution/rank{r}']:.0f}" for r in range(ranks))
    line = (
        f"hetero_stale: {measures.counts.updates} updates, of whose samples the ranks computed {parts} %;"
        f" {100 * numbers['stale_fraction']:.1f} % were stale, by at most {numbers['staleness_max']:.0f} versions,"
        f" {numbers['discarded_samples']:.0f} samples were wasted"
    )
    times = [t for t, n in zip(measures.predicted_s, measures.shares, strict=True) if n and not math.isnan(t)]
    equal = [t for t in measures.equal_s if not math.isnan(t)]
    if times and equal and max(times) > 0:
        line += f"; equal shares with a barrier would take {max(equal) / max(times):.2f} times as long per batch"
    return line


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
