"""What is put around a rank's parts where devices or links are emulated (layer L)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lightning_hetero.emulate.links import SlowClock, parcels_s, slow, sums_s
from lightning_hetero.emulate.scenario import Scenario
from lightning_hetero.pipeline.decide.links import LinkClock
from lightning_hetero.pipeline.decide.plans import parts_of
from lightning_hetero.pipeline.runtime.execute.failures import FailureBoard
from lightning_hetero.pipeline.runtime.execute.pace import BusyTime, EmulatedPace
from lightning_hetero.pipeline.runtime.ownership.gradients import GradientSync
from lightning_hetero.pipeline.runtime.ownership.migration import Migration
from lightning_hetero.types import Cluster, GroupPlan, ModelCost


class Emulation:
    """Wraps what a rank computes and sends; leaves alone what is not emulated.

    Args:
        scenario: that stages sleep for; None: devices are as they are.
        step_of: returns the scenario's step from the number of batches trained so far.
        links: whether they take the time of the cluster's.
        rank: this process, global.
        failures: of the run.

    Attributes:
        cluster: whose links count; of the plan in force.
    """

    cluster: Cluster

    def __init__(
        self,
        scenario: Scenario | None,
        step_of: Callable[[int], int],
        *,
        links: bool,
        rank: int,
        failures: FailureBoard,
    ) -> None:
        self.scenario, self._step_of, self._links = scenario, step_of, links
        self._rank, self._failures = rank, failures

    def paced(self, device: torch.device) -> BusyTime:
        """Returns what adds up computations, and takes an emulated device's time for them."""
        if self.scenario is None:
            return BusyTime(device)
        return EmulatedPace(device, self.scenario, self._rank, step_of=self._step_of)

    def follow(self, busy: BusyTime, model: ModelCost, group: GroupPlan | None, calls: int) -> None:
        """Goes over to this rank's part of a plan; None: it rests."""
        if isinstance(busy, EmulatedPace):
            rank = self._rank
            busy.parts = {} if group is None else parts_of(model, group, rank, calls)

    def clock(self, peer: int) -> LinkClock | SlowClock:
        """Returns what times that which comes from a neighbour, global rank."""
        if not self._links:
            return LinkClock()
        return SlowClock(LinkClock(), self.cluster.links[peer][self._rank], self._failures.check)

    def sums(self, sync: GradientSync) -> Callable[[], None]:
        """Returns what ends the sums of gradients; over emulated links they take their time, behind the real ones."""
        if not self._links:
            return sync.finish
        return slow(sync.finish, lambda: sums_s(self.cluster, sync.sizes_bytes(), self._rank))

    def moves(self, migration: Migration, cluster: Cluster) -> Callable[[object], None]:
        """Returns what sends layers, see `Migration.stage`; over a cluster's emulated links they take their time."""
        if not self._links:
            return migration.stage
        return slow(migration.stage, lambda: parcels_s(cluster, migration.sent_bytes), within=True)

    def stretch(self, step: int) -> float:
        """Returns how many times slower than in reality this rank is in a step."""
        return 1.0 if self.scenario is None else self.scenario.stretch(self._rank, self._step_of(step))
