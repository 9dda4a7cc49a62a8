"""`StatefulDataLoader` of torchdata, `StreamingDataLoader` of litData, where they are installed: exact or refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import IterableDataset

from tests.ranks.harness import run_ranks
from tests.ranks.kit import balanced, stale
from tests.ranks.resume_kit import Result, Saver, check, data, fit, joined, oracle

SAMPLES, BATCH, DONE = 96, 16, 9  # 6 global batches of an epoch, on 2 ranks; saved after the third of the second epoch


def both(rank: int, world: int, make: Any, folder: str, strategy: Any = balanced) -> tuple[Result, Result]:
    """Returns the run that saves, and the run that goes on."""
    whole = fit(rank, world, strategy(), make(rank), callbacks=[Saver(folder, [(1, 2)])])
    return whole, fit(rank, world, strategy(), make(rank), ckpt=f"{folder}/batch-1-2.ckpt")


def indexed(rank: int, world: int, folder: str) -> list[tuple[Result, Result]]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    def make(workers: int, **kwargs: Any) -> Any:
        kwargs |= {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
        return lambda _: StatefulDataLoader(data(SAMPLES), batch_size=BATCH // 2, **kwargs)

    return [
        both(rank, world, make(0, shuffle=True), f"{folder}/0"),
        both(rank, world, make(2), f"{folder}/2"),
        both(rank, world, make(2), f"{folder}/stale", lambda: stale(policy="bsp")),
    ]


def test_torchdata_indexed(tmp_path: Any) -> None:
    pytest.importorskip("torchdata.stateful_dataloader")
    ranks, expected = run_ranks(2, indexed, str(tmp_path)), oracle(samples=SAMPLES)
    for case in range(3):
        whole, rest = [rank[case][0] for rank in ranks], [rank[case][1] for rank in ranks]
        if case:  # its own sampler, which shuffles, is drawn on rank 0
            check(whole, expected, 0, "uninterrupted")
        check(rest, (whole[0][0], joined(whole)), DONE, "resumed")


class Stream(IterableDataset[Any]):
    """Each rank's own, with a length and a state."""

    def __init__(self, rank: int) -> None:
        self.rank, self.next = rank, 0

    def __len__(self) -> int:
        return SAMPLES // 2

    def __iter__(self) -> Iterator[Any]:
        self.next %= len(self)  # the Trainer does not ask for more than there are
        while self.next < len(self):
            self.next += 1
            yield data(SAMPLES)[2 * self.next - 2 + self.rank]

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


def litdata_streamed(rank: int, world: int, folder: str) -> tuple[Result, Result, str]:
    from litdata import StreamingDataLoader, StreamingDataset

    def make() -> Any:
        return StreamingDataLoader(StreamingDataset(f"{folder}/data", shuffle=True), batch_size=BATCH // 2)

    stock = fit(rank, world, DDPStrategy(process_group_backend="gloo"), make())
    ours = fit(rank, world, balanced(), make(), callbacks=[Saver(folder, [(1, 2)])])
    with pytest.raises(ValueError) as refused:
        fit(rank, world, balanced(), make(), ckpt=f"{folder}/batch-1-2.ckpt")
    return stock, ours, str(refused.value)


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
def test_litdata_streams(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("litdata")
    monkeypatch.setenv("DATA_OPTIMIZER_NUM_WORKERS", "1")  # `optimize` leaves it
    written(str(tmp_path / "data"))
    for stock, ours, refused in run_ranks(2, litdata_streamed, str(tmp_path)):
        assert stock[1] == ours[1] and all(torch.equal(stock[0][key], ours[0][key]) for key in stock[0])
        assert "StreamingDataLoader would begin later ones there" in refused and "end of an epoch" in refused
