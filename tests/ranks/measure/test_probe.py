"""The start-up measurement with real ranks: the same answer everywhere, kept and renewed, overridden.

No test asks for a certain time or rate: on a busy machine there is none.
"""

from __future__ import annotations

import json
import math
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lightning_hetero.cluster import equal_cluster
from lightning_hetero.measure import cache, probe
from lightning_hetero.measure.device import HostDevice
from lightning_hetero.measure.link_probe import LinkProbe
from lightning_hetero.measure.probe import measure_speed, probe_cluster, probe_key
from lightning_hetero.types import Cluster
from tests.ranks.harness import run_ranks

CPU, GIB = torch.device("cpu"), 2.0**30


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def stopped() -> float:
    raise AssertionError("something was measured")


def slow_clock() -> float:
    return 1000.0 * time.perf_counter()


# ---- jobs of the ranks ---------------------------------------------------------------------------------------


def measure(rank: int, world_size: int) -> tuple[Cluster, Cluster, bool]:
    """The world, then its last three as a group of their own."""
    torch.manual_seed(7)
    before = torch.get_rng_state()
    whole = probe_cluster(world(), CPU, mem_bytes=1e9 * (rank + 1) if rank < 2 else None, budget_s=0.05)
    # A rank with a clock 1000 times as fast appears 1000 times as slow.
    clock = slow_clock if rank == 3 else time.perf_counter
    members = [1, 2, 3]
    group = dist.new_group(members)
    part = whole
    if rank in members:
        part = probe_cluster(
            group, CPU, budget_s=0.05, reference_rank=2, speed_tolerance=0.0, clock=clock
        )
    return whole, part, torch.equal(before, torch.get_rng_state())


def keep(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """What a cache changes. Only rank 0 has the folder: others must not look."""
    here: dict[str, Any] = {"cache_folder": folder if rank == 0 else Path(folder, "elsewhere"), "budget_s": 0.02}
    first = probe_cluster(world(), CPU, now_s=1000.0 if rank == 0 else math.nan, **here)
    again = probe_cluster(world(), CPU, now_s=1050.0, max_age_s=60.0, clock=stopped, mem_bytes=5e8, **here)
    other = probe_cluster(world(), CPU, now_s=1050.0, max_age_s=60.0, clock=stopped, reference_rank=1, **here)
    measured: list[str] = []
    for case, settings in {
        "too old": {"now_s": 1061.0},
        "from the future": {"now_s": 1000.0},  # the one before was measured at 1061
        "no time given": {"now_s": math.nan},
        "another dtype": {"now_s": 1000.0, "dtype": torch.float64},
    }.items():
        try:
            probe_cluster(world(), CPU, max_age_s=60.0, clock=stopped, **here, **settings)
        except AssertionError:
            measured.append(case)
        probe_cluster(world(), CPU, max_age_s=0.0, **here, **settings)
    return {"first": first, "again": again, "other": other, "measured": measured}


def damaged(rank: int, world_size: int, folder: str) -> bool:
    """A damaged file is measured anew."""
    probe_cluster(world(), CPU, now_s=0.0, cache_folder=folder, budget_s=0.02)
    if rank == 0:
        (path,) = Path(folder).glob("cluster-*.json")
        entry = json.loads(path.read_text())
        entry["data"]["cluster"]["devices"][0]["speed"] = "quick"
        path.write_text(json.dumps(entry))
    cluster = probe_cluster(world(), CPU, now_s=0.0, cache_folder=folder, budget_s=0.02)
    return cluster.devices[0].speed == 1.0


def override(rank: int, world_size: int) -> list[str]:
    given = equal_cluster(world_size)
    assert probe_cluster(world(), CPU, given=given, clock=stopped) is given
    refused: list[str] = []
    for settings in (
        {"given": equal_cluster(world_size + 1)},
        {"reference_rank": world_size},
        {"budget_s": 0.0},
        {"mem_bytes": 0.0},
    ):
        with pytest.raises(ValueError) as caught:
            probe_cluster(world(), CPU, **settings)  # pyright: ignore[reportArgumentType]
        refused.append(str(caught.value))
    return refused


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
        cluster = probe_cluster(world(), CPU, direct=direct, communicators=4, budget_s=0.02)
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
    assert [d.mem_bytes for d in whole.devices] == [1e9, 2e9, math.inf, math.inf]
    assert whole.devices[0].speed == 1.0 and all(math.isfinite(d.speed) for d in whole.devices)
    between = [whole.links[a][b] for a in range(4) for b in range(4) if a != b]
    assert len(set(between)) == 1  # one host: its memory is the link
    assert 0.0 < between[0].bandwidth_bytes_per_s < math.inf and between[0].latency_s > 0.0
    assert all(unchanged for _, _, unchanged in results)  # the random numbers

    part = results[1][1]
    assert results[2][1] == results[3][1] == part and len(part.devices) == 3
    # The last of the three is the reference, with the fast clock.
    assert part.devices[2].speed == 1.0 and min(part.devices[0].speed, part.devices[1].speed) > 10.0


def test_a_measurement_is_kept_while_it_is_fresh_and_fits(tmp_path: Path) -> None:
    results = run_ranks(2, keep, str(tmp_path))
    first, again, other = (results[0][name] for name in ("first", "again", "other"))
    assert again.links == first.links == other.links
    assert [d.speed for d in again.devices] == [d.speed for d in first.devices]
    assert {d.mem_bytes for d in again.devices} == {5e8} and {d.mem_bytes for d in first.devices} == {math.inf}
    assert other.devices[1].speed == 1.0
    assert other.devices[0].speed == pytest.approx(first.devices[0].speed / first.devices[1].speed)
    cases = ["too old", "from the future", "no time given", "another dtype"]
    assert [result["measured"] for result in results] == [cases, cases]
    assert results[0]["first"] == results[1]["first"]
    assert not (tmp_path / "elsewhere").exists() and len(list(tmp_path.glob("cluster-*.json"))) == 2


def test_a_damaged_file_counts_as_none(tmp_path: Path) -> None:
    assert run_ranks(1, damaged, str(tmp_path)) == [True]


def test_a_cluster_given_is_taken_as_it_is_and_nonsense_refused() -> None:
    (refused,) = run_ranks(1, override)
    assert "the given cluster has 2 devices, but the group has 1 ranks" in refused[0]
    assert refused[1].startswith("reference_rank=1 must be in 0..0")
    assert refused[2].startswith("budget_s=0.0 must be") and refused[3].startswith("mem_bytes=0.0 must be")


def test_the_key_tells_clusters_apart() -> None:
    ranks = [("host", "cpu:0", "x86_64"), ("host", "cpu:1", "x86_64")]
    keys = {
        probe_key(ranks, backend="gloo", dtype=torch.float32),
        probe_key(ranks[::-1], backend="gloo", dtype=torch.float32),
        probe_key(ranks[:1], backend="gloo", dtype=torch.float32),
        probe_key([("other", *ranks[0][1:]), ranks[1]], backend="gloo", dtype=torch.float32),
        probe_key(ranks, backend="nccl", dtype=torch.float32),
        probe_key(ranks, backend="gloo", dtype=torch.bfloat16),
    }
    assert len(keys) == 6


def test_speed_follows_the_clock() -> None:
    """Twice the time for the same work is half the speed, whatever else the machine does."""

    class Ticks:
        def __init__(self, tick_s: float) -> None:
            self.now_s, self.tick_s = 0.0, tick_s

        def __call__(self) -> float:
            self.now_s += self.tick_s
            return self.now_s

    fast, slow = (measure_speed(CPU, budget_s=1.0, clock=Ticks(tick_s)) for tick_s in (0.01, 0.02))
    assert fast == pytest.approx(2.0 * slow)


def test_a_cache_that_cannot_be_written_is_only_a_warning(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.warns(RuntimeWarning, match="cannot be written"):
        cache.save(blocked / "folder", "cluster", "key", {})
    assert cache.load(blocked / "folder", "cluster", "key") is None


def test_a_cache_gives_back_only_what_belongs_to_the_key(tmp_path: Path) -> None:
    key = cache.key_of({"a": 1})
    assert key != cache.key_of({"a": 2}) and cache.load(tmp_path, "kind", key) is None
    cache.save(tmp_path, "kind", key, {"value": 3})
    assert cache.load(tmp_path, "kind", key) == {"value": 3}
    assert cache.load(tmp_path, "other", key) is None
    assert cache.load(tmp_path, "kind", key[:16] + "f" * 48) is None  # the same file name, another key
    (path,) = tmp_path.iterdir()
    path.write_text(path.read_text()[:-1])
    assert cache.load(tmp_path, "kind", key) is None
