"""Set-ups that others have published, to be planned and to be run by emulation; no torch.

The inputs are theirs: speeds, or times by batch size, or how often a cluster changes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lightning_hetero.cluster.spec import cluster_from_plain, equal_cluster
from lightning_hetero.emulate import Scenario, SpeedChange
from lightning_hetero.plan.planner import Plan, plan
from lightning_hetero.plan.setup import Setup
from lightning_hetero.types import AffineCost

WARM_UP = 10  # steps until shares have settled; a series of slowness begins behind them
ENGINES = ("ddp", "balanced")


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """A published set-up.

    Attributes:
        name, source: for people.
        theirs: what they have published, in words.
        make: the set-up.
        gain: published time of equal parts over that of balanced ones; None: there is no number to compare with.
        scale: of all times in the emulation, so that a run is short.
        steps: measured, where no series says how many.
    """

    name: str
    source: str
    theirs: str
    make: Callable[[], Setup]
    gain: float | None = None
    scale: float = 1.0
    steps: int = 20

    def planned_s(self) -> dict[str, float]:
        """Returns what the planner says of a step, by engine, in emulated time [s]."""
        return {name: self.scale * step_s for name, step_s in steps_s(self.make()).items()}

    def scenario(self, rank: int) -> Scenario:
        """Returns the emulation of one rank, whose costs need not be in proportion to another's."""
        setup = self.make()
        cost = setup.step_costs()[rank]
        series: Sequence[float] = setup.slowness[rank] if setup.slowness else ()
        changes = [SpeedChange(step=WARM_UP + i, speeds=[1.0 / slow]) for i, slow in enumerate(series)]
        first = 1.0 / series[0] if series else 1.0
        return Scenario(
            speeds=[first], sample_s=self.scale * cost.per_sample_s, step_s=self.scale * cost.fixed_s, changes=changes
        )

    def length(self, quick: bool) -> int:
        """Returns the steps of a run, warm-up included."""
        setup = self.make()
        measured = setup.series if setup.slowness else self.steps
        return WARM_UP + (min(measured, 6) if quick else measured)


def steps_s(setup: Setup) -> dict[str, float]:
    """Returns what the planner says of a step, by engine [s]."""
    answer: Plan = plan(setup, ENGINES)
    return {estimate.engine: estimate.step_s for estimate in answer.estimates}


# ---- R2SP (Chen et al., INFOCOM 2019): 2 g2.2xlarge, 2 p2.xlarge, 4 g3.4xlarge, measured in samples/s ----------------


def _r2sp() -> Setup:
    speeds = (429.0,) * 2 + (628.0,) * 2 + (917.0,) * 4
    names = ("g2.2xlarge",) * 2 + ("p2.xlarge",) * 2 + ("g3.4xlarge",) * 4
    cluster = cluster_from_plain(
        {"devices": [{"name": n, "count": 1, "speed": v / speeds[0]} for n, v in zip(names, speeds, strict=True)]}
    )
    costs = tuple(AffineCost(fixed_s=0.0, per_sample_s=1.0 / v) for v in speeds)
    return Setup(cluster=cluster, costs=costs, exchange_s=0.0, global_batch=8 * 512)


# ---- LBB ("Load Balanced Batching", repository FLYING37520/LBB): ResNet-18 on CIFAR-10, batch 512, four cards --------

# warmupRecord/batchVStime750flip.csv: milliseconds of forward and backward by batch size
_LBB_SIZES = (2, 4, 8, 16, 20, 24, 32, 48, 64, 96, 128, 160, 192, 224)
_LBB_MS = (
    (8.6, 11.2, 15.5, 18.9, 23.1, 26.0, 30.4, 40.6, 58.5, 76.9, 99.3, 122.6, 143.9, 177.4),
    (8.1, 10.0, 15.4, 18.9, 23.1, 25.9, 30.4, 40.5, 58.8, 76.9, 99.4, 122.4, 143.5, 177.6),
    (9.5, 11.4, 16.9, 20.1, 24.2, 27.2, 31.7, 42.4, 59.2, 78.5, 101.2, 124.5, 149.0, 181.4),
    (30.8, 46.9, 77.0, 116.5, 144.7, 150.9, 174.9, 238.4, 325.1, 436.6, 552.1, 552.3, 644.2, 759.7),
)
# Communication of the rank that waits for nobody, in the record of equal batches of 2022-12-14; median.
_LBB_EXCHANGE_S = 0.094
LBB_STEPS = 98  # of an epoch: 50,000 images by 512


def _lbb() -> Setup:
    def line(card: tuple[float, ...]) -> AffineCost:  # of the least relative errors
        seconds = np.array(card) / 1e3
        per_sample_s, fixed_s = np.polyfit(_LBB_SIZES, seconds, 1, w=1.0 / seconds)
        return AffineCost(fixed_s=float(fixed_s), per_sample_s=float(per_sample_s))

    costs = tuple(map(line, _LBB_MS))
    return Setup(cluster=equal_cluster(4), costs=costs, exchange_s=_LBB_EXCHANGE_S, global_batch=512, min_samples=2)


# ---- OmniLearn (TPDS 2025): one machine of 48 cores, divided among four workers --------------------------------------

LEVELS = {"HL1": (12, 12, 12, 12), "HL2": (12, 12, 8, 16), "HL4": (9, 9, 6, 24), "HL8": (6, 6, 4, 32)}


def levels(name: str) -> Setup:
    """Returns OmniLearn's set-up of a level of heterogeneity, its work divided by cores.

    Args:
        name: ``HL1``, ``HL2``, ``HL4`` or ``HL8``.
    """
    cores = LEVELS[name]
    cluster = cluster_from_plain({"devices": [{"name": f"{n}cores", "speed": n / 12, "count": 1} for n in cores]})
    costs = tuple(AffineCost(fixed_s=0.0, per_sample_s=0.12 / n) for n in cores)
    return Setup(cluster=cluster, costs=costs, exchange_s=0.0, global_batch=4 * 128)


SCHEDULE = ("HL1", "HL2", "HL4", "HL8", "HL8", "HL4", "HL2", "HL1")
PHASE = 12  # steps of a level; theirs are epochs


def _schedule() -> Setup:
    cores = [LEVELS[name] for name in SCHEDULE for _ in range(PHASE)]
    slowness = tuple(tuple(12 / step[rank] for step in cores) for rank in range(4))
    costs = (AffineCost(fixed_s=0.0, per_sample_s=0.01),) * 4
    return Setup(cluster=equal_cluster(4), costs=costs, exchange_s=0.0, global_batch=4 * 128, slowness=slowness)


# ---- a recorded trace: four ranks on all cores of a machine beside programs of others that come and go --------------

_TRACE, _TRACED = Path(__file__).parent / "crowded.json", 100  # steps


def _trace() -> Setup:
    recorded: dict[str, Any] = json.loads(_TRACE.read_text(encoding="utf-8"))
    times, samples = recorded["compute_s"][:_TRACED], recorded["samples"]
    usual_s = float(np.median(times))
    slowness = tuple(tuple(step[rank] / usual_s for step in times) for rank in range(recorded["ranks"]))
    costs = (AffineCost(fixed_s=0.2 * usual_s, per_sample_s=0.8 * usual_s / samples),) * recorded["ranks"]
    return Setup(cluster=equal_cluster(4), costs=costs, exchange_s=0.0, global_batch=4 * samples, slowness=slowness)


# ---- DBS (repository Soptq/DBS): three workers on one device, one alone; real contention, nothing emulated -----------

BOOKKEEPING = "bookkeeping"  # what engines take besides work
CONTENDED = "DBS: three workers on one device, one alone, real"
SHARED = 3  # ranks 0 to 2
CONTENDED_SOURCE = "repository Soptq/DBS: DenseNet-121, batch 512; here products of matrices on two cores"


def contended(fixed_s: float, per_sample_s: float, global_batch: int) -> Setup:
    """Returns the set-up, of what a sample takes on a device that a worker has alone."""
    alone = AffineCost(fixed_s=fixed_s, per_sample_s=per_sample_s)
    costs = (alone.times(SHARED),) * SHARED + (alone,)
    return Setup(cluster=equal_cluster(SHARED + 1), costs=costs, exchange_s=0.0, global_batch=global_batch)


SETUPS: tuple[Published, ...] = (
    Published(
        name="R2SP: 2 g2.2xlarge + 2 p2.xlarge + 4 g3.4xlarge",
        source="Chen et al., INFOCOM 2019: 429, 628 and 917 samples/s, 512 samples each",
        theirs="1.68 times as fast, the ideal of their speeds; measured around 40 % less time",
        make=_r2sp,
        gain=5782 / 3432,
    ),
    Published(
        name="LBB: M40, 2 GTX 1070, GTX 750",
        source="repository FLYING37520/LBB: ResNet-18 on CIFAR-10, batch 512, batchVStime750flip.csv",
        theirs="62.44 -> 22.12 s an epoch: 2.82 times as fast", make=_lbb, gain=62.44 / 22.12,
    ),
    Published(
        name="OmniLearn: HL1-2-4-8-8-4-2-1 of 48 cores",
        source="TPDS 2025 and its code: one machine of 48 cores, divided anew; work alone",
        theirs="14 to 85 % less time, over models and levels", make=_schedule, scale=0.25,
    ),
    Published(
        name="recorded trace of a shared machine",
        source="our own: four ranks on two cores beside busy loops that come and go, step by step", theirs="–",
        make=_trace, scale=4.0,
    ),
)
