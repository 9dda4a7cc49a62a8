"""`StatefulDataLoader` of torchdata, `StreamingDataLoader` of litData, where they are installed: exact resumes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from tests.ranks.harness import run_ranks
from tests.ranks.kit import balanced, stale
from tests.ranks.resume_kit import Result, Saver, check, data, fit, oracle

SAMPLES, BATCH, DONE = 96, 16, 9  # 6 global batches of an epoch, on 2 ranks; saved after the third of the second epoch


def both(rank: int, world: int, make: Any, folder: str, strategy: Any = balanced) -> tuple[Result, Result]:
    """Returns the run that saves, and the run that goes on."""
    whole = fit(rank, world, strategy(), make(rank), callbacks=[Saver(folder, [(1, 2)])])
    return whole, fit(rank, world, strategy(), make(rank), ckpt=f"{folder}/batch-1-2.ckpt")


def indexed(rank: int, world: int, folder: str) -> list[tuple[Result, Result]]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    def make(workers: int) -> Any:
        options = {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
        return lambda _: StatefulDataLoader(data(SAMPLES), batch_size=BATCH // 2, shuffle=True, **options)

    return [
        both(rank, world, make(0), f"{folder}/0"),
        both(rank, world, make(2), f"{folder}/2"),
        both(rank, world, make(2), f"{folder}/stale", lambda: stale(policy="bsp")),
    ]


def test_torchdata_indexed(tmp_path: Any) -> None:
    pytest.importorskip("torchdata.stateful_dataloader")
    ranks, expected = run_ranks(2, indexed, str(tmp_path)), oracle(samples=SAMPLES)
    for case in range(3):
        check([rank[case][0] for rank in ranks], expected, 0, "uninterrupted")
        check([rank[case][1] for rank in ranks], expected, DONE, "resumed")


class Stream(IterableDataset[Any]):
    """Each rank's own, with a length and a state."""

    def __init__(self, rank: int) -> None:
        self.rank, self.next = rank, 0

    def __len__(self) -> int:
        return SAMPLES // 2

    def __iter__(self) -> Iterator[Any]:
        samples = data(SAMPLES)
        while self.next < len(self):
            self.next += 1
            yield samples[2 * self.next - 2 + self.rank]
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def streamed(rank: int, world: int, folder: str) -> tuple[Result, Result]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return both(rank, world, lambda rank: StatefulDataLoader(Stream(rank), batch_size=BATCH // 2), folder)


def written(folder: str) -> None:
    from litdata import optimize

    optimize(fn=sample, inputs=list(range(SAMPLES)), output_dir=folder, num_workers=1, chunk_size=8)


def sample(number: int) -> Any:
    return tuple(data(SAMPLES)[number])


def litdata_streamed(rank: int, world: int, folder: str) -> tuple[Result, Result]:
    from litdata import StreamingDataLoader, StreamingDataset

    def make(rank: int) -> Any:
        return StreamingDataLoader(StreamingDataset(f"{folder}/data", shuffle=True), batch_size=BATCH // 2)

    return both(rank, world, make, folder)


def same(ranks: Any) -> None:
    for (weights, seen), (resumed, rest) in ranks:
        assert len(seen) == 18 and seen[DONE:] == rest
        assert all(torch.equal(weights[key], resumed[key]) for key in weights)
    for epoch in range(3):
        trained = [i for (_, seen), _ in ranks for batch in seen[6 * epoch : 6 * epoch + 6] for i in batch]
        assert sorted(trained) == list(range(SAMPLES))


@pytest.mark.filterwarnings("ignore:LoadBalancedStrategy trains in equal parts")
def test_torchdata_streams(tmp_path: Any) -> None:
    pytest.importorskip("torchdata.stateful_dataloader")
    same(run_ranks(2, streamed, str(tmp_path)))


@pytest.mark.filterwarnings("ignore:LoadBalancedStrategy trains in equal parts")
def test_litdata_streams(tmp_path: Any) -> None:
    pytest.importorskip("litdata")
    written(str(tmp_path / "data"))
    same(run_ranks(2, litdata_streamed, str(tmp_path)))
