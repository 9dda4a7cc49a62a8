"""Callbacks under a sharded model: the ranks of a tensor-parallel group count as one, and waiting is no work."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_hetero import (
    BatchRebalancer,
    HeteroTrace,
    Scenario,
    ShardedBalancedStrategy,
    StragglerMonitor,
    ThrottleCallback,
)
from lightning_hetero.emulate.throttle import Throttle
from lightning_hetero.measure import kinds
from lightning_hetero.record import read_events
from lightning_hetero.record.ledger import ledger_of
from lightning_hetero.record.run import run_of
from lightning_hetero.report.figures import alternatives_of
from lightning_hetero.report.verdict import verdict_of
from tests.ranks.balanced.sharded_kit import goes_on_without_memory
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Scripted, Toy, rank_trainer, regression

STEPS, BATCH = 32, 16


class Kept(Logger):
    """Keeps all values."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    @property
    def name(self) -> str:
        return "kept"

    @property
    def version(self) -> str:
        return "0"

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows.append({name: float(value) for name, value in metrics.items()})

    def log_hyperparams(self, *args: Any) -> None: ...


def watched(rank: int, world: int, tensor: int, folder: Path) -> tuple[Any, Any, list[dict[str, float]]]:
    """Every callback of ours at once; nothing sleeps, and the first part's ranks hold six samples at a time."""
    kept, parts = Kept(), world // tensor
    throttle = partial(Throttle, sleep=lambda seconds: None)
    callbacks = [
        StragglerMonitor(), HeteroTrace(str(folder)), BatchRebalancer(Scripted()),
        ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=3),
        ThrottleCallback(Scenario(sample_s=1e-3, mem_samples=[6] * tensor), throttle=throttle),
    ]  # fmt: skip
    strategy = ShardedBalancedStrategy(tensor_parallel_size=tensor, shard="auto", exchange_every=1, monitor=False)
    options: dict[str, Any] = {"logger": kept, "log_every_n_steps": 1, "max_epochs": 1}
    trainer = rank_trainer(rank, world, strategy, callbacks=callbacks, **options)
    trainer.fit(Toy(), DataLoader(regression(STEPS * BATCH), batch_size=BATCH // parts))
    return strategy.shares, strategy.step_report(), kept.rows


@goes_on_without_memory
@pytest.mark.parametrize(("world", "tensor"), [(2, 1), (4, 2)], ids=["data parallel", "tensor parallel"])
def test_every_callback_counts_parts(tmp_path: Path, world: int, tensor: int) -> None:
    outcomes = run_ranks(world, watched, tensor, tmp_path)
    shares, report, rows = outcomes[0]
    parts = world // tensor
    assert len(shares) == parts and sum(shares) == BATCH and {outcome[0] for outcome in outcomes} == {shares}
    assert [record.rank for record in report.records] == list(range(parts))
    names = {name for row in rows for name in row}
    of_ranks = {name for name in names if name.startswith("hetero/share/rank")}
    assert of_ranks == {f"hetero/share/rank{part}" for part in range(parts)} and "hetero/waiting" in names
    rates = [row for row in rows if "train/samples_per_sec" in row]
    assert rates
    for row in rates:  # batches are counted once per rank by Lightning
        of_all = row["train/samples_per_sec"] / row["train/batches_per_sec"]
        assert of_all == pytest.approx(BATCH / world, rel=1e-6)
    events = read_events(tmp_path)
    learned = [event for event in events if event.kind == "memory"]
    assert learned and {event.rank for event in learned} == {0}
    run = run_of(events)
    assert sorted(path.name for path in tmp_path.glob("*.jsonl")) == [f"rank{part}.jsonl" for part in range(parts)]
    assert (run.engine, run.ranks, run.missing, len(run.steps)) == ("sharded", parts, (), STEPS)
    assert {round(step.samples) for step in run.steps} == {BATCH}
    ledger = ledger_of(run)
    what = alternatives_of(run, ledger)
    assert what is not None and set(what.engines) == {"ddp"} and what.best[0] == "sharded"
    told = verdict_of(run, ledger, None, what)
    text = " ".join([told.headline, *told.said])
    assert "hetero_sharded" in text and "equal parts" in text
    assert not [word for word in ("DDP", "hetero_balanced", "hetero_stale") if word in text], text


# ---- emulated devices ------------------------------------------------------------------------------------------

LAYER_S, LATE_S = 1.0, 100.0


class Clock:
    now_s = 0.0


class Late:
    """A gather for which the peers are late."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        Clock.now_s += LATE_S
        dist.all_gather_into_tensor(output_tensor, input_tensor, group=group)


class Layer(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        Clock.now_s += LAYER_S
        return super().forward(input)


class Stacked(LightningModule):
    """The part that it shards is called, not the module."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(Layer(6, 6), Layer(6, 6), Layer(6, 1)).double()

    def configure_model(self) -> None:
        late: Any = Late()
        for module in (*self.net, self.net):
            assert self.device_mesh is not None
            fully_shard(module, mesh=self.device_mesh["data_parallel"]).set_custom_all_gather(late)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def emulated(rank: int, world: int) -> list[float]:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        Clock.now_s += seconds

    scenario = Scenario(speeds=[1.0, 0.5], sample_s=10.0)
    callback = ThrottleCallback(scenario, throttle=partial(Throttle, sleep=sleep))
    trainer = rank_trainer(rank, world, ModelParallelStrategy(), callbacks=[callback], max_epochs=1)
    with mock.patch.object(kinds, "time", SimpleNamespace(perf_counter=lambda: Clock.now_s)):
        trainer.fit(Stacked(), DataLoader(regression(24), batch_size=4))
    return slept


def test_an_emulated_device_does_not_count_its_waiting_as_work() -> None:
    """Else the fast rank, which waits in each layer, would hardly sleep. A backward pass takes no time here."""
    forward_s, guessed_s = 3 * LAYER_S, 2 * 3 * LAYER_S
    for wanted_s, slept in zip((40.0, 80.0), run_ranks(2, emulated), strict=True):
        first, *others = slept
        assert first == pytest.approx(wanted_s - forward_s - guessed_s)
        assert others[0] == pytest.approx(wanted_s - forward_s + 0.05)  # what the guess was too long, as far as made up
        assert others[1] == pytest.approx(wanted_s - forward_s)
