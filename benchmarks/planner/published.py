"""``python -m benchmarks.planner.published``: set-ups that others have published, and what the planner says of them.

The inputs are theirs: speeds, or times by batch size. What is compared is what follows from them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from lightning_hetero.cluster.spec import cluster_from_plain, equal_cluster
from lightning_hetero.plan.estimate import EngineName
from lightning_hetero.plan.formula import model_from_formula
from lightning_hetero.plan.planner import Plan, plan
from lightning_hetero.plan.setup import Setup
from lightning_hetero.types import AffineCost


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """Something that was published, and the same of the planner.

    Attributes:
        what: in words.
        published: as published, in words.
        value: published; None: there is no number to compare with.
        planned: the planner's.
        form: of numbers, e.g. ``"{:.2f} s"``.
    """

    what: str
    published: str
    value: float | None
    planned: Callable[[Plan], float]
    form: str = "{:.2f}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A published set-up.

    Attributes:
        name, source: for people.
        make: the set-up.
        figures: to compare.
    """

    name: str
    source: str
    make: Callable[[], Setup]
    figures: tuple[Figure, ...]


def _step(engine: str) -> Callable[[Plan], float]:
    return lambda answer: next(e.step_s for e in answer.estimates if e.engine == engine)


def _gain(answer: Plan) -> float:
    return _step("ddp")(answer) / _step("balanced")(answer)


def _saved(answer: Plan) -> float:
    return 100.0 * (1.0 - 1.0 / _gain(answer))


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
_LBB_STEPS = 98  # of an epoch: 50,000 images by 512


def _lbb() -> Setup:
    def line(card: tuple[float, ...]) -> AffineCost:  # of the least relative errors
        seconds = np.array(card) / 1e3
        per_sample_s, fixed_s = np.polyfit(_LBB_SIZES, seconds, 1, w=1.0 / seconds)
        return AffineCost(fixed_s=float(fixed_s), per_sample_s=float(per_sample_s))

    costs = tuple(map(line, _LBB_MS))
    return Setup(cluster=equal_cluster(4), costs=costs, exchange_s=_LBB_EXCHANGE_S, global_batch=512, min_samples=2)


def _epoch(engine: str) -> Callable[[Plan], float]:
    return lambda answer: _LBB_STEPS * _step(engine)(answer)


def _card_4(answer: Plan) -> float:
    return next(e.shares[3] for e in answer.estimates if e.engine == "balanced")


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


# ---- a box of a 4090, a 3080 and a 2080 (asked for in NVIDIA/Megatron-LM issue 1757) --------------------------------

# Dense FP16 tensor TFLOPS with FP32 accumulation and memory, by NVIDIA's architecture papers (Ada, GA102, Turing).
_BOX = (("4090", 165.2, 24.0), ("3080", 59.5, 10.0), ("2080", 40.3, 8.0))
BOX_ENGINES: tuple[EngineName, ...] = ("ddp", "balanced", "pipeline", "stale")
_REACHED = 0.4  # of the peak, assumed for all three


def box(layers: int, width: int, *, global_batch: int = 12) -> Setup:
    """Returns a GPT of this size in mixed precision on a box of three generations of cards.

    Args:
        layers, width: of the GPT; windows of 1024 tokens, 50257 words.
        global_batch: windows per update.
    """
    peak = _BOX[0][1]
    devices = [{"name": name, "speed": tflops / peak, "mem": f"{gb} GB"} for name, tflops, gb in _BOX]
    model = model_from_formula(
        {
            "kind": "transformer",
            "layers": layers,
            "width": width,
            "window": 1024,
            "vocabulary": 50257,
            "flops_per_s": _REACHED * peak * 1e12,
        }
    )
    link = {"bandwidth": "12 GB/s", "latency": "20 us"}
    return Setup(
        cluster=cluster_from_plain({"devices": devices, "link": link}), model=model, global_batch=global_batch
    )


def _level_case(name: str) -> Case:
    return Case(
        name=f"OmniLearn, {name}: {'/'.join(map(str, LEVELS[name]))} cores",
        source="TPDS 2025 and its code: one machine of 48 cores, divided",
        make=lambda: levels(name),
        figures=(
            Figure(
                what="time saved, work alone [%]",
                published="14 to 85, over models and levels",
                value=None,
                planned=_saved,
                form="{:.0f}",
            ),
        ),
    )


CASES: tuple[Case, ...] = (
    Case(
        name="R2SP: 2 g2.2xlarge + 2 p2.xlarge + 4 g3.4xlarge",
        source="Chen et al., INFOCOM 2019: 429, 628 and 917 samples/s, 512 samples each",
        make=_r2sp,
        figures=(
            Figure(
                what="DDP / balanced", published="1.68, the ideal of their speeds", value=5782 / 3432, planned=_gain
            ),
            Figure(what="time saved [%]", published="around 40", value=40.0, planned=_saved, form="{:.1f}"),
        ),
    ),
    Case(
        name="LBB: M40, 2 GTX 1070, GTX 750, ResNet-18 on CIFAR-10, batch 512",
        source="repository FLYING37520/LBB: batchVStime750flip.csv, communication of the slowest rank 94 ms",
        make=_lbb,
        figures=(
            Figure(what="epoch, equal shares [s]", published="62.44", value=62.44, planned=_epoch("ddp")),
            Figure(what="epoch, balanced [s]", published="22.12", value=22.12, planned=_epoch("balanced")),
            Figure(
                what="samples of the slowest card of 512",
                published="20; 168, 168, 160 and 16 in another record",
                value=None,
                planned=_card_4,
                form="{:.0f}",
            ),
        ),
    ),
    *(_level_case(name) for name in LEVELS),
)


def markdown_table() -> str:
    """Returns all cases and figures as a table in Markdown: what was published, and what the planner says."""
    head = ("set-up", "source of the inputs", "figure", "published", "planner")
    lines = ["| " + " | ".join(head) + " |", "|---|---|---|---|---|"]
    for case in CASES:
        answer = plan(case.make(), ("ddp", "balanced"))
        for i, figure in enumerate(case.figures):
            name, source = (case.name, case.source) if i == 0 else ("", "")
            said = figure.form.format(figure.planned(answer))
            lines.append(f"| {name} | {source} | {figure.what} | {figure.published} | {said} |")
    return "\n".join(lines)


def box_table() -> str:
    """Returns who takes what on the box of three generations, by size of the model, as a table in Markdown."""
    head = ("GPT", "engine", "ms per update", "4090", "3080", "2080")
    lines = ["| " + " | ".join(head) + " |", "|---|---|---|---|---|---|"]
    for name, layers, width in (("124M (12 layers)", 12, 768), ("354M (24 layers)", 24, 1024)):
        answer = plan(box(layers, width), BOX_ENGINES)
        for i, estimate in enumerate(answer.estimates):
            cells = [f"{share:.3g} samples" for share in estimate.shares] or ["does not fit"] * 3
            if estimate.plan is not None:
                for group in estimate.plan.groups:
                    for rank, (a, b) in zip(group.ranks, pairwise(group.cuts), strict=True):
                        cells[rank] = f"{b - a} layers, {group.samples} samples"
            step = f"{estimate.step_s * 1e3:.0f}" if estimate.ok else "–"
            lines.append(f"| {name if i == 0 else ''} | {estimate.engine} | {step} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(f"{markdown_table()}\n\n{box_table()}")
