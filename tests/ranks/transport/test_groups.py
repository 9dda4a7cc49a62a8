"""The default group goes on with the survivors: real ranks, killed one after the other, the store in the server."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch import Trainer
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSamplerWrapper
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler

from lightning_hetero.base.elastic import meetings
from lightning_hetero.base.elastic.meetings import Meetings
from lightning_hetero.base.elastic.members import Members
from lightning_hetero.transport.groups import (
    MemberMissingError,
    leave_default_group,
    make_group,
    rebuild_default_group,
    shrink_sampler,
)
from lightning_hetero.transport.membership import Met
from lightning_hetero.transport.side_channel import SideChannel
from tests.ranks.harness import run_ranks
from tests.ranks.transport.kit import run_script

# name -> ranks, who dies in each round, the collective in which the others find out
SCENARIOS: dict[str, tuple[int, list[list[int]], str]] = {
    "one": (3, [[2]], "all_reduce"),
    "rank-0": (3, [[0]], "all_reduce"),
    "one-after-the-other": (4, [[1], [0], [3]], "all_reduce"),
    "two-at-once": (4, [[0, 3]], "all_reduce"),
    "nobody-in-between": (3, [[], [1], []], "all_reduce"),
    # In a barrier of four, one survivor never talks to the dead rank: it would wait for the group's timeout.
    **{f"barrier-without-{dead}": (4, [[dead]], "barrier") for dead in range(4)},
}

# Ranks are forked from one process. In each round some die, the others find out, rebuild, and use the new group.
SCRIPT = """
import json, multiprocessing as mp, os, signal, sys, time
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
from torchmetrics import MeanMetric
from lightning_hetero.stale.runtime.fork import fork_server
from lightning_hetero.transport.run_store import host_store
from lightning_hetero.transport.groups import leave_default_group, rebuild_default_group

TIMEOUT = timedelta(seconds=100)
os.setsid()  # all of it is killed at once, should it hang

def body(ready, orphaned):
    store = host_store("127.0.0.1", TIMEOUT)
    ready({"port": store.port})
    end = time.monotonic() + 60
    while not Path("finished").exists() and time.monotonic() < end: time.sleep(0.01)

def main(rank, world, deaths, op):
    dist.init_process_group("gloo", Path("meeting").absolute().as_uri(), TIMEOUT, world, rank)
    box = [None]
    if rank == 0:
        box = [fork_server(body, keep=[]).details["port"]]  # inherits rank 0's connections, and must drop them
    dist.broadcast_object_list(box, 0)
    store = dist.TCPStore("127.0.0.1", box[0], is_master=False)
    members, said = list(range(world)), []
    for generation, dying in enumerate(deaths, 1):
        dist.barrier()
        if rank in dying: os.kill(os.getpid(), signal.SIGKILL)
        failed = False
        members = [m for m in members if m not in dying]
        rebuild = lambda: rebuild_default_group(store=store, generation=generation, members=members, rank=rank,
                                                backend="gloo", timeout=TIMEOUT)
        try:
            dist.barrier() if op == "barrier" else dist.all_reduce(torch.ones(3))
        except RuntimeError:
            failed = True
            leave_default_group()
            rebuild()  # here, where the exception still holds the frames of the collective
        else:
            rebuild()
        total = torch.tensor([float(rank)])
        dist.all_reduce(total)
        metric = MeanMetric()
        metric.update(float(rank))
        mean = float(metric.compute())
        side = dist.new_group(backend="gloo")
        dist.barrier(group=side)
        first = [rank]
        dist.broadcast_object_list(first, 0)
        place = [dist.get_rank(), dist.get_world_size()]
        said.append({"failed": failed, "sum": total.item(), "mean": mean, "first": first[0], "place": place})
        store.set(f"through {generation} {rank}", "1")
        store.wait([f"through {generation} {m}" for m in members])
    Path(f"rank{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()

for name, (world, deaths, op) in json.loads(sys.argv[1]).items():
    os.mkdir(name)
    os.chdir(name)
    processes = [mp.get_context("fork").Process(target=main, args=(r, world, deaths, op)) for r in range(world)]
    for p in processes: p.start()
    for p in processes: p.join()
    Path("finished").touch()
    Path("codes.json").write_text(json.dumps([p.exitcode for p in processes]))
    os.chdir("..")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All scenarios, played one after the other; far sooner than the groups' timeout of 100 s."""
    folder = tmp_path_factory.mktemp("regroup")
    run_script(SCRIPT, folder, json.dumps(SCENARIOS), within_s=80)
    return folder


@pytest.mark.parametrize("name", SCENARIOS)
def test_survivors_go_on(folder: Path, name: str) -> None:
    world, deaths, _ = SCENARIOS[name]
    dead = {rank for dying in deaths for rank in dying}
    codes = json.loads((folder / name / "codes.json").read_text())
    assert codes == [-9 if rank in dead else 0 for rank in range(world)]
    members = list(range(world))
    for i, dying in enumerate(deaths):
        members = [m for m in members if m not in dying]
        for rank in set(range(world)) - dead:
            found = json.loads((folder / name / f"rank{rank}.json").read_text())[i]
            assert found["place"] == [members.index(rank), len(members)]
            assert found["sum"] == sum(members) and found["first"] == members[0]
            assert found["mean"] == pytest.approx(sum(members) / len(members))
            assert found["failed"] == bool(dying)


def a_rank_that_does_not_come(rank: int, world: int) -> list[str]:
    store = dist.FileStore("store", world)
    said: list[str] = []
    if rank == 0:
        with pytest.raises(MemberMissingError, match=r"rank 1 did not come .* generation 7 within 0\.1 s") as caught:
            rebuild_default_group(
                store=store, generation=7, members=[0, 1], rank=0, backend="gloo", timeout=None, meeting_s=0.1
            )
        said.append(f"missing {caught.value.ranks} {dist.is_initialized()}")
        rebuild_default_group(store=store, generation=8, members=[0], rank=0, backend="gloo", timeout=None)
        said.append(f"alone {dist.get_world_size()}")
    leave_default_group()
    leave_default_group()
    said.append(f"left {not dist.is_initialized()}")
    return said


def test_a_member_that_does_not_come_is_named() -> None:
    said = run_ranks(2, a_rank_that_does_not_come)
    assert said == [["missing (1,) False", "alone 1", "left True"], ["left True"]]


def test_nobody_waits_for_a_member_that_has_died() -> None:
    """Nor for the 60 s that a slow one may take."""
    started_s = time.monotonic()
    with pytest.raises(MemberMissingError, match=r"rank 1 did not come"):
        rebuild_default_group(
            store=dist.HashStore(), generation=7, members=[0, 1, 2], rank=0, backend="gloo", timeout=None,
            living=lambda: {0, 2},
        )  # fmt: skip
    assert time.monotonic() - started_s < 20.0 and not dist.is_initialized()


class Place:
    """Where all meet; who is left is known before.

    Args:
        told: what is said at each meeting: who lives, and whether it has worked for all.
    """

    def __init__(self, *told: tuple[tuple[int, ...], bool]) -> None:
        self.told, self.meetings, self.came = list(told), 7, list[tuple[str, bool]]()
        self.address = SimpleNamespace(host="127.0.0.1", port=1)

    def alive(self) -> tuple[int, ...]:
        return ()

    def expect(self, ranks: Any) -> None: ...

    def meet(self, what: str, *, sound: bool = True) -> Met:
        self.meetings += 1
        self.came.append((what, sound))
        return Met(*self.told.pop(0), (f"at meeting {self.meetings}",))


def meetings_at(place: Place, monkeypatch: pytest.MonkeyPatch, *fails: bool) -> tuple[Meetings, list[Any]]:
    """Of rank 0 of five, which makes no process groups: it notes which, or fails as it is said."""
    trainer, channel = create_autospec(Trainer), create_autospec(SideChannel)
    channel.group = None
    it = Meetings(
        trainer, place, Members(0, 5), channel, backend="gloo", timeout=None, silence_s=6.0, collective_s=60.0
    )
    made, failing = list[Any](), list(fails)

    def rebuild(store: Any, generation: int, *, meeting_s: float, living: Any) -> None:
        assert living == place.alive and meeting_s == 6.0
        made.append((it._members.alive, generation))
        if failing and failing.pop(0):
            raise MemberMissingError(generation, [it._members.alive[1]], 1.0)

    monkeypatch.setattr(it, "rebuild", rebuild)
    monkeypatch.setattr(meetings, "dist", SimpleNamespace(get_backend=lambda: "gloo",
                        group=SimpleNamespace(WORLD=None), Backend=dist.Backend))  # fmt: skip
    monkeypatch.setattr(meetings, "limit_waits", lambda *_: None)
    monkeypatch.setattr(meetings, "reach_store", lambda *_: None)
    return it, made


ALL = (0, 1, 2, 3, 4)


@pytest.mark.filterwarnings("ignore:at meeting")
def test_all_meet_once_more_without_a_rank_that_dies_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(((0, 2, 3, 4), True), ((0, 3, 4), False), ((0, 3), False), ((0, 3), True))
    it, made = meetings_at(place, monkeypatch, True, True)
    told: list[Any] = []
    it.changed.append(told.append)
    it.gather("epoch ends")
    assert made == [((0, 2, 3, 4), 8), ((0, 3, 4), 9), ((0, 3), 10)]
    assert place.came[0] == ("epoch ends", True) and [sound for _, sound in place.came] == [True, False, False, True]
    assert told == [ALL] and it._members.alive == (0, 3)


@pytest.mark.filterwarnings("ignore:at meeting")
def test_what_fails_on_one_rank_is_undone_and_made_again_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here it has worked, elsewhere not: the second meeting says so; without the rank that was lost it works."""
    place = Place((ALL, True), ((0, 1), False), ((0, 1), False), ((0, 1), True), ((0, 1), True))
    it, made = meetings_at(place, monkeypatch)
    calls: list[str] = []

    def save() -> Any:
        calls.append("saved")
        return lambda: calls.append("undone")

    assert it.together("average", lambda: calls.append("made") or len(calls), save) == 5
    assert calls == ["saved", "made", "undone", "saved", "made"] and made == [((0, 1), 10)]
    assert [what for what, _ in place.came] == ["average", "average: made", "average", "average", "average: made"]
    assert [sound for _, sound in place.came] == [True, True, False, True, True]


@pytest.mark.filterwarnings("ignore:at meeting")
def test_what_fails_though_nobody_is_lost_is_tried_a_few_times_and_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(*[(ALL, True), (ALL, False)], *[(ALL, False), (ALL, True), (ALL, False)] * 7)
    it, made = meetings_at(place, monkeypatch)

    def fails() -> None:
        raise RuntimeError("the cause")

    with pytest.raises(RuntimeError, match="the cause"):
        it.together("average", fails)
    assert len(made) == 7


def one_that_fails_alone(rank: int, world: int) -> float:
    """Rank 1 was seen, and did not come: rank 0 has a group behind it that could not be made, rank 1 has not."""
    store = dist.FileStore("store", world)
    common: Any = {"store": store, "members": [0, 1], "rank": rank, "backend": "gloo"}
    if rank:
        leave_default_group()
        dist.PrefixStore("generation/1", store).set("here/1", "1")
    else:
        with pytest.raises(RuntimeError):
            rebuild_default_group(**common, generation=1, timeout=timedelta(seconds=0.5))
    rebuild_default_group(**common, generation=2, timeout=timedelta(seconds=10))
    side, total = dist.new_group(backend="gloo"), torch.tensor([float(rank + 1)])
    dist.all_reduce(total, group=side)
    return total.item()


def test_a_group_that_some_could_not_make_does_not_spoil_the_next() -> None:
    assert run_ranks(2, one_that_fails_alone) == [3.0, 3.0]


# ---- samplers -------------------------------------------------------------------------------------------------

SAMPLES = 26


class Own(DistributedSampler):
    """A user's sampler whose constructor needs what nobody has kept."""

    def __init__(self, dataset: Any, rank: int, world: int, *, needed: str) -> None:
        super().__init__(dataset, num_replicas=world, rank=rank, shuffle=True, seed=5)
        self.needed = needed

    def __iter__(self) -> Iterator[int]:
        assert self.needed == "yes"
        return super().__iter__()


def loader(kind: str, rank: int, world: int) -> DataLoader:
    data = list(range(SAMPLES))
    place: Any = {"num_replicas": world, "rank": rank}
    if kind == "plain":
        return DataLoader(data, 4, sampler=DistributedSampler(data, shuffle=False, **place))
    if kind == "drop_last":
        return DataLoader(data, 4, sampler=DistributedSampler(data, shuffle=True, seed=2, drop_last=True, **place))
    if kind == "wrapped":
        return DataLoader(data, 4, sampler=DistributedSamplerWrapper(SequentialSampler(data), shuffle=False, **place))
    if kind == "unpadded":
        own = UnrepeatedDistributedSamplerWrapper(SequentialSampler(data), shuffle=False, **place)
        return DataLoader(data, 4, sampler=own)
    if kind == "own":
        return DataLoader(data, 4, sampler=Own(data, rank, world, needed="yes"))
    assert kind == "batch_sampler"
    return DataLoader(data, batch_sampler=BatchSampler(DistributedSampler(data, shuffle=False, **place), 4, False))


@pytest.mark.parametrize("members", [[0, 2, 3, 4], [1, 4], [3], [0, 1, 2, 3, 4]], ids=str)
@pytest.mark.parametrize("kind", ["plain", "drop_last", "wrapped", "unpadded", "own", "batch_sampler"])
def test_the_whole_set_is_covered_as_if_it_had_been_divided_so_from_the_start(kind: str, members: list[int]) -> None:
    seen: list[int] = []
    for i, rank in enumerate(members):
        shrunk, fresh = loader(kind, rank, 5), loader(kind, i, len(members))
        for sampler in (shrunk, fresh):
            getattr(sampler.batch_sampler, "sampler").set_epoch(3)  # noqa: B009
        list(shrunk)
        assert shrink_sampler(shrunk, [0, 4, rank] if rank not in (0, 4) else [0, 4], rank)  # an earlier death
        assert shrink_sampler(shrunk, members, rank)
        assert len(shrunk) == len(fresh)
        batches = [batch.tolist() for batch in shrunk]
        assert batches == [batch.tolist() for batch in fresh] and len(batches) == len(shrunk)
        seen += [x for batch in batches for x in batch]
    if kind == "drop_last":
        assert len(set(seen)) == len(seen) == SAMPLES // len(members) * len(members)
    else:
        assert set(seen) == set(range(SAMPLES))
    if kind == "unpadded":
        assert len(seen) == SAMPLES


def _some(rank: int, world: int) -> None:
    """Torch 2.13 has who is no member take part in a split, which gloo's groups cannot."""
    world_group: Any = dist.group.WORLD
    bound = world_group.bound_device_id = torch.device("cuda", rank)  # as Lightning 2.6 does, whatever the backend
    for backend in (None, "gloo"):
        group = make_group([0, 1], None, backend)
        if rank < 2:
            tensor = torch.ones(1)
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == 2.0
        else:
            assert group is dist.GroupMember.NON_GROUP_MEMBER
        assert world_group.bound_device_id == bound
    world_group.bound_device_id = None


def test_some_ranks_make_a_group_of_gloo_though_a_device_is_bound() -> None:
    run_ranks(3, _some)
