"""Who is compared, on which devices, with how much training; pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec

from lightning_hetero.emulate import Scenario

WORLD = 4
PER_RANK = 16
GLOBAL_BATCH = PER_RANK * WORLD
BATCHES = 22  # global batches of an epoch
SAMPLES = GLOBAL_BATCH * BATCHES  # for training: no partial batch, no padding, so that equal numbers are equal
UPDATES = 6 * BATCHES
QUICK_UPDATES = 2 * BATCHES
SAMPLE_S = 0.0018  # a step on equal devices takes 29 ms
SPELL_STEP_S = 0.02  # spells pass with time, not with a training's steps
SYNC_EVERY = 4  # local steps between two averages: torch's and Lightning's own example
EVERY = 4  # updates between two looks at the model
DISTANCE_AFTER = 24  # updates, a multiple of it
TARGET_LOSS = 0.3  # validation; one process is there after about half of the updates, chosen before any peer was run
LIMIT_S = 120.0  # of hivemind, whose updates take as long as it takes to find a group
QUICK_LIMIT_S = 15.0


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Four emulated devices, as in `benchmarks.stale`.

    Attributes:
        name: as in the tables.
        speeds: by rank.
        spells: every rank is slow for a while, at random.
    """

    name: str
    speeds: tuple[float, ...]
    spells: bool = False

    def scenario(self, seed: int) -> Scenario:
        """Returns the emulation; of spells a step is `SPELL_STEP_S` of time."""
        spells = {"probability": 1 / 30, "factor": 6.0, "steps": 8} if self.spells else None
        return Scenario(speeds=self.speeds, sample_s=SAMPLE_S, spells=spells, seed=seed)


CLUSTERS = (
    Cluster(name="1:1:1/2:1/4", speeds=(1.0, 1.0, 0.5, 0.25)),
    Cluster(name="spells", speeds=(1.0, 1.0, 1.0, 1.0), spells=True),
)


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One contender.

    Attributes:
        name: as in the tables.
        changes: what it changes in DDP's recipe of 64 samples per update.
        needs: package that must be installed besides ours.
        lightning: trains under Lightning's Trainer; else in a loop by hand.
        ranks: processes; fewer than all where slow devices are left out.
        told_speeds: its division is made beforehand of the devices' speeds; left out where these are equal but for
            chance, since it would be stock DDP.
    """

    name: str
    changes: str
    needs: str | None = None
    lightning: bool = False
    told_speeds: bool = False
    ranks: int = WORLD

    def missing(self) -> str | None:
        """Returns why it cannot be run here, or None."""
        if self.needs is None or find_spec(self.needs) is not None:
            return None
        return f"not installed (pip install {self.needs})"


LOCAL = "ranks' weights and Adam's moments differ between averages; an average is no update of one process"
UNWEIGHTED = "a sample on a slow rank counts more: noisier gradients (the unweighted mean of unequal parts)"

PEERS = (
    Peer(name="stock DDP", changes="nothing", lightning=True),
    Peer(name="static split, unweighted", changes=UNWEIGHTED, lightning=True, told_speeds=True),
    Peer(
        name="static split, weighted",
        changes="nothing; the loss is weighted by hand in training_step",
        lightning=True,
        told_speeds=True,
    ),
    Peer(
        name="fast devices only",
        changes="nothing; stock DDP on the two fast devices, half of a global batch each",
        lightning=True,
        told_speeds=True,
        ranks=2,
    ),
    Peer(name="post-localSGD", changes=LOCAL, lightning=True),
    Peer(name="DDP, plain loop", changes="nothing; without Lightning, what the next ones are to be compared with"),
    Peer(name="Accelerate, uneven batches", changes=UNWEIGHTED, needs="accelerate", told_speeds=True),
    Peer(name="torchft DDP", changes="nothing while no rank is lost", needs="torchft"),
    Peer(name="torchft LocalSGD", changes=LOCAL, needs="torchft"),
    Peer(
        name="hivemind",
        changes="updates of at least 64 samples, more where averaging takes longer; who computes them is open",
        needs="hivemind",
    ),
    Peer(name="ours: balanced", changes="nothing", lightning=True),
    Peer(name="ours: stale", changes="gradients may be up to two versions old", lightning=True),
    Peer(name="ours: pipeline", changes="nothing", lightning=True),
)


QUICK = ("stock DDP", "fast devices only", "ours: balanced")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training."""

    peer: str
    cluster: str
    seed: int
    updates: int


def key(run: Run) -> str:
    return json.dumps(asdict(run), sort_keys=True)


def runs_of(*, quick: bool, seeds: Sequence[int]) -> Iterator[Run]:
    """Yields every training, peers interleaved seed by seed; of a quick run one cluster, one seed, short."""
    for seed in seeds[:1] if quick else seeds:
        for cluster in CLUSTERS[:1] if quick else CLUSTERS:
            for peer in PEERS:
                if quick and peer.name not in QUICK:
                    continue
                if not (peer.told_speeds and len(set(cluster.speeds)) == 1):
                    updates = QUICK_UPDATES if quick else UPDATES
                    yield Run(peer=peer.name, cluster=cluster.name, seed=seed, updates=updates)


def parts_of(order: Sequence[int], shares: Sequence[int]) -> Iterator[list[int]]:
    """Yields an epoch's global batches one after the other, each in as many parts as there are shares.

    Args:
        order: of the samples; what does not fill a global batch is left out.
        shares: samples of each rank.
    """
    total = sum(shares)
    for first in range(0, len(order) - total + 1, total):
        for share in shares:
            yield list(order[first : first + share])
            first += share


def effective_samples(shares: Sequence[int]) -> float:
    """Returns how many samples' mean gradient is as noisy as the unweighted mean of the ranks' means.

    The variance of that is (1/W^2) sum_r 1/n_r of a sample's.

    >>> effective_samples([16, 16, 16, 16])
    64.0
    """
    return len(shares) ** 2 / sum(1.0 / share for share in shares)
