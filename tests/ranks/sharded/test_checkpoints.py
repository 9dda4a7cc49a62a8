"""A checkpoint of shards, in both forms, goes on in the middle of an epoch under whatever reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_hetero.balanced.runtime.shard import load_whole
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Weights, single
from tests.ranks.resume_kit import BATCH, EXACT, Result, Saver, data, joined, plain_types
from tests.ranks.sharded.checkpoint_kit import SAMPLES, Layers, fit, whole

pytestmark = pytest.mark.ranks

MIDDLE, END, BATCHES = "batch-1-1.ckpt", "epoch-0.ckpt", 2 * SAMPLES // BATCH
# ranks -> strategy, optimizer. ``"odd"``: parameters from last to first within each group, which stock Lightning writes
# down in another order. Folders of more ranks than read them are cut anew; whole files are the same of any number.
SAVED = {
    4: [
        ("whole", "odd"), ("folder", "odd"), ("stock-folder", "adam"), ("tp-whole", "odd"), ("tp-folder", "odd"),
    ],
    2: [
        ("balanced", "odd"), ("stock-whole", "adam"), ("whole", "sgd"), ("balanced", "sgd"), ("folder", "sgd"),
    ],
}  # fmt: skip
# ranks -> strategy, what it reads, optimizer, from where
READ = {
    1: [("whole", "folder", "odd", MIDDLE), ("balanced", "folder", "odd", MIDDLE)],
    2: [("stale", "whole", "odd", MIDDLE),
        ("whole", "whole", "odd", MIDDLE), ("folder", "folder", "odd", MIDDLE),
        ("whole", "balanced", "odd", MIDDLE), ("balanced", "whole", "odd", MIDDLE),
        ("balanced", "folder", "odd", MIDDLE), ("stale", "folder", "odd", MIDDLE),
        ("pipeline", "folder", "odd", END),
        ("folder", "stock-whole", "adam", MIDDLE), ("whole", "stock-folder", "adam", MIDDLE),
        ("folder", "tp-folder", "odd", MIDDLE), ("balanced", "tp-whole", "odd", MIDDLE),
        ("folder", "whole", "sgd", MIDDLE), ("whole", "balanced", "sgd", MIDDLE), ("whole", "folder", "sgd", MIDDLE),
    ],
    3: [("whole", "folder", "odd", MIDDLE), ("folder", "whole", "odd", MIDDLE)],
    4: [
        ("tp-whole", "balanced", "odd", MIDDLE), ("tp-folder", "whole", "odd", MIDDLE),
        ("stock-whole", "whole", "odd", END), ("stock-folder", "folder", "odd", END),
    ],
}  # fmt: skip


class Needed(Saver):
    """Saves no checkpoint that nobody reads."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 0:
            super().on_train_epoch_end(trainer, pl_module)


def saving(rank: int, world: int, folder: str) -> list[Result]:
    return [
        fit(rank, world, name, optimizer=optimizer, callbacks=[Needed(f"{folder}/{name}-{optimizer}", [(1, 1)])])
        for name, optimizer in SAVED[world]
    ]


def reading(rank: int, world: int, folder: str) -> list[Result]:
    return [
        fit(rank, world, name, optimizer=optimizer, ckpt=f"{folder}/{saved}-{optimizer}/{at}", batch_size=4)
        for name, saved, optimizer, at in READ[world]
    ]


@pytest.fixture(scope="module")
def expected() -> dict[str, Weights]:
    """Weights of one process that was not interrupted."""
    modules = {optimizer: Layers(optimizer) for optimizer in ("adam", "odd", "sgd")}
    for module in modules.values():
        single(module, data(SAMPLES), BATCH, max_epochs=2, accumulate_grad_batches=2)
    return {optimizer: whole(module) for optimizer, module in modules.items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, expected: dict[str, Weights]) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    for world, forms in SAVED.items():
        for result in run_ranks(world, saving, str(folder)):
            for (name, optimizer), (final, _) in zip(forms, result, strict=True):
                assert final.distance(expected[optimizer]) <= EXACT, (name, optimizer)
    return folder


@pytest.mark.parametrize("world", READ)
@pytest.mark.short("1", "2")
def test_it_goes_on_exactly(saved: Path, expected: dict[str, Weights], world: int) -> None:
    ranks = run_ranks(world, reading, str(saved))
    for index, (name, form, optimizer, at) in enumerate(READ[world]):
        results = [results[index] for results in ranks]
        batches = BATCHES - (6 if at == MIDDLE else 4)
        assert name == "pipeline" or len(joined(results)) == batches, (name, form)  # whose steps are of micro-batches
        for final, _ in results:
            assert final.distance(expected[optimizer]) <= EXACT, (name, form, optimizer)


def test_a_whole_file_is_read_without_a_trainer(saved: Path) -> None:
    read = [Layers.load_from_checkpoint(saved / f"{name}-odd" / MIDDLE) for name in ("whole", "balanced")]
    assert whole(read[0]).distance(whole(read[1])) <= EXACT


def test_a_checkpoint_is_stocks_plus_one_key_of_plain_types(saved: Path) -> None:
    for form in ("whole", "folder"):
        name = f"{MIDDLE}/meta.pt" if form == "folder" else MIDDLE
        stock = torch.load(saved / f"stock-{form}-adam" / name, weights_only=True)
        ours = torch.load(saved / f"{form}-odd" / name, weights_only=True)
        assert plain_types(state := ours.pop("lightning_hetero")) and state["engine"] == "sharded"
        assert ours.keys() == stock.keys() and ("state_dict" in ours) == (form == "whole")


def test_a_whole_file_that_two_strategies_would_number_differently_is_refused() -> None:
    def made(*, reverse: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
        params: list[Any] = list(model.parameters())
        return model, torch.optim.Adam(params[:: -1 if reverse else 1], 0.1)

    model, optimizer = made(reverse=True)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state, (into, other) = optimizer.state_dict(), made(reverse=True)
    with pytest.raises(ValueError, match="number parameters differently"):
        load_whole(state, other, into, ours=False)
    load_whole(state, other, into, ours=True)
    ours, theirs = (next(iter(m.parameters())) for m in (into, model))
    assert torch.equal(other.state[ours]["exp_avg"], optimizer.state[theirs]["exp_avg"])
    into, other = made(reverse=False)
    load_whole(state, other, into, ours=False)  # the same in both
    with pytest.raises(ValueError, match="of other parameters"):
        load_whole({**state, "param_groups": [{"params": [0, 5]}]}, other, into, ours=True)
