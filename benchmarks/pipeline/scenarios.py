"""The scenarios as fixed in ``clusters/*.yaml``: devices, links, memory, a sample's time, and what is expected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from lightning_hetero.cluster.spec import cluster_from_plain
from lightning_hetero.solvers.chain.chain import DepthRule
from lightning_hetero.types import Cluster

FOLDER = Path(__file__).parent / "clusters"
_KEYS = ("name", "models", "global_batch", "sample_s", "fixed_s", "cluster")
_OPTIONS = ("depth", "trained", "stock_pipeline", "less_than_even", "less_than_chain")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model on one emulated cluster.

    Attributes:
        name: of the scenario.
        model: name in `models.MODELS`.
        global_batch: samples per step, of all devices.
        sample_s: forward and backward of the whole model for one sample, on a device of speed 1 [s].
        fixed_s: of a micro-batch besides, whatever its size, likewise [s].
        cluster: devices and links.
        depth: how our plans keep micro-batches in flight, see `lightning_hetero.solvers.placement.place.place`.
        trained: whether it is also trained under Lightning, by stock DDP and the balanced engine where it fits.
        stock_pipeline: whether an even chain is also run by `torch.distributed.pipelining`, which knows no links.
        less_than_even: goal: so much less time than the best even pipeline [%]; None: no goal.
        less_than_chain: goal: so much less time than the even chain over all devices [%]; None: no goal.
    """

    name: str
    model: str
    global_batch: int
    sample_s: float
    fixed_s: float
    cluster: Cluster
    depth: DepthRule = "per_link"
    trained: bool = False
    stock_pipeline: bool = False
    less_than_even: float | None = None
    less_than_chain: float | None = None

    @property
    def title(self) -> str:
        return f"{self.name}, {self.model}"

    @property
    def world_size(self) -> int:
        return len(self.cluster.devices)

    def quick(self) -> Case:
        """The same with half the samples."""
        return replace(self, global_batch=self.global_batch // 2)


def read(plain: Mapping[str, Any]) -> list[Case]:
    """Returns the cases of one file, one per model; ``trained`` lists models.

    Raises:
        ValueError: a key is missing or unknown, or a number out of its range.
    """
    missing, unknown = set(_KEYS) - set(plain), set(plain) - {*_KEYS, *_OPTIONS}
    if missing or unknown:
        raise ValueError(f"a scenario lacks {sorted(missing)} and has the unknown keys {sorted(unknown)}")
    for name in ("global_batch", "sample_s", "fixed_s"):
        if not plain[name] >= 0 or (name == "global_batch" and plain[name] < 1):
            raise ValueError(f"{name}={plain[name]!r} must be >= {int(name == 'global_batch')}")
    options = {name: plain[name] for name in _OPTIONS if name in plain and name != "trained"}
    trained = plain.get("trained", ())
    if unknown := set(trained) - set(plain["models"]):
        raise ValueError(f"trained={list(trained)} names {sorted(unknown)}, not among models={plain['models']}")
    cluster = cluster_from_plain(plain["cluster"])
    return [
        Case(
            name=plain["name"],
            model=model,
            global_batch=int(plain["global_batch"]),
            sample_s=float(plain["sample_s"]),
            fixed_s=float(plain["fixed_s"]),
            cluster=cluster,
            trained=model in trained,
            **options,
        )
        for model in plain["models"]
    ]


ORDER = ("equal4", "two_fast_two_slow", "islands", "memory_mlp", "memory_gpt", "two_by_two", "two_by_four")
QUICK = ("1:1:1/2:1/4, gpt", "memory-capped, mlp")


def cases(quick: bool = False) -> list[Case]:
    """Returns all cases, in the order of the table; ``quick``: two of them, shortened."""
    files = {path.stem: path for path in FOLDER.glob("*.yaml")}
    if set(files) != set(ORDER):
        raise ValueError(f"clusters/ holds {sorted(files)}, but ORDER names {sorted(ORDER)}")
    every = [case for stem in ORDER for case in read(yaml.safe_load(files[stem].read_text(encoding="utf-8")))]
    return [case.quick() for case in every if case.title in QUICK] if quick else every
