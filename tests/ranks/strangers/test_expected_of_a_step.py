"""What every rank expects of a step that only the first rank of its pipeline runs: it is there, or refused by name."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import LearningRateFinder
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from tests.ranks.strangers.kit import difference, ends, everyone, refusal, trainer, two_stages

N = 32
X = torch.arange(float(N)).unsqueeze(1)
PLANS: dict[str, dict[str, Any]] = {
    "plan": {"backbone": "net", "plan": two_stages(0, 2, 3)},
    "led by rank 1": {"backbone": "net", "plan": {"groups": [
        {"ranks": [1, 0], "cuts": [0, 2, 3], "samples": 16, "micro_samples": 16}
    ]}},
    "measured": {"backbone": "net"},
}  # fmt: skip


def loader(samples: int = N, batch_size: int = 8) -> Any:
    return DataLoader(TensorDataset(X[:samples]), batch_size=batch_size)


class Toy(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0] * 0.01).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


# ---- evaluation ------------------------------------------------------------------------------------------------


class Evaluator:
    """As for detection or translation: it keeps what it has seen."""

    def __init__(self) -> None:
        self.parts: list[Tensor] = []
        self.samples = 0

    def update(self, x: Tensor) -> None:
        self.parts.append(x)
        self.samples += len(x)


class Keeps(Toy):
    """Keeps what its validation steps have seen in every way, and looks at it when all ranks do."""

    def __init__(self) -> None:
        super().__init__()
        self.validation_step_outputs: list[list[Tensor]] = [[], []]
        self.by_name: dict[str, list[Tensor]] = defaultdict(list)
        self.evaluator, self.metric = Evaluator(), MeanMetric()
        self.samples, self.total, self.first, self.last = 0, torch.zeros(()), [], torch.zeros(0)
        self.found: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        x = batch[0].flatten()
        if batch_idx == 0:
            self.first.append(dataloader_idx)
        self.samples += len(x)
        self.net(batch[0])
        self.total += x.sum()
        self.validation_step_outputs[dataloader_idx].append(x)
        self.by_name[f"loader {dataloader_idx}"].append(x)
        self.evaluator.update(x)
        self.metric.update(x)
        self.last = x
        return {"x": x}

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        own = batch[0].flatten()
        assert all(torch.equal(own, seen) for seen in (outputs["x"], self.last, self.evaluator.parts[-1]))

    def on_validation_epoch_end(self) -> None:
        own = torch.cat([torch.cat(outputs) for outputs in self.validation_step_outputs])
        assert torch.equal(own, torch.cat([torch.cat(part) for part in self.by_name.values()]))
        assert torch.equal(own, torch.cat(self.evaluator.parts)) and len(own) == self.evaluator.samples
        self.log("mean", own.mean(), sync_dist=True)
        together = sorted(self.all_gather(own).flatten().int().tolist())
        self.found.append((own.tolist(), self.samples, float(self.total), together, float(self.metric.compute())))
        for outputs in self.validation_step_outputs:
            outputs.clear()
        self.by_name.clear()
        self.evaluator = Evaluator()
        self.metric.reset()


def validated(rank: int, world: int, engine: str, plan: str) -> Any:
    """PR#16520, PL#20557: lists in the place of validation_epoch_end; PL#12205: batch 0 comes once per validation."""
    module = Keeps()
    trained = trainer(rank, world, engine, {"pipeline": PLANS[plan]}, max_epochs=2)
    trained.fit(module, loader(), [loader(), loader(16)])
    return module.found, module.first, float(trained.callback_metrics["mean"])


@pytest.mark.stock_ddp("kept_by_steps", "pipeline")
@pytest.mark.parametrize("plan", list(PLANS))
@pytest.mark.short("led by rank 1", "measured")
def test_evaluation_steps_leave_on_each_rank_what_they_do_under_ddp(plan: str) -> None:
    for rank, (found, first, mean) in enumerate(ends(validated, "pipeline", plan)):
        own = [*range(rank, N, 2), *range(rank, 16, 2)]
        together = sorted([*range(N), *range(16)])
        metric = sum(together) / len(together)
        want = [(own, len(own) * k, sum(own) * k, together, pytest.approx(metric)) for k in (1, 2)]
        assert found == want and first == [0, 1, 0, 1] and mean == pytest.approx(metric)


class Confused(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("confusion", torch.zeros(2))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])
        self.confusion += 1


def confused(rank: int, world: int, engine: str) -> None:
    """A confusion matrix as a buffer, updated in validation_step."""
    trainer(rank, world, engine, {"pipeline": PLANS["plan"]}).fit(Confused(), loader(), loader())


def test_buffers_that_evaluation_steps_change_are_refused() -> None:
    error = refusal(confused, "pipeline")
    assert "an evaluation step has changed the buffer self.confusion on rank 0" in error and "hetero_balanced" in error


# ---- training --------------------------------------------------------------------------------------------------


class KeepsInTraining(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        self.by_epoch: dict[int, list[int]] = {}
        self.samples, self.together, self.mine = 0, [], []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0].flatten()
        self.kept.append(x)
        self.samples += len(x)
        self.by_epoch.setdefault(self.current_epoch, []).extend(x.int().tolist())
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        own = torch.cat(self.kept)
        self.mine.append(len(own))
        self.together.append(sorted(self.all_gather(own).flatten().int().tolist()))
        self.log("mean", own.mean(), sync_dist=True)
        self.kept.clear()


def kept(rank: int, world: int, engine: str, plan: str) -> Any:
    """PL#17085, PR#16520: predictions kept by training steps are gathered at the epoch's end."""
    module = KeepsInTraining()
    trained = trainer(rank, world, engine, {"pipeline": PLANS[plan]}, max_epochs=2)
    trained.fit(module, loader())
    every = everyone((module.by_epoch, module.samples))
    return module.mine, module.together, float(trained.callback_metrics["mean"]), every


@pytest.mark.stock_ddp("kept_by_steps", "pipeline")
@pytest.mark.parametrize("plan", ["plan", "led by rank 1"])
def test_lists_of_training_steps_are_shared_out_at_the_epochs_end(plan: str) -> None:
    for mine, together, mean, every in ends(kept, "pipeline", plan):
        assert mine == [N // 2] * 2 and together == [list(range(N))] * 2 and mean == pytest.approx(X.mean().item())
        for epoch in range(2):
            assert sorted(i for seen, _ in every for i in seen[epoch]) == list(range(N))
        assert sum(samples for _, samples in every) == 2 * N


class Counts(Toy):
    """Counts its own calls, for a warm-up."""

    def __init__(self, attribute: bool) -> None:
        super().__init__()
        self.calls: Any = 0
        if not attribute:
            del self.calls
            self.register_buffer("calls", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        return super().training_step(batch, batch_idx) * min(1.0, float(self.calls) / 4)


class Outputs(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "pred": batch[0].clone()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert float(outputs["loss"]) >= 0.0
        assert torch.equal(outputs["pred"], batch[0])


class Skips(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


class Unrolled(Toy):
    """Calls the layers more often in the second epoch."""

    def calls(self) -> int:
        return 3 if self.current_epoch else 1

    def loss(self, x: Tensor, calls: int) -> Tensor:
        for _ in range(calls):
            x = x + self.net(x * 0.01)
        return x.pow(2).mean() * 1e-4

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch[0], self.calls())


class SaysSo(Unrolled):
    @property
    def backbone_calls(self) -> int:
        return self.calls()


def trained(rank: int, world: int, engine: str, module: Any, plan: str = "plan") -> Any:
    """PL#2435: outputs["pred"]; PL#20045: None for a batch; neural-lam: an unrolling that grows; counted warm-up."""
    trainer(rank, world, engine, {"pipeline": PLANS[plan]}, max_epochs=2).fit(module, loader())
    return module


@pytest.mark.stock_ddp("calls_counted", "pipeline", refused="it runs once per micro-batch; count in a hook")
@pytest.mark.stock_ddp("outputs_argument", "pipeline", refused="they are on one rank of each group")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Counts(True), "counts its calls in self.calls: in a pipeline it runs once per micro-batch, 4 times"),
        (lambda: Counts(False), "counts its calls in self.calls"),
        (Outputs, "outputs['pred'] of training_step is on rank 0"),
        (Skips, "training_step returned None on rank 0: to skip a batch so is not supported in a pipeline"),
        (Unrolled, "a property backbone_calls of the LightningModule"),
    ],
    ids=["counter", "buffer", "outputs", "None", "unrolled"],
)
def test_what_members_cannot_have_is_refused_by_name(make: Any, reason: str) -> None:
    error = refusal(trained, "pipeline", make())
    assert reason in error
    assert make is Skips or "strategy='hetero_balanced'" in error


def test_a_counter_is_right_where_the_step_runs_once_per_batch() -> None:
    for module in ends(trained, "pipeline", Counts(True), "led by rank 1"):
        assert module.calls == 4


def test_calls_of_the_layers_are_read_again_at_each_epoch() -> None:
    torch.manual_seed(1)
    module = SaysSo()
    oracle = copy.deepcopy(module)
    optimizer = oracle.configure_optimizers()
    for calls in (1, 3):
        for part in (X[:16], X[16:]):
            optimizer.zero_grad()
            oracle.loss(part, calls).backward()
            optimizer.step()
    for found in ends(trained, "pipeline", module):
        assert difference(found, oracle) < 1e-5


class Queue(Toy):
    """Two passes through the layers per step, and a queue of keys in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", normalize(torch.randn(32, 1), dim=1) * 9)
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        with torch.no_grad():
            keys = normalize(self.net(batch[0] + 1), dim=1)
            rows = (torch.arange(len(keys)) + self.pointer) % 32
            self.queue[rows] = keys
            self.pointer.fill_(int(self.pointer + len(keys)) % 32)
        return loss


def test_calls_of_the_layers_are_found_under_a_plan_given() -> None:
    """moco#41: without being told, two calls per step under a plan given by hand."""
    for module in ends(trained, "pipeline", Queue()):
        assert torch.equal(module.queue.abs(), torch.ones(32, 1)) and int(module.pointer) == 0


# ---- a fit within the fit, and other batches -------------------------------------------------------------------


class Data(LightningDataModule):
    """Doubles its batch size with each epoch."""

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        return loader(batch_size=2 * 2**self.trainer.current_epoch)


class Seen(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.lr, self.seen, self.steps = 1e-3, defaultdict(list), []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen[self.current_epoch] += batch[0].flatten().int().tolist()
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.steps.append(self.trainer.global_step)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def grown(rank: int, world: int, engine: str, plan: str) -> Any:
    """PL#4574: a data module whose batch size grows, reloaded every epoch."""
    module = Seen()
    options = dict(PLANS[plan])
    if "plan" in options:
        options["plan"] = two_stages(0, 2, 3, samples=4, micro_samples=2)
    fits = trainer(
        rank, world, engine, {"pipeline": options}, max_epochs=3, reload_dataloaders_every_n_epochs=1
    )
    fits.fit(module, datamodule=Data())
    return module.steps, everyone(module.seen), sum(g.samples for g in fits.strategy.plan.groups)  # type: ignore[attr-defined]


@pytest.mark.stock_ddp("reload_dataloaders", "pipeline")
@pytest.mark.parametrize("plan", ["plan", "measured"])
def test_batches_may_grow_when_the_loader_is_reloaded(plan: str) -> None:
    for steps, every, planned in ends(grown, "pipeline", plan):
        assert steps == [8, 12, 14] and planned == 16
        for epoch in range(3):
            assert sorted(i for seen in every for i in seen[epoch]) == list(range(N))


def searched(rank: int, world: int, engine: str, plan: str) -> Any:
    """PL#19611: LearningRateFinder as a callback, with a fit of its own within the fit."""
    module = Seen()
    finder = LearningRateFinder(1e-4, 1.0, num_training_steps=12)
    fits = trainer(rank, world, engine, {"pipeline": PLANS[plan]}, callbacks=[finder], max_epochs=1)
    fits.fit(module, DataLoader(TensorDataset(X.repeat(4, 1)), batch_size=8))
    return module.lr, fits.global_step


@pytest.mark.stock_ddp("LearningRateFinder", "pipeline")
@pytest.mark.parametrize("plan", ["plan", "measured"])
@pytest.mark.short("measured")
def test_a_learning_rate_finder_among_the_callbacks(plan: str) -> None:
    (rate, steps), other = ends(searched, "pipeline", plan)
    assert (rate, steps) == other and steps == 8
