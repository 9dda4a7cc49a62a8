"""A user's hooks, batches and Trainer options under a pipeline: called as ever, with what they expect to see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, default_collate

from tests.ranks.harness import run_ranks
from tests.ranks.kit import Weights, quiet_trainer, rank_trainer, regression, single, weights
from tests.ranks.pipeline.kit import LAYERS, SAMPLES, WIDTH, Block, Deep, pipeline

LED = {"groups": [{"ranks": [1, 0], "cuts": [0, 2, 6], "samples": 16, "micro_samples": 3}]}  # rank 0 is a member
TWO = {"groups": [{"ranks": [1], "cuts": [0, 6], "samples": 11, "micro_samples": 4},
                  {"ranks": [0], "cuts": [0, 6], "samples": 5, "micro_samples": 3}]}  # fmt: skip
RESTS = {"groups": [{"ranks": [1], "cuts": [0, 6], "samples": 16, "micro_samples": 8}]}  # rank 0 has nothing
HOOKS = (
    "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad", "on_before_backward",
    "on_after_backward", "on_before_optimizer_step", "on_train_batch_end", "on_train_epoch_end", "on_train_end",
)  # fmt: skip


class Hooked(Deep):
    """Overrides every hook of a step, and notes what it sees there."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []
        self.batches: list[tuple[int, Any]] = []
        self.gradients: list[dict[str, float]] = []
        self.losses: list[float] = []
        self.norms: list[float] = []

    def note_gradients(self) -> None:
        held = [(n, p) for n, p in self.named_parameters() if not p.is_meta]
        assert all(p.grad is not None for _, p in held)
        self.gradients.append({n: float(p.grad.abs().sum()) for n, p in held})  # type: ignore[union-attr]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.called.append("on_train_batch_start")
        self.batches.append((batch_idx, batch[0].shape))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.called.append("on_train_batch_end")
        self.losses.append(float(outputs["loss"]))
        assert float(self.trainer.callback_metrics["loss"]) == pytest.approx(self.losses[-1], rel=1e-6)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.called.append("on_before_zero_grad")

    def on_before_backward(self, loss: Tensor) -> None:
        self.called.append("on_before_backward")
        assert loss.ndim == 0

    def on_after_backward(self) -> None:
        self.called.append("on_after_backward")
        self.note_gradients()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.called.append("on_before_optimizer_step")

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.called.append("configure_gradient_clipping")
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        self.note_gradients()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.called.append("optimizer_zero_grad")
        if batch_idx % 2 == 0:  # every second step goes on with the gradients of the one before
            optimizer.zero_grad()

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:  # a warm-up
            group["lr"] = 1e-2 * (1 + self.trainer.global_step) / 4
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.called.append("lr_scheduler_step")
        super().lr_scheduler_step(scheduler, metric)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        steps = int(self.trainer.estimated_stepping_batches)
        self.called.append(f"{steps} steps")
        scheduler = OneCycleLR(optimizer, 1e-2, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=False)
        return {"loss": loss, "idx": batch_idx}


class Watching(Callback):
    """What a callback is called with, by name."""

    def __init__(self) -> None:
        self.called: list[str] = []
        for name in HOOKS:
            setattr(self, name, lambda *args, name=name: self.called.append(name))


@dataclass
class Pair:
    x: Tensor
    y: Tensor
    name: str = "pair"


class Opaque:
    """A batch of which only the module knows how to cut it."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.columns = {"x": x.T.contiguous(), "y": y.T.contiguous()}


class Transferring(Deep):
    """Batches of its own kind, moved and changed by hooks."""

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return Opaque(*(batch.columns[k].T.to(device) for k in "xy"))

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return Opaque(2.0 * batch.columns["x"].T, batch.columns["y"].T)

    def split_batch(self, batch: Any, sizes: Sequence[int]) -> list[Any]:
        columns = (batch.columns[k].T.split(list(sizes)) for k in "xy")
        return [Opaque(x, y) for x, y in zip(*columns, strict=True)]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        pair = tuple(batch.columns[k].T for k in "xy")
        loss = self.loss(pair)
        self.log("loss", loss, batch_size=len(pair[0]))
        return loss


class OfPairs(Deep):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return Pair(*batch)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert batch.name == "pair"
        return self.loss((batch.x, batch.y))


class OfDicts(Deep):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss((batch["in"]["x"], batch["y"][0]))


def dicts(pairs: Any) -> Any:
    x, y = default_collate(pairs)
    return {"in": {"x": x, "names": [str(i) for i in range(len(x))]}, "y": [y]}


def opaques(pairs: Any) -> Opaque:
    return Opaque(*default_collate(pairs))


CASES: dict[str, tuple[Callable[[], Deep], Any, dict[str, Any], dict[str, Any]]] = {
    # module, collate_fn, the strategy's arguments, the Trainer's
    "hooks": (Hooked, None, {}, {}),
    "dataclass": (OfPairs, None, {}, {}),
    "dict": (OfDicts, dicts, {}, {}),
    "split_batch": (Transferring, opaques, {}, {}),
    "accumulation scheduled": (Deep, None, {}, {"callbacks": "accumulate", "max_epochs": 3}),
    "few batches, few steps": (Deep, None, {}, {"limit_train_batches": 2, "max_epochs": -1, "max_steps": 5}),
    "overfit": (Deep, None, {}, {"overfit_batches": 2, "max_epochs": 2}),
}


def options_of(given: dict[str, Any]) -> tuple[dict[str, Any], Watching]:
    watching = Watching()
    callbacks: list[Callback] = [watching]
    if given.get("callbacks") == "accumulate":
        callbacks.append(GradientAccumulationScheduler({0: 1, 1: 2}))
    return {"max_epochs": 1, **given, "callbacks": callbacks}, watching


def seen(module: Any, trainer: Any, watching: Watching) -> dict[str, Any]:
    notes = {name: getattr(module, name, None) for name in ("called", "batches", "gradients", "losses")}
    return {"weights": weights(module), "steps": trainer.global_step, "callback": watching.called, **notes}


def fit_case(rank: int, world: int, name: str, plan: Any) -> dict[str, Any]:
    make, collate, arguments, given = CASES[name]
    options, watching = options_of(given)
    module = make()
    trainer = rank_trainer(rank, world, pipeline(plan, **arguments), **options)
    shuffle = "overfit_batches" not in given
    trainer.fit(module, DataLoader(regression(60), batch_size=8, shuffle=shuffle, collate_fn=collate))
    return seen(module, trainer, watching)


def job(rank: int, world: int) -> dict[str, Any]:
    found = {name: fit_case(rank, world, name, LED) for name in CASES}
    found["hooks, two groups"] = fit_case(rank, world, "hooks", TWO)
    return found


def oracle(name: str) -> dict[str, Any]:
    make, collate, _, given = CASES[name]
    options, watching = options_of(given)
    module = make()
    if "overfit_batches" in given:
        trainer = quiet_trainer(devices=1, **options)
        trainer.fit(module, DataLoader(regression(60), batch_size=16))
    else:
        trainer = single(module, regression(60), 16, loader_args={"collate_fn": collate}, **options)
    return seen(module, trainer, watching)


@pytest.mark.stock_ddp("GradientAccumulationScheduler", "pipeline")
@pytest.mark.stock_ddp(
    "batch_argument", "pipeline",
    differs="a group's first rank gets the group's part, its other ranks a stand-in of one sample",
)  # fmt: skip
@pytest.mark.stock_ddp(
    "batch_kinds", "pipeline",
    differs="objects need a method `split(sizes)`, or the module `split_batch(batch, sizes)`",
)  # fmt: skip
def test_hooks_batches_and_options_as_in_a_single_process() -> None:
    ranks = run_ranks(2, job, timeout_s=120.0)
    for name in ranks[0]:
        expected = oracle(name.partition(",")[0] if name.startswith("hooks") else name)
        for rank, found in enumerate(r[name] for r in ranks):
            assert found["weights"].distance(expected["weights"]) <= 1e-12, (name, rank)
            for what in ("steps", "callback", "called"):
                assert found[what] == expected[what], (name, rank, what)
            assert found["losses"] == (expected["losses"] and pytest.approx(expected["losses"], rel=1e-6)), (name, rank)
            for mine, all_of_them in zip(found["gradients"] or [], expected["gradients"] or [], strict=True):
                assert mine.items() <= {**all_of_them, **mine}.items()
                assert mine == pytest.approx({n: all_of_them[n] for n in mine}, rel=1e-9), (name, rank)
        if name == "hooks":
            # The leader's batch is the global one here; a member's is a dummy.
            assert [shape[0] for _, shape in ranks[1][name]["batches"]] == [16, 16, 16, 12]
            assert [shape[0] for _, shape in ranks[0][name]["batches"]] == [1] * 4
            held = [set(r[name]["gradients"][0]) for r in ranks]
            assert not held[0] & held[1] and held[0] | held[1] == set(expected["gradients"][0])


# ---- mixed precision -------------------------------------------------------------------------------------------


LARGE, SMALL = 2.0**18, 2.0**10  # scales with which gradients overflow, at least some; and none


class Exploding(Deep):
    """Notes the scale."""

    def __init__(self) -> None:
        super().__init__(torch.float32)
        self.scales: list[float] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())  # type: ignore[union-attr]


def scaled(rank: int, world: int) -> list[tuple[Weights, list[float]]]:
    found = []
    for plan, scale in ((LED, LARGE), (TWO, LARGE), (RESTS, LARGE), (LED, SMALL)):
        module = Exploding()
        trainer = rank_trainer(rank, world, pipeline(plan), max_epochs=1, gradient_clip_val=0.5)
        trainer.strategy.precision_plugin = half(scale)
        trainer.fit(module, DataLoader(regression(160, dtype=torch.float32), batch_size=8, shuffle=True))
        found.append((weights(module), module.scales))
    return found


def half(scale: float) -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale))  # type: ignore[arg-type]


@pytest.mark.stock_ddp("precision_mixed", "pipeline")
def test_all_ranks_skip_the_same_steps_with_a_gradient_scaler() -> None:
    ranks = run_ranks(2, scaled, timeout_s=60.0)
    alone = Exploding()
    plugin = half(SMALL)
    single(alone, regression(160, dtype=torch.float32), 16, max_epochs=1, plugins=[plugin], gradient_clip_val=0.5)
    for (found, scales), (others, other_scales) in zip(*ranks, strict=True):
        assert scales == other_scales and found.distance(others) == 0.0
    for _, scales in ranks[0][:3]:
        assert scales[0] < LARGE and len(set(scales[-4:])) == 1  # skipped at first, then not
    found, scales = ranks[0][3]
    assert set(scales) == set(alone.scales) == {SMALL}
    trained = weights(alone).distance(weights(Deep(torch.float32)))
    assert found.distance(weights(alone)) < 0.02 * trained  # half precision; the order of sums differs


# ---- buffers ---------------------------------------------------------------------------------------------------


class Statistics(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH).double()
        self.noted: list[dict[str, Tensor]] = []

    def backbone(self) -> nn.Module:
        return nn.ModuleList(nn.Sequential(Block(), nn.BatchNorm1d(WIDTH)) for _ in range(LAYERS // 2))  # six layers

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        x = self.norm(self.before(x))
        for layer in self.model:  # type: ignore[union-attr]
            x = layer(x)
        return F.mse_loss(self.head(x), y)

    def note(self) -> None:
        self.noted.append({n: b.clone() for n, b in self.named_buffers() if not b.is_meta})

    def on_train_epoch_end(self) -> None:
        self.note()

    def on_validation_epoch_start(self) -> None:
        self.note()


def normed(rank: int, world: int) -> tuple[list[dict[str, Tensor]], Weights]:
    module = Statistics()
    trainer = rank_trainer(rank, world, pipeline(TWO), max_epochs=1)
    trainer.fit(module, DataLoader(regression(48), batch_size=8), DataLoader(regression(16), batch_size=4))
    return module.noted, weights(module)


@pytest.mark.stock_ddp(
    "batchnorm", "pipeline", differs="statistics of micro-batches; the running ones are the first group's"
)  # fmt: skip
def test_statistics_are_the_first_groups() -> None:
    member, first = run_ranks(2, normed, timeout_s=60.0)  # rank 1 is the first group
    (at_validation, own), (_, firsts) = member[0], first[0]
    assert at_validation.keys() == firsts.keys()
    for name, value in firsts.items():
        torch.testing.assert_close(at_validation[name], value, rtol=0, atol=0)
        torch.testing.assert_close(own[name], value, rtol=0, atol=0)
        torch.testing.assert_close(member[1][name], first[1][name], rtol=0, atol=0)


# ---- a step that ends the training ------------------------------------------------------------------------------


class Stops(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.validated_at: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 2:
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def on_validation_start(self) -> None:
        self.validated_at.append(self.global_step)


def stopping(rank: int, world: int) -> tuple[int, int, list[int]]:
    module = Stops()
    trainer = rank_trainer(rank, world, pipeline(LED), max_epochs=3)
    trainer.fit(module, DataLoader(regression(SAMPLES), batch_size=8), DataLoader(regression(8), batch_size=4))
    return trainer.global_step, trainer.current_epoch, module.validated_at


@pytest.mark.stock_ddp("epoch_ended", "pipeline")
def test_all_ranks_stop_where_the_step_of_one_says_so() -> None:
    assert run_ranks(2, stopping) == [(3, 1, [3])] * 2
