"""What a step costs each rank, as recorded: the one fit of which every "would take" is made (layer P).

Costs are of the full batches of a run without its start, a line through a rank's times where it had shares of several
sizes and the line's fixed part is beyond its noise, else in proportion to samples. How far each step was from that, and
what it took beyond the slowest rank's work, is of the steady state, see `record.ledger`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, linear_regression, median, pvariance

from lightning_hetero.record.ledger import RunLedger
from lightning_hetero.record.run import RunStep
from lightning_hetero.types import AffineCost, SpeedSample

_APART = 1.2  # largest over smallest share, from which on a line says more than a proportion
_SURE = 4.0  # times its standard error, from which on a fixed part is believed
_MOST_TIMES = 4000  # of all ranks: the balanced policy is asked step by step
_LEAST_STEPS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedCosts:
    """Costs of a recorded run.

    Attributes:
        lines: by rank, a step's own work.
        slowness: by rank, times of successive steps over what their lines say.
        rest_s: what a step takes beyond the slowest rank's work, mostly the exchange [s].
    """

    lines: tuple[AffineCost, ...]
    slowness: tuple[tuple[float, ...], ...]
    rest_s: float


def costs_of(ledger: RunLedger) -> RecordedCosts:
    """Returns what steps of a run cost.

    Raises:
        ValueError: nothing was recorded that tells it, or a rank has never worked; in words.
    """
    if ledger.problem or not ledger.steady:
        raise ValueError(
            f"{ledger.problem or 'no step was measured'}: the trace must hold steps whose own work all ranks have"
            " measured: record it with an engine of this package, or under stock DDP with StragglerMonitor() and"
            " HeteroTrace() among the callbacks"
        )
    ranks = range(len(ledger.ranks))
    lines = tuple(_line(rank, ledger.recent) for rank in ranks)
    steps = ledger.steady[-max(_LEAST_STEPS, _MOST_TIMES // len(ranks)) :]
    if ledger.meets:
        rest_s = fmean(step.step_s - max(turn.compute_s for turn in step.turns.values()) for step in ledger.steady)
    else:
        rest_s = fmean(own.exchange_s for spent in ledger.spent for own in spent.values())
    return RecordedCosts(
        lines=lines, slowness=tuple(_slowness(rank, steps, lines[rank]) for rank in ranks), rest_s=max(0.0, rest_s)
    )


def _worked(rank: int, steps: Sequence[RunStep]) -> list[SpeedSample]:
    turns = [step.turns[rank] for step in steps if rank in step.turns]
    return [turn for turn in turns if turn.samples > 0 and turn.compute_s > 0.0]


def _line(rank: int, steps: Sequence[RunStep]) -> AffineCost:
    """Returns what a rank's step costs; medians by size, so that a hiccup of the machine is no cost."""
    times = [(float(turn.samples), turn.compute_s) for turn in _worked(rank, steps)]
    if not times:
        raise ValueError(f"rank {rank} has recorded no work: it cannot be planned with")
    sizes = {n for n, _ in times}
    if max(sizes) >= _APART * min(sizes):
        usual = {size: median(s for n, s in times if n == size) for size in sizes}
        amounts, usual_s = [n for n, _ in times], [usual[n] for n, _ in times]
        slope, n_mean = max(0.0, linear_regression(amounts, usual_s).slope), fmean(amounts)
        fixed_s = fmean(usual_s) - slope * n_mean
        noise_s = math.sqrt(fmean((s - fixed_s - slope * n) ** 2 for n, s in times))
        if fixed_s > _SURE * noise_s * math.sqrt((1.0 + n_mean**2 / pvariance(amounts)) / len(times)):
            return AffineCost(fixed_s=fixed_s, per_sample_s=slope)
    return AffineCost(fixed_s=0.0, per_sample_s=median(s / n for n, s in times))


def _slowness(rank: int, steps: Sequence[RunStep], line: AffineCost) -> tuple[float, ...]:
    """Returns a rank's times over what its line says; in a step without work those of the step before."""
    found, last = list[float](), 1.0
    for step in steps:
        for turn in _worked(rank, [step]):
            last = turn.compute_s / line.seconds(turn.samples)
        found.append(last)
    return tuple(found)
