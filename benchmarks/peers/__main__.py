"""``python -m benchmarks.peers [--quick] [--repeats SEEDS]``: what a user would pick instead, on the same devices.

Four processes train the same small CNN on the same digits, in the same order where the peer lets one choose it. Peers
are interleaved seed by seed; those under Lightning train in the same four processes one after the other, and every
other one in fresh processes. Peers that are optional packages are left out, with the reason, where they are not
installed::

    pip install -c constraints.txt accelerate
    pip install -c constraints.txt torchft hivemind
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from importlib import metadata
from typing import Any

from benchmarks.kit.figures import Figure
from benchmarks.kit.runner import Benchmark, Cases, Raw
from benchmarks.peers.cases import (
    BATCHES,
    CLUSTERS,
    DISTANCE_AFTER,
    EVERY,
    GLOBAL_BATCH,
    LIMIT_S,
    PEERS,
    SAMPLES,
    SYNC_EVERY,
    TARGET_LOSS,
    Run,
    effective_samples,
    key,
)
from benchmarks.peers.figures import failures, figures_of, rows_of, table
from benchmarks.peers.groups import groups_of
from benchmarks.ranks import apart
from lightning_hetero.solvers import apportion

START_S = 120.0  # imports, set-up and the judgement at the end, at most


def notes(versions: str) -> str:
    """Returns what a reader must know to judge the table."""
    shares = apportion(CLUSTERS[0].speeds, GLOBAL_BATCH, lower=1)
    noise, told = effective_samples(shares), ", ".join(map(str, shares))
    first = (
        f"Seconds until a validation loss of {TARGET_LOSS:g}, with DDP's recipe ({GLOBAL_BATCH} samples per update,"
        f" Adam, a learning rate that falls to 0 over the whole run) and equal numbers of samples: {SAMPLES} are"
        f" {BATCHES} whole global batches, so nobody pads. Medians over seeds; ratios are of the same seed. Times are"
        f" rank 0's, from the first batch on, without set-up; its copy of the model is kept every {EVERY} updates and"
        " judged when the clock has stopped, so times are that coarse. Devices are emulated as everywhere in this"
        " project: forward and backward take the scenario's time, real work included, by one `Throttle` at the same"
        " places for all (*taken / asked*). Everything else is real: four processes on this machine's cores."
    )
    items = (
        "**Under Lightning or not.** `DDP, plain loop`, Accelerate, torchft and hivemind have no Trainer around them:"
        " compare them with the plain loop, whose own ratio to stock DDP is what Lightning costs here.",
        f"**Static splits**, Accelerate's too, are told the true speeds beforehand (shares {told}), which"
        " nobody knows of real devices. They have no answer to spells: on devices that are equal but"
        " for chance they would be stock DDP, and are left out. Samples are shuffled, so the unweighted mean of unequal"
        f" parts is noisier, not biased: as noisy as the mean of {noise:.0f} samples instead of {GLOBAL_BATCH}. Where"
        " the parts are not alike (sorted, sharded or filtered data) it is biased.",
        "**Accelerate** deals whole batches to processes in turn. So unequal parts are a batch sampler with unequal"
        " batches and `even_batches=False`; it does not weight them. `join_uneven_inputs` is about unequal *numbers* of"
        " batches and does nothing on CPUs.",
        f"**post-localSGD** and **torchft LocalSGD** average weights every {SYNC_EVERY} updates. Ranks train equally"
        " many samples, so a device that is always slow is waited for all the same; only chance is evened out."
        " Lightning's `DDPStrategy` registers no communication hook on CPUs: a callback does it here.",
        "**torchft** is made to survive lost replicas, which is not asked of anybody here.",
        "**hivemind** is made for updates of many seconds over the internet; finding a group for an update takes longer"
        " than an update of this task, so this is no judgement of what it is made for; meanwhile devices add more"
        " samples than asked for. Peers draw their own samples."
        f" It is stopped after {LIMIT_S:.0f} s, and trained with one seed only.",
        "**ours: stale**: rank 0's copy of the model may be older than the server's, in the curve and in the distance.",
        f"**off one process**: how far rank 0's weights are from those of one process after {DISTANCE_AFTER} updates,"
        " as part of the way that one has gone. Equal mathematics leave float32 rounding, which grows from update to"
        " update.",
    )
    return "\n".join([first, "", *(f"- {item}" for item in items), "", f"Optional packages: {versions}."])


def measure(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Trains one after the other in the same processes.

    Returns:
        Of each training ``ranks`` (what each rank saw), or ``failed``: why there is nothing.
    """
    peer = next(peer for peer in PEERS if peer.name == runs[0].peer)
    if (missing := peer.missing()) is not None:
        return [{"failed": missing}]
    setting, limit_s = json.dumps([asdict(run) for run in runs]), START_S + LIMIT_S * len(runs)
    try:
        ranks = apart("benchmarks.peers.worker", peer.ranks, setting, limit_s=limit_s)
    except RuntimeError as error:
        return [{"failed": str(error)} for _ in runs]
    return [{"ranks": list(one)} for one in zip(*ranks, strict=True)]


def cases(quick: bool, repeats: int) -> Cases:
    """Returns what measures each group of trainings, seed by seed."""
    groups = groups_of(quick=quick, seeds=range(repeats))
    return {name: partial(measure, runs) for name, runs in groups.items()}


def report(found: Raw, quick: bool) -> tuple[list[Figure], Raw, str]:
    """Returns figures, raw values and notes."""
    groups = groups_of(quick=quick, seeds=range(len(found)))
    measured = [pair for name, ones in found.items() for pair in zip(groups[name], ones, strict=True)]
    runs, results = [run for run, _ in measured], {key(run): one for run, one in measured}
    rows, why = rows_of(results, runs), failures(results, runs)
    installed = [peer.needs for peer in PEERS if peer.needs and peer.missing() is None]
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in dict.fromkeys(installed)) or "none besides ours"
    left_out = "".join(f"\n- **{peer}** has no result: {reason}." for peer, reason in why.items())
    text = f"{table(rows)}\n\n{notes(versions)}" + (f"\n{left_out}" if left_out else "")
    return figures_of(rows), {"rows": rows, "runs": results, "failed": why}, text


BENCHMARK = Benchmark(name="peers", title="What one would pick instead", repeats=2, cases=cases, report=report)

if __name__ == "__main__":
    BENCHMARK.main()
