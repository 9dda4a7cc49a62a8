"""The start-up measurement with real ranks: the same answer everywhere, or what is given.

No test asks for a certain time or rate: on a busy machine there is none.
"""

from __future__ import annotations

import itertools
import math
import time
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lightning_hetero.measure import kinds, probe
from lightning_hetero.measure.device import HostDevice
from lightning_hetero.measure.link_probe import LinkProbe
from lightning_hetero.measure.probe import measure_speed, probe_cluster
from lightning_hetero.types import Cluster
from tests.ranks.harness import run_ranks

CPU, GIB = torch.device("cpu"), 2.0**30


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def probed(group: dist.ProcessGroup, **settings: Any) -> Cluster:
    """Measures in a fraction of the usual time."""
    with patch.object(probe, "_SPEED_S", 0.01), patch.object(probe, "_LINKS_S", 0.02):
        return probe_cluster(group, CPU, **settings)


# ---- jobs of the ranks ---------------------------------------------------------------------------------------


def measure(rank: int, world_size: int) -> tuple[Cluster, Cluster, bool]:
    """The world, then its last three as a group of their own."""
    torch.manual_seed(7)
    before = torch.get_rng_state()
    whole = probed(world())
    group, part = dist.new_group([1, 2, 3]), whole
    if rank:
        assert isinstance(group, dist.ProcessGroup)
        # A device of another kind that a clock 1000 times as fast makes appear 1000 times as slow.
        scale = 1000.0 if rank == 3 else 1.0
        clock = SimpleNamespace(perf_counter=lambda: scale * time.perf_counter())
        with patch.object(kinds, "time", clock), patch.object(probe.platform, "machine", lambda: str(scale)):
            part = probed(group)
    return whole, part, torch.equal(before, torch.get_rng_state())


class Card(HostDevice):
    """A device that ranks share, or have to themselves, with memory of which process groups take some."""

    groups = 0

    def __init__(self, name: str) -> None:
        super().__init__(CPU)
        self._name = name

    def identity(self) -> str:
        return self._name

    def free_bytes(self) -> float:
        return 10 * GIB - 0.25 * GIB * self.groups


def on_cards(rank: int, world_size: int, cards: str, direct: str) -> tuple[list[float], list[str], int]:
    """Returns the memory that the ranks may use, the groups that have carried messages, and those that are left."""
    card, carriers, make = Card(cards[rank]), [], dist.new_group

    def new_group(*args: Any, **kwargs: Any) -> Any:
        card.groups += 1
        return make(*args, **kwargs)

    def destroy(group: Any) -> None:
        card.groups -= 1

    class Carried(LinkProbe):
        def __init__(self, group: dist.ProcessGroup, *args: Any) -> None:
            carriers.append("the group" if group is world() else "a group of its own")
            super().__init__(group, *args)

    changed = {"new_group": new_group, "destroy_process_group": destroy}
    with ExitStack() as stack:
        stack.enter_context(patch.object(probe, "device_of", lambda _: card))
        stack.enter_context(patch.object(probe, "LinkProbe", Carried))
        for name, other in changed.items():
            stack.enter_context(patch.object(dist, name, other))
        cluster = probed(world(), direct=direct, communicators=4)
    return [device.mem_bytes for device in cluster.devices], carriers, card.groups


# ---- tests ---------------------------------------------------------------------------------------------------


def test_ranks_that_share_a_card_share_its_memory_and_their_messages_go_through_the_host() -> None:
    for memory, carriers, left in run_ranks(3, on_cards, "aab", "gloo"):
        assert memory == [4 * GIB, 4 * GIB, 8.5 * GIB]  # 0.9 of what is free, by ranks, less half a gibibyte
        assert set(carriers) == {"the group"} and left == 0


def test_links_are_measured_with_what_will_carry_them_and_what_that_takes_is_kept_free() -> None:
    for memory, carriers, left in run_ranks(2, on_cards, "ab", "gloo"):
        # With the group there a quarter of a gibibyte is less, and training will have four of them.
        assert memory == [0.9 * 9.75 * GIB - 0.5 * GIB - 4 * 0.25 * GIB] * 2
        assert set(carriers) == {"a group of its own"} and left == 0
    for _, carriers, _ in run_ranks(2, on_cards, "ab", ""):
        assert set(carriers) == {"the group"}


def test_all_ranks_get_the_same_complete_cluster() -> None:
    results = run_ranks(4, measure)
    whole = results[0][0]
    assert all(result[0] == whole for result in results)
    assert [d.name.split("/")[1] for d in whole.devices] == [f"cpu:{rank}" for rank in range(4)]
    assert {d.mem_bytes for d in whole.devices} == {math.inf}
    assert whole.devices[0].speed == 1.0 and all(math.isfinite(d.speed) for d in whole.devices)
    between = [whole.links[a][b] for a in range(4) for b in range(4) if a != b]
    assert len(set(between)) == 1  # one host: its memory is the link
    assert 0.0 < between[0].bandwidth_bytes_per_s < math.inf and between[0].latency_s > 0.0
    assert all(unchanged for _, _, unchanged in results)  # the random numbers

    part = results[1][1]
    assert results[2][1] == results[3][1] == part and len(part.devices) == 3
    assert part.devices[0].speed == 1.0 and part.devices[2].speed < 0.1


def test_speed_follows_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the time for the same work is half the speed, whatever else the machine does."""
    speeds: list[float] = []
    for tick_s in (0.01, 0.02):
        ticks = itertools.count()
        clock = SimpleNamespace(perf_counter=lambda ticks=ticks, tick_s=tick_s: tick_s * next(ticks))
        monkeypatch.setattr(kinds, "time", clock)
        speeds.append(measure_speed(CPU))
    assert speeds[0] == pytest.approx(2.0 * speeds[1])
