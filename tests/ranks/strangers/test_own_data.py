"""Index i is another sample on each rank: own data stay with their rank, or are refused with the reason."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from tests.ranks.strangers.kit import UNEVEN, ends, everyone, refusal, trainer

CUT = [0, 2, 3]
REFUSED = ("stale", "pipeline")


class Learns(LightningModule):
    """Notes which samples it has trained on; a sample is its number, in the first column."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.net = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1)).double()
        with torch.no_grad():
            for p in self.net.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype))
        self.seen: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen += batch[:, 0].int().tolist()
        return (self.net(batch[:, :1].double() / 1000) ** 2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Numbers(Dataset[Tensor]):
    """Samples ``first`` to ``first + n - 1``; what else is in a sample, a subclass says."""

    def __init__(self, first: int = 0, n: int = 32) -> None:
        self.first, self.n = first, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(self.first + index), *self.rest(index)])

    def rest(self, index: int) -> list[float]:
        return []


def options(**own: Any) -> dict[str, dict[str, Any]]:
    stages = {"ranks": [0, 1], "cuts": CUT, "samples": 16, "micro_samples": 4}
    return {
        "balanced": {**UNEVEN, **own},
        "stale": own,
        "pipeline": {"backbone": "net", "plan": {"groups": [stages]}, **own},
        "federated": {k: v for k, v in own.items() if v is not False},
    }


def trained(fits: Trainer, module: Learns, loader: Any) -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fits.fit(module, loader)
    return {
        "seen": everyone(sorted(module.seen)),
        "told": [str(w.message) for w in told if "own_data" in str(w.message) or "of the ranks" in str(w.message)],
        "weights": {k: v.clone() for k, v in module.state_dict().items()},
        "steps": fits.global_step,
    }


# ---- what belongs to a rank ------------------------------------------------------------------------------------


def files_of_the_rank(rank: int, world: int, engine: str, workers: int = 0, **own: Any) -> dict[str, Any]:
    """Each rank reads files of its own, ``use_distributed_sampler=False`` (PL#4646)."""
    fits = trainer(rank, world, engine, options(**own), use_distributed_sampler=False)
    fork = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    loader = DataLoader(Numbers(1000 * rank), batch_size=8, shuffle=True, **fork)
    return trained(fits, Learns(), loader)


def half_of_the_rank(rank: int, world: int, engine: str) -> dict[str, Any]:
    """A subset by rank, cut in `setup` (PL#1981)."""
    data = TensorDataset(torch.arange(64.0)[:, None])
    mine = Subset(data, range(rank, 64, world))
    loader = DataLoader(mine, batch_size=8, collate_fn=lambda rows: torch.stack([row for (row,) in rows]))
    return trained(trainer(rank, world, engine, options(), use_distributed_sampler=False), Learns(), loader)


def unseeded_split(rank: int, world: int, engine: str) -> dict[str, Any]:
    """`random_split` under another seed on each rank, and Lightning's sampler: the listing differs, in effect."""
    order = torch.randperm(32, generator=torch.Generator().manual_seed(rank)).tolist()
    loader = DataLoader(Subset(Numbers(), order), batch_size=8)
    return trained(trainer(rank, world, engine, options()), Learns(), loader)


def fewer_on_one_rank(rank: int, world: int, engine: str) -> dict[str, Any]:
    """Own files of unlike numbers, as many batches."""
    fits = trainer(rank, world, engine, options(), use_distributed_sampler=False)
    return trained(fits, Learns(), DataLoader(Numbers(1000 * rank, 32 - rank), batch_size=8))


def fewer_batches_on_one_rank(rank: int, world: int, engine: str) -> dict[str, Any]:
    """Own files for 4 and for 3 batches, with which stock DDP waits without end."""
    fits = trainer(rank, world, engine, options(), use_distributed_sampler=False)
    return trained(fits, Learns(), DataLoader(Numbers(1000 * rank, 32 - 8 * rank), batch_size=8))


@pytest.mark.stock_ddp("use_distributed_sampler", "balanced")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.short("1")
def test_files_of_the_rank_are_trained_once_each_and_as_by_stock_ddp(workers: int) -> None:
    want = ends(files_of_the_rank, "ddp", workers)
    for rank, (facts, oracle) in enumerate(zip(ends(files_of_the_rank, "balanced", workers), want, strict=True)):
        assert facts["seen"] == [list(range(32)), list(range(1000, 1032))]
        assert facts["weights"].keys() == oracle["weights"].keys()
        assert all(torch.equal(v, oracle["weights"][k]) for k, v in facts["weights"].items())
        assert facts["steps"] == oracle["steps"] == 4
        assert len(facts["told"]) == (rank == 0), facts["told"]
    assert ends(files_of_the_rank, "federated")[0]["seen"] == [list(range(32)), list(range(1000, 1032))]


@pytest.mark.stock_ddp(
    "use_distributed_sampler", "stale", "pipeline", refused="samples would move between ranks"
)  # fmt: skip
@pytest.mark.parametrize("engine", REFUSED)
def test_files_of_the_rank_are_refused_where_samples_move(engine: str) -> None:
    told = refusal(files_of_the_rank, engine)
    for words in ("dataset[0] of rank 1", "own_data=False", "strategy='hetero_balanced'"):
        assert words in told


def stated(rank: int, world: int, engine: str) -> dict[str, Any]:
    return files_of_the_rank(rank, world, engine, own_data=True)


def test_own_data_can_be_said() -> None:
    facts = ends(stated, "balanced")[0]
    assert facts["seen"] == [list(range(32)), list(range(1000, 1032))]
    assert len(facts["told"]) == 1 and "own_data=True" in facts["told"][0]
    for engine in REFUSED:
        assert "with own_data=True" in refusal(stated, engine)


@pytest.mark.parametrize("situation", [half_of_the_rank, fewer_on_one_rank])
def test_a_part_of_the_data_by_rank_stays_there(situation: Any) -> None:
    want = ends(situation, "ddp")
    assert [f["seen"] for f in ends(situation, "balanced")] == [f["seen"] for f in want]


def test_another_order_on_each_rank_is_said() -> None:
    facts = ends(unseeded_split, "balanced")[0]
    assert len(facts["told"]) == 1 and "trained twice" in facts["told"][0]
    assert facts["seen"] == ends(unseeded_split, "ddp")[0]["seen"]  # with samples missing, too
    for engine in REFUSED:
        assert "sort the listing" in refusal(unseeded_split, engine)


def test_own_data_of_different_numbers_of_batches_are_an_error_before_training() -> None:
    told = refusal(fewer_batches_on_one_rank, "balanced")
    assert "limit_train_batches=3" in told


# ---- what only looks so ----------------------------------------------------------------------------------------


class FromGlobalStreams(Numbers):
    """Augmented from torch's and NumPy's global streams, which differ between ranks."""

    def rest(self, index: int) -> list[float]:
        return [float(torch.rand(())), float(np.random.rand())]


class FromAGenerator(Numbers):
    """Augmented from a generator of each rank's own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)
        self.deep = {"generator": np.random.default_rng(seed)}

    def __getitem__(self, index: int) -> Any:
        noise = torch.rand(4, generator=self.generator)
        return torch.tensor([float(index)]), noise, float(self.deep["generator"].random())


class ByMachine(Numbers):
    """Decoded a little differently by each machine, out of another folder."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def __getitem__(self, index: int) -> Any:
        picture = np.random.default_rng(index).integers(0, 255, (16, 16), dtype=np.uint8)
        return torch.tensor([float(index)]), picture + self.rank % 2, f"/data/{self.rank}/{index}.png"


def random_samples(rank: int, world: int, engine: str, kind: str) -> dict[str, Any]:
    """Augmentations differ between ranks, as they should."""
    torch.manual_seed(rank)
    np.random.seed(rank)
    data = {"streams": lambda: FromGlobalStreams(), "generator": lambda: FromAGenerator(rank),
            "machine": lambda: ByMachine(rank)}[kind]()
    fits = trainer(rank, world, engine, options())
    return trained(fits, Learns(), DataLoader(data, batch_size=8, collate_fn=first_column))


def first_column(rows: list[Any]) -> Tensor:
    return torch.stack([row[0] if isinstance(row, tuple) else row for row in rows])


@pytest.mark.parametrize("kind", ["streams", "generator", "machine"])
@pytest.mark.parametrize("engine", ["balanced", "pipeline"])
@pytest.mark.short("pipeline", "balanced-generator")
def test_random_augmentations_and_rounding_are_not_taken_for_own_data(engine: str, kind: str) -> None:
    facts = ends(random_samples, engine, kind)[0]
    assert facts["told"] == []
    assert {v for seen in facts["seen"] for v in seen} >= set(range(32))


def denied(rank: int, world: int, engine: str) -> dict[str, Any]:
    """Samples that differ, of which the user says that they are the same; none is read for it."""

    class Counting(Numbers):
        reads = 0

        def __getitem__(self, index: int) -> Tensor:
            Counting.reads += 1
            return torch.tensor([float(index), float(rank)])

    data = Counting()
    facts = trained(trainer(rank, world, engine, options(own_data=False)), Learns(), DataLoader(data, batch_size=8))
    return {**facts, "reads": everyone(Counting.reads)}


def test_own_data_can_be_denied() -> None:
    facts = ends(denied, "balanced")[0]
    assert facts["told"] == [] and sum(facts["reads"]) == 32
    assert sorted(i for of_rank in facts["seen"] for i in of_rank) == list(range(32))


class Unreadable(Numbers):
    def __getitem__(self, index: int) -> Tensor:
        raise ValueError(f"no file {index}")


def unreadable(rank: int, world: int, engine: str) -> Any:
    """A dataset that cannot be read says so in its own words."""
    return trained(trainer(rank, world, engine, options()), Learns(), DataLoader(Unreadable(), batch_size=8))


def test_a_dataset_that_cannot_be_read_says_so_in_its_own_words() -> None:
    assert "no file" in refusal(unreadable, "balanced")


class ByName(Dataset[Tensor]):
    """Known by the names of its samples only."""

    def __init__(self, rank: int) -> None:
        self.samples = {f"{rank}/{i}": torch.tensor([1000.0 * rank + i]) for i in range(32)}

    def __getitem__(self, name: str) -> Tensor:  # type: ignore[override]
        return self.samples[name]

    def __len__(self) -> int:
        return len(self.samples)


def names_of_the_rank(rank: int, world: int, engine: str) -> dict[str, Any]:
    """Samples have names, other ones on each rank."""
    data = ByName(rank)
    fits = trainer(rank, world, engine, options(), use_distributed_sampler=False)
    return trained(fits, Learns(), DataLoader(data, batch_size=8, sampler=list(data.samples)))  # type: ignore[arg-type]


def test_samples_with_names_of_the_ranks_own_stay_there() -> None:
    assert ends(names_of_the_rank, "balanced")[0]["seen"] == [list(range(32)), list(range(1000, 1032))]
    assert "of rank 1" in refusal(names_of_the_rank, "stale")


