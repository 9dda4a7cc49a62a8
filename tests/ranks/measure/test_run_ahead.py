"""Own times on devices whose host runs ahead, by virtual clocks: the real `StepProbe`, and the real policy.

Per rank one host and one stream, see `VirtualGpu`. The gradient exchange ends together on all ranks' streams. Hosts
wait for their stream where a user's program does: for the copy of a pageable batch, for a `GradScaler`'s look at its
flag, for a progress bar's ``item()``. With what the host's clock says of the transfer and of the optimizer's step these
waits, and so the work of peers, would count as own time: twice the true one, with pageable batches and with a scaler.
"""

from __future__ import annotations

import pytest

from lightning_hetero.measure.step_clock import StepProbe
from lightning_hetero.shares.bounds import ShareBounds
from lightning_hetero.shares.policy import BalancePolicy
from lightning_hetero.types import SpeedSample
from tests.ranks.measure.kit import VirtualGpu

COSTS = [0.001, 0.001, 0.002, 0.004]  # of a sample [s]
FIXED_S, EXCHANGE_S, COPY_S, LAUNCH_S, UPDATE_S = 0.002, 0.004, 0.001, 0.010, 0.001
SAMPLES = 128


class Rank:
    """One rank's program.

    Attributes:
        gpu: its device.
        probe: times it.
        told: samples, own time and wait of the step that is known last.
        true: own time and wait of each step.
        ahead: steps that the host was ahead of the device, at most.
    """

    def __init__(self, cost_s: float) -> None:
        self.cost_s = cost_s
        self.gpu = VirtualGpu()
        self.probe = StepProbe(self.gpu)
        self.sizes: list[int] = []
        self.told: list[tuple[int, float, float]] = []
        self.true: list[tuple[float, float]] = []
        self.ends: list[float] = []
        self.ahead = 0
        self._left_s = 0.0  # the stream has left the exchange before

    def compute(self, samples: int, *, fetch_s: float, pinned: bool) -> None:
        gpu, probe = self.gpu, self.probe
        gpu.host_s += fetch_s
        probe.arm(fetch_s)
        self.ahead = max(self.ahead, sum(end > gpu.host_s for end in self.ends) + 1)
        with probe.transferring():
            if not pinned:  # in the order of the stream, and the host waits
                gpu.synchronize()
            gpu.submit(COPY_S)
            if not pinned:
                gpu.synchronize()
        probe.start()
        began_s = gpu.host_s
        gpu.submit(FIXED_S + samples * self.cost_s)
        gpu.host_s += LAUNCH_S
        gpu.tail_s = max(gpu.tail_s, began_s + LAUNCH_S)
        probe.backward_ended()
        probe.close()
        self.sizes.append(samples)
        while (both := probe.take_both()) is not None:
            self.told.append((self.sizes.pop(0), *both))

    def exchange(self, until_s: float, *, scaler: bool, item: bool) -> None:
        gpu, probe = self.gpu, self.probe
        self.true.append((gpu.tail_s - self._left_s, until_s - gpu.tail_s))
        gpu.tail_s = self._left_s = until_s
        self.ends.append(until_s)
        probe.exchanged()
        probe.updating()
        if scaler:
            gpu.synchronize()
        gpu.host_s += 0.0005
        gpu.submit(UPDATE_S)
        probe.updated()
        if item:
            gpu.synchronize()


def train(
    steps: int,
    *,
    pinned: bool = True,
    scaler: bool = False,
    item: bool = False,
    fetch_s: float = 0.0003,
    slower: tuple[int, int, float] | None = None,
) -> tuple[list[Rank], list[float]]:
    """Returns the ranks, and how long the slowest of each step worked."""
    ranks = [Rank(cost_s) for cost_s in COSTS]
    policy = BalancePolicy()
    policy.start(world_size=len(ranks), total=SAMPLES, bounds=ShareBounds())
    spans = []
    for step in range(steps):
        if slower is not None and step == slower[0]:
            ranks[slower[1]].cost_s *= slower[2]
        for rank, samples in zip(ranks, policy.shares, strict=True):
            rank.compute(samples, fetch_s=fetch_s, pinned=pinned)
        spans.append(max(FIXED_S + n * r.cost_s for r, n in zip(ranks, policy.shares, strict=True)))
        until_s = max(rank.gpu.tail_s for rank in ranks) + EXCHANGE_S
        for rank in ranks:
            rank.exchange(until_s, scaler=scaler, item=item)
        if all(rank.told for rank in ranks):
            policy.observe(
                [
                    SpeedSample(rank=i, step=step, samples=rank.told[-1][0], compute_s=rank.told[-1][1])
                    for i, rank in enumerate(ranks)
                ]
            )
    return ranks, spans


def best_s(costs: list[float]) -> float:
    return FIXED_S + SAMPLES / sum(1 / cost for cost in costs)


WAYS = {
    "pinned": {},
    "pageable": {"pinned": False},
    "scaler": {"scaler": True},
    "pageable and scaler": {"pinned": False, "scaler": True},
    "item": {"item": True},
    "pageable and item": {"pinned": False, "item": True},
    "loader slower than the device": {"fetch_s": 0.08},
}


@pytest.mark.parametrize("way", WAYS)
def test_told_is_true_and_the_host_two_steps_ahead_at_most(way: str) -> None:
    """True: from where the stream leaves an exchange to where it comes to the next, and from there to its end."""
    ranks, spans = train(60, **WAYS[way])
    for rank in ranks:
        assert len(rank.told) >= 57
        for (_, own_s, wait_s), (true_s, true_wait_s) in list(zip(rank.told, rank.true, strict=False))[1:]:
            assert own_s == pytest.approx(true_s, rel=0.02)
            assert wait_s == pytest.approx(true_wait_s, abs=1e-9)
        assert rank.ahead <= 2
    if way != "loader slower than the device":
        assert max(spans[20:]) < 1.05 * best_s(COSTS)


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_becomes_slow_is_noticed_in_a_few_steps(way: str) -> None:
    _, spans = train(80, slower=(50, 0, 4.0), **WAYS[way])
    slow = [0.004, *COSTS[1:]]
    assert spans[50] > 2.5 * best_s(slow)
    assert spans[56] < (1.6 if way == "loader slower than the device" else 1.3) * best_s(slow)
