"""What the planner is asked about, as one value, also from what a run has recorded (layer P).

A pipeline's trace holds its cluster and what its layers cost. Of any other run each rank's own work per step is known,
see `lightning_hetero.record.costs`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_hetero.checked import real, whole
from lightning_hetero.cluster.engine_times import LOOPS
from lightning_hetero.cluster.spec import cluster_from_plain
from lightning_hetero.cluster.units import bytes_text
from lightning_hetero.pipeline.decide.costs import model_from_plain
from lightning_hetero.record.costs import costs_of
from lightning_hetero.record.ledger import RunLedger, ledger_of
from lightning_hetero.record.run import RecordedRun
from lightning_hetero.solvers.placement.pipes import Pipe, Problem
from lightning_hetero.solvers.placement.sync import sync_s
from lightning_hetero.solvers.tied_layers import Span
from lightning_hetero.types import AffineCost, Cluster, Device, Link, ModelCost

_SNAP = 1.0 - 1e-12  # what fits but for rounding fits


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """Devices, what a step costs on them, and how large its batch is.

    Args:
        cluster: devices and links, by rank.
        global_batch: samples of one update, of all devices together.
        model: costs by layer on a device of speed 1; None: only ``costs`` are known, and a pipeline cannot be planned.
        costs: of a whole step, by rank, instead of those that ``model`` and the devices' speeds give.
        exchange_s: of the gradients, when nobody comes late [s]; None: by ``model`` and the links.
        own_s: of an update on each rank, besides work and exchange: reading a batch, the optimizer's step [s].
        loop_s: what Lightning's loop takes around a step on one device; each engine takes its own multiple of it [s].
        slowness: by rank, times of successive steps over what their costs say; empty: always as these say.
        spans: layers that must stay on one device, see `lightning_hetero.pipeline.decide.plans.best_plan`.
        min_samples: least samples per rank under the balanced engine, its argument of this name; None: its default.

    Raises:
        TypeError: a cost is no line.
        ValueError: a value out of its range, or lists that are not one entry per device.
    """

    cluster: Cluster
    global_batch: int
    model: ModelCost | None = None
    costs: tuple[AffineCost, ...] = ()
    exchange_s: float | None = None
    own_s: float = 0.0
    loop_s: float = 0.0
    slowness: tuple[tuple[float, ...], ...] = ()
    spans: tuple[Span, ...] = ()
    min_samples: int | None = None

    def __post_init__(self) -> None:
        whole("global_batch", self.global_batch, least=1)
        if self.model is None and not self.costs:
            raise ValueError("neither model nor costs are given: profile a module, give a size formula, or read a run")
        if any(type(cost) is not AffineCost for cost in self.costs):
            raise TypeError(f"costs={self.costs!r} must be lines: AffineCost")
        if len(self.costs) not in (0, self.ranks):
            raise ValueError(f"costs has {len(self.costs)} entries; give one per device: there are {self.ranks}")
        real("own_s", self.own_s)
        real("loop_s", self.loop_s)
        if self.exchange_s is not None:
            real("exchange_s", self.exchange_s)
        if self.slowness:
            if len(self.slowness) != self.ranks or len(set(map(len, self.slowness))) != 1 or not all(self.slowness):
                raise ValueError("slowness must have a series for every device, all of the same length")
            if not all(0.0 < value < math.inf for series in self.slowness for value in series):
                raise ValueError("slowness must be finite numbers > 0")

    @property
    def series(self) -> int:
        """Number of steps after which slowness repeats itself."""
        return len(self.slowness[0]) if self.slowness else 1

    @property
    def ranks(self) -> int:
        """Number of devices."""
        return len(self.cluster.devices)

    def name(self, rank: int) -> str:
        """Returns how a rank is called in a sentence."""
        return f"rank {rank} ({self.cluster.devices[rank].name})"

    def step_costs(self) -> tuple[AffineCost, ...]:
        """Returns what a whole step costs, by rank."""
        if self.costs:
            return self.costs
        assert self.model is not None
        step = whole_step(self.model)
        return tuple(step.times(1.0 / device.speed) for device in self.cluster.devices)

    def exchange(self) -> float:
        """Returns the time of the gradients' exchange where every rank has a whole replica [s].

        By links it is counted in full, as a ring by rank: what a real one hides behind the backward pass is a reserve.
        """
        if self.ranks < 2:
            return 0.0
        return self._by_links() if self.exchange_s is None else self.exchange_s

    def besides(self, engine: str) -> float:
        """Returns what an update takes on each rank under an engine, besides work and exchange [s]."""
        return self.own_s + LOOPS[engine] * self.loop_s

    def _by_links(self) -> float:
        if self.model is None:
            return 0.0
        problem = Problem(self.model, self.cluster, self.global_batch, (self.global_batch,))
        layers = len(self.model.layers)
        return sync_s(problem, [Pipe((rank,), (0, layers)) for rank in range(self.ranks)])

    def param_bytes(self) -> float:
        """Returns the size of all trained parameters; 0 where the model is not known [bytes]."""
        return 0.0 if self.model is None else math.fsum(cost.param_bytes for cost in self.model.parts)

    def memory_bytes(self, samples: float, *, sharded: bool = False) -> float:
        """Returns what a whole replica, or a shard and the layers gathered at a time, takes with so many samples in
        flight; 0 where it is not known [bytes]."""
        state, activations = self._bytes(sharded)
        return state + activations * samples

    def most_samples(self, *, sharded: bool = False) -> tuple[int, ...]:
        """Returns how many samples of a batch each rank's memory holds besides what `memory_bytes` says of none."""
        state, activations = self._bytes(sharded)

        def held(left_bytes: float) -> int:
            if left_bytes < 0.0:
                return 0
            fit = left_bytes / activations / _SNAP if activations else math.inf
            return math.floor(min(fit, self.global_batch))

        return tuple(held(device.mem_bytes - state) for device in self.cluster.devices)

    def too_small(self, rank: int) -> str:
        """Returns in words that a device does not hold the whole model with one sample."""
        need, has = self.memory_bytes(1), self.cluster.devices[rank].mem_bytes
        return (
            f"{self.name(rank)} has {bytes_text(has)}, the whole model with one sample takes {bytes_text(need)}:"
            " leave the device out, or divide the model (hetero_sharded, hetero_pipeline)"
        )

    def without(self, gone: Sequence[int]) -> Setup:
        """Returns the set-up without some ranks; the global batch stays, and an exchange that was measured becomes as
        much shorter as the links say."""
        keep = [rank for rank in range(self.ranks) if rank not in gone]
        links = tuple(tuple(self.cluster.links[a][b] for b in keep) for a in keep)
        by_rank: dict[str, Any] = {"costs": self.costs, "slowness": self.slowness}
        kept = {name: tuple(values[rank] for rank in keep) for name, values in by_rank.items() if values}
        cluster = Cluster(devices=tuple(self.cluster.devices[rank] for rank in keep), links=links)
        left, whole_s = replace(self, cluster=cluster, **kept), self._by_links()
        if self.exchange_s is not None and left.ranks > 1 and whole_s > 0.0:
            return replace(left, exchange_s=self.exchange_s * min(1.0, left._by_links() / whole_s))
        return left

    def _bytes(self, sharded: bool) -> tuple[float, float]:
        if self.model is None:
            return 0.0, 0.0
        parts, (before, *layers, head) = self.model.parts, (p.param_bytes for p in self.model.parts)
        state = math.fsum(p.state_bytes for p in parts)
        if sharded:  # what is around the layers stays gathered for a step; of two layers parameters and gradients
            state = state / self.ranks + before + head + 2.0 * math.fsum(sorted(layers)[-2:])
        return state, math.fsum(p.activation_bytes for p in parts)


def whole_step(model: ModelCost) -> AffineCost:
    """Returns what a step of all layers, and of what stands around them, costs on a device of speed 1."""
    times = [cost for part in model.parts for cost in (part.forward, part.backward)]
    return AffineCost(
        fixed_s=math.fsum(cost.fixed_s for cost in times), per_sample_s=math.fsum(cost.per_sample_s for cost in times)
    )


def setup_from_run(run: RecordedRun, *, global_batch: int | None = None, ledger: RunLedger | None = None) -> Setup:
    """Returns the set-up of a recorded run, with links that cost what its exchange of gradients did.

    Args:
        run: see `lightning_hetero.record.run.run_of`.
        global_batch: samples per update; None: those of a full batch, as recorded.
        ledger: the run's; None: it is made here.

    Raises:
        ValueError: the trace tells of no plan and of no step that all ranks have measured, or a rank has never worked.
    """
    ledger = ledger or ledger_of(run)
    batch = global_batch or ledger.batch
    if run.plan.get("profile") is not None and batch:
        model = model_from_plain(run.plan["profile"])
        return Setup(cluster=cluster_from_plain(run.plan["cluster"]), model=model, global_batch=batch)
    found = costs_of(ledger)
    each = max(1.0, batch / run.ranks)
    names = [run.devices.get(rank, "").partition(",")[0].replace(" ", "/") for rank in range(run.ranks)]
    if "" in names or len(set(names)) < run.ranks:  # they do not tell the devices apart
        names = [f"rank{rank}" for rank in range(run.ranks)]
    speeds = [found.lines[0].seconds(each) / cost.seconds(each) for cost in found.lines]
    devices = tuple(Device(name=name, speed=speed) for name, speed in zip(names, speeds, strict=True))
    return Setup(
        cluster=Cluster(devices=devices, links=((Link(),) * run.ranks,) * run.ranks), costs=found.lines,
        exchange_s=found.rest_s, global_batch=batch, slowness=found.slowness,
    )  # fmt: skip
