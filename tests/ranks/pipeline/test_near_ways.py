"""Parcels between ranks of one node: they arrive as they are, and whoever waits ends with the cause."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_hetero.pipeline.runtime.ownership import exchange, near_ways, new_memory, parcels
from lightning_hetero.pipeline.runtime.ownership.checksums import Summing, bytes_of, checksums
from lightning_hetero.pipeline.runtime.ownership.new_memory import made_ready
from lightning_hetero.pipeline.runtime.ownership.parcel_bytes import ParcelBytes
from lightning_hetero.transport.one_node import neighbours
from lightning_hetero.transport.one_node.conveyor import BLOCK_BYTES, BLOCKS, Conveyor
from tests.ranks.harness import run_ranks
from tests.ranks.pipeline import near_kit

CPU = torch.device("cpu")
RING_BYTES = BLOCKS * BLOCK_BYTES


def values(source: int, target: int) -> dict[str, Tensor]:
    """Tensors that differ by pair: of odd sizes, empty, in other orders, larger than all blocks together."""
    draw = torch.Generator().manual_seed(10 * source + target)

    def some(*shape: int) -> Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=draw)

    return {
        "odd": some(7),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(float(source)),
        "long": some(RING_BYTES + BLOCK_BYTES // 2 + 3),
        "channels last": some(2, 3, 600, 400).contiguous(memory_format=torch.channels_last),
        "columns": some(1000, 999).t(),
        "a part": some(50, 60)[:, 1:],
        "of a larger one": some(2 * BLOCK_BYTES + 64)[1:-3],  # not aligned
        "half": some(333, 2).view(torch.float16),
    }


def moved(
    rank: int, near: near_ways.NearWays, pairs: Mapping[int, list[int]]
) -> tuple[dict[int, dict[Any, Any]], dict[int, parcels.Parcel]]:
    """Sends `values` from each rank to those listed; returns what has come by source, and what was sent by target."""
    group = dist.group.WORLD
    assert group is not None
    outgoing = {
        target: parcels.packed(values(rank, target), CPU, direct=False) for target in pairs.get(rank, [])
    }
    manifests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(manifests, {target: parcel.manifest for target, parcel in outgoing.items()})
    incoming = {s: parcels.room_for(to[rank], CPU) for s, to in enumerate(manifests) if rank in to}
    exchange.exchange(outgoing, incoming, manifests, group=group, wait=dist.Work.wait, ways={}, near=near)
    sums: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(sums, {target: parcel.checksums for target, parcel in outgoing.items()})
    return {
        source: parcels.rebuilt(parcel, sums[source][rank]) for source, parcel in incoming.items()
    }, outgoing


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, value)
        yield


def counting(calls: list[int], work: Callable[..., Any]) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return work(*args, **kwargs)

    return counted


def assert_came(rank: int, found: Mapping[int, Mapping[str, Tensor]], pairs: Mapping[int, list[int]]) -> None:
    assert sorted(found) == sorted(source for source, targets in pairs.items() if rank in targets)
    for source, came in found.items():
        for name, expected in values(source, rank).items():
            assert came[name].shape == expected.shape and came[name].dtype == expected.dtype, (source, name)
            assert torch.equal(bytes_of(came[name].contiguous()), bytes_of(expected.contiguous())), (
                source,
                name,
            )
            if name in ("channels last", "columns"):
                assert came[name].stride() == expected.stride()


def all_to_all(rank: int, world: int) -> None:
    everyone = {source: [target for target in range(world) if target != source] for source in range(world)}
    by_gloo: list[int] = []
    with (
        near_kit.near_ways(rank) as near,
        replaced(dist, "all_to_all_single", counting(by_gloo, dist.all_to_all_single)),
    ):
        for pairs in (everyone, {0: [1]}, {2: [0, 1], 1: [2]}, {}):
            found, outgoing = moved(rank, near, pairs)
            assert_came(rank, found, pairs)
            for parcel in outgoing.values():
                assert [parcel.checksums[i] for i in range(len(parcel.tensors))] == checksums(parcel.tensors)
    assert not by_gloo


def test_all_send_to_all_at_once() -> None:
    run_ranks(3, all_to_all)


def mixed(rank: int, world: int, places: list[str]) -> None:
    pairs = {0: [1, 2], 1: [0], 2: [0, 3], 3: [1]}
    by_gloo: list[int] = []
    pieces: list[int] = []
    with (
        replaced(neighbours, "_place", lambda: places[rank]),
        near_kit.near_ways(rank) as near,
        replaced(dist, "all_to_all_single", counting(by_gloo, dist.all_to_all_single)),
        replaced(Conveyor, "send", counting(pieces, Conveyor.send)),
    ):
        found, _ = moved(rank, near, pairs)
        assert_came(rank, found, pairs)
    assert by_gloo, "all ranks take part, whatever they send themselves"
    assert bool(pieces) == any(places[rank] == places[target] for target in pairs[rank])


def test_ranks_of_other_nodes_use_gloo() -> None:
    run_ranks(4, mixed, ["a", "a", "b", "b"])


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def flipped(rank: int, world: int) -> None:
    piece = Conveyor.piece

    def other(self: Conveyor) -> Tensor | None:
        found = piece(self)
        if found is not None:
            found[-1] ^= 1
        return found

    with near_kit.near_ways(rank) as near:
        if rank == 1:
            with (
                replaced(Conveyor, "piece", other),
                pytest.raises(ValueError, match="has arrived with another checksum"),
            ):
                moved(rank, near, {0: [1], 1: [0]})
        else:
            moved(rank, near, {0: [1], 1: [0]})


def test_one_bit_is_noticed() -> None:
    run_ranks(2, flipped)


def dying(rank: int, world: int, who: int) -> None:
    """One rank ends in the middle, with everything its process held; both directions are under way."""
    send, sent = Conveyor.send, []

    def ends(self: Conveyor, size_bytes: int) -> None:
        sent.append(1)
        if len(sent) == BLOCKS // 2:
            raise KeyboardInterrupt
        send(self, size_bytes)

    with near_kit.near_ways(rank) as near:
        pairs = {0: [1], 1: [0]}
        if rank == who:
            with replaced(Conveyor, "send", ends), pytest.raises(KeyboardInterrupt):
                moved(rank, near, pairs)
        else:
            with pytest.raises(
                RuntimeError, match=f"rank {who} is gone without a word .its connection is closed"
            ):
                moved(rank, near, pairs)


@pytest.mark.parametrize("who", [0, 1])
def test_a_peer_that_ends_is_named(who: int) -> None:
    run_ranks(2, dying, who)


def silent(rank: int, world: int, who: int) -> None:
    """One rank never begins; the other one's patience ends, or it is told the cause first."""
    parcel = parcels.packed(values(0, 1), CPU, direct=False)
    for told in (False, True):
        with (
            replaced(near_ways, "_LOOK_S", 0.01),
            replaced(neighbours, "_LOOK_S", 0.01),
            near_kit.near_ways(rank, timeout_s=60.0 if told else 0.05) as near,
        ):
            if rank == who:
                if told:
                    near_kit.board(rank).report(MemoryError("no room for it"))
            elif told:
                with pytest.raises(RuntimeError, match=f"rank {who} failed: MemoryError: no room for it"):
                    near.carry({}, {who: ParcelBytes(parcel, fill=True)})
            else:
                what = "neither sent nor took layers" if rank < who else "did not connect"
                with pytest.raises(
                    RuntimeError, match=f"rank {who} is gone .*it {what} for 0.05 s, the timeout"
                ):
                    near.carry({}, {who: ParcelBytes(parcel, fill=True)})
            dist.barrier()


@pytest.mark.parametrize("who", [0, 1])
def test_a_peer_that_is_silent_is_named(who: int) -> None:
    run_ranks(2, silent, who)


# ---- parts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size_bytes", [0, 5, 8193, 2**20, 2**20 + 1, 3 * 2**20 + 77])
@pytest.mark.parametrize("step", [37 * 1024, 2**20, 2**22])
def test_checksums_are_equal_however_the_bytes_come(size_bytes: int, step: int) -> None:
    draw = torch.Generator().manual_seed(size_bytes)
    data = torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=draw)
    summing = Summing(torch.empty_like(data))
    for begin in range(0, size_bytes, step):
        summing._data[begin : begin + step] = data[begin : begin + step]
        summing.until(min(begin + step, size_bytes))
    if size_bytes:
        assert [summing.checksum()] == checksums([data])
    if size_bytes > 2**20 + 1:
        swapped = torch.cat([data[2**20 : 2**21], data[: 2**20], data[2**21 :]])
        assert checksums([swapped]) != checksums([data]), "blocks in another order"
    assert bytes_of(data).data_ptr() == data.data_ptr()


@pytest.mark.parametrize("known", [True, False], ids=["", "older kernel"])
def test_memory_keeps_what_is_in_it_while_it_is_made_ready(
    known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not known:
        monkeypatch.setattr(new_memory, "_POPULATE_WRITE", 12345)
    tensors = [torch.arange(3 * 2**18 + i) for i in range(3)]
    with made_ready([*tensors, torch.empty(0)]):
        tensors[0] += 1
    assert [int(t[-1]) for t in tensors] == [3 * 2**18, 3 * 2**18, 3 * 2**18 + 1]
