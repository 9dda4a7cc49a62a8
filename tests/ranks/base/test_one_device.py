"""On one device every engine is stock DDP: the same batches, weights, calls and callbacks, and nothing is refused."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from lightning_hetero import (
    BoundedStalenessStrategy,
    HeteroPipelineStrategy,
    HeteroTrace,
    LoadBalancedStrategy,
    StragglerMonitor,
)
from tests.ranks.harness import RankEnvironment, run_ranks
from tests.ranks.kit import Toy, Weights, quiet_trainer, regression, weights

ENGINES = (LoadBalancedStrategy, BoundedStalenessStrategy, HeteroPipelineStrategy)
BATCH, SAMPLES = 8, 20


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return iter(list(regression(SAMPLES)))


class OwnIterable:
    """Neither a DataLoader nor a dataset of torch's."""

    def __iter__(self) -> Iterator[Any]:
        return iter(plain())

    def __len__(self) -> int:
        return len(plain())


class Lbfgs(Toy):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Normed(Toy):
    """BatchNorm, a plain SGD, a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net.append(nn.BatchNorm1d(1, dtype=torch.float64))

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


class Manual(Toy):
    """Two optimizers, the second stepped every other batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        loss = self.loss(batch)
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        if batch_idx % 2:
            second.step()
            second.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(layer.parameters(), lr=1e-2) for layer in (self.net[0], self.net[2])]


class Pairs(Toy):
    """Batches of several loaders."""

    def loss(self, batch: Any) -> Tensor:
        return torch.stack([super(Pairs, self).loss(b) for b in batch if b is not None]).mean()


class NoOptimizer(Toy):
    def configure_optimizers(self) -> Any:
        return None


def plain(**options: Any) -> DataLoader:
    return DataLoader(regression(SAMPLES), batch_size=BATCH, **options)


Case = tuple[type[Toy], Callable[[], Any], dict[str, Any], dict[str, Any]]
CASES: dict[str, Case] = {  # module, loader, options of the strategy, of the Trainer
    "stream, LBFGS": (Lbfgs, lambda: DataLoader(Stream(), batch_size=BATCH), {}, {}),
    "own iterable, manual": (Manual, OwnIterable, {}, {}),
    "loaders, unused parameters": (Pairs, lambda: [plain(), plain()], {"find_unused_parameters": True}, {}),
    "stream of batches, no optimizer": (
        NoOptimizer, lambda: DataLoader(Stream(), batch_size=None, collate_fn=lambda s: [t[None] for t in s]), {}, {},
    ),
    "batch sampler, communication hook": (
        Toy,
        lambda: DataLoader(regression(SAMPLES), batch_sampler=BatchSampler(SequentialSampler(range(SAMPLES)), 6, True)),
        {"ddp_comm_hook": allreduce_hook},
        {"use_distributed_sampler": False},
    ),
    "SWA, BatchNorm, own backward, accumulation": (
        Normed, plain, {}, {"swa": True, "accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    ),
}  # fmt: skip


class Calls(Callback):
    """Notes what a user's callbacks are called with."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        first = batch
        while isinstance(first, list | tuple):
            first = first[0]
        self.calls.append(f"batch {batch_idx} {tuple(first.shape)} {float(first.sum()):.12g}")

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.calls.append(
            f"{[type(c).__name__ for c in trainer.callbacks]} {sorted(trainer.callback_metrics)}"
        )


def fitted(strategy: DDPStrategy, case: Case) -> tuple[Weights, list[str], list[str]]:
    module_class, loader, _, options = case
    options, calls = dict(options), Calls()
    callbacks = (
        [calls, StochasticWeightAveraging(1e-3, swa_epoch_start=1)] if options.pop("swa", False) else [calls]
    )
    torch.manual_seed(1)
    module = module_class()
    trainer = quiet_trainer(
        strategy=strategy,
        plugins=[RankEnvironment(0, 1)],
        callbacks=callbacks,
        devices=1,
        max_epochs=2,
        **options,
    )
    before = set(threading.enumerate())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, loader())
    started = [t.name for t in set(threading.enumerate()) - before]
    calls.calls.append(f"{len(trainer.callbacks)} {trainer.global_step}")
    return weights(module), calls.calls, started


def all_cases(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        stock, stock_calls, _ = fitted(DDPStrategy(process_group_backend="gloo", **case[2]), case)
        for engine in ENGINES:
            try:
                ours, calls, started = fitted(engine(process_group_backend="gloo", **case[2]), case)
            except Exception as error:
                found[f"{name}, {engine.engine}"] = f"{type(error).__name__}: {error}"
                continue
            equal = all(torch.equal(ours[k], stock[k]) for k in stock)
            if not equal or calls != stock_calls or started:
                found[f"{name}, {engine.engine}"] = (equal, calls, stock_calls, started)
    return found


@pytest.mark.stock_ddp("one_device")
def test_one_device_is_stock_ddp() -> None:
    assert run_ranks(1, all_cases) == [{}]


def shown_job(rank: int, world: int, folder: str) -> list[list[str]]:
    """What a user asks to see on one device."""
    said = []
    for engine in ENGINES:
        strategy: Any = engine(process_group_backend="gloo")
        seen: list[str] = []

        class Ask(Callback):
            def on_train_batch_end(
                self, trainer: Any, *args: Any, seen: list[str] = seen, engine: Any = engine
            ) -> None:
                asked = trainer.strategy
                names = ("summary", "step_report", "engine_metrics", "step_events", "current_samples")
                answers = [getattr(asked, name)() for name in names]
                more = [getattr(asked, n, None) for n in ("shares", "effective_batch_size", "planned")]
                seen.append(f"{answers} {asked.global_batch_size} {more}")
                if engine is LoadBalancedStrategy:
                    asked.rebalancer.enabled = False

        trainer = quiet_trainer(
            strategy=strategy, plugins=[RankEnvironment(0, 1)], devices=1, max_epochs=1, log_every_n_steps=1,
            callbacks=[Ask(), StragglerMonitor(), HeteroTrace(f"{folder}/{strategy.engine}")],
            logger=CSVLogger(folder, name="", version=strategy.engine),
        )  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(Toy(), plain())
            trainer.save_checkpoint(f"{folder}/{strategy.engine}.ckpt")
        checkpoint = torch.load(f"{folder}/{strategy.engine}.ckpt", weights_only=True)
        head = Path(folder, strategy.engine, "metrics.csv").read_text().split("\n")[0]
        shown = sorted(name for name in head.split(",") if name.startswith("hetero/compute_s"))
        state = checkpoint["lightning_hetero"]
        said.append([seen[0], str(shown), str((state["world_size"], state["global_batch_size"]))])
    return said


def test_what_a_user_asks_to_see_does_not_crash_on_one_device(tmp_path: Any) -> None:
    ((balanced, stale, pipeline),) = run_ranks(1, shown_job, str(tmp_path))
    nothing = "[None, None, {}, [], None] 8"
    assert balanced[0] == f"{nothing} [(8,), 8, None]"
    assert stale[0] == pipeline[0] == balanced[0]
    timed = ["hetero/compute_s/max", "hetero/compute_s/min", "hetero/compute_s/rank0"]
    assert balanced[1:] == [str(timed), "(1, 8)"]  # the monitor times its own rank, as under stock DDP ...
    for said in (stale, pipeline):  # ... in whose wrapper the stopwatch starts
        assert said[1:] == ["[]", "(1, 8)"]
    assert all((tmp_path / engine.engine / "rank0.jsonl").exists() for engine in ENGINES)
    assert len((tmp_path / "balanced" / "rank0.jsonl").read_text().splitlines()) >= 3  # steps, timed in DDP's wrapper


class Sizes(Callback):
    def __init__(self, seen: list[int]) -> None:
        self.seen = seen

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(len(batch[0]))


def asked_job(rank: int, world: int) -> list[Any]:
    """A global batch that was asked for is trained on one device, too; idle arguments are named."""
    said: list[Any] = []
    for engine in ENGINES:
        shapes: list[int] = []

        trainer = quiet_trainer(
            strategy=engine(process_group_backend="gloo", global_batch_size=12), plugins=[RankEnvironment(0, 1)],
            devices=1, max_epochs=1, callbacks=[Sizes(shapes)],
        )  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(Toy(), plain())
        said.append(shapes)
    idle: list[Any] = [
        LoadBalancedStrategy(process_group_backend="gloo", max_samples=4),
        BoundedStalenessStrategy(process_group_backend="gloo", nonfinite="skip"),
        HeteroPipelineStrategy(process_group_backend="gloo", micro_batch_size=2, checkpoint_layers=True),
    ]
    for strategy in idle:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = quiet_trainer(
                strategy=strategy, plugins=[RankEnvironment(0, 1)], devices=1, max_steps=1
            )
            trainer.fit(Toy(), plain())
        said.append([str(w.message).partition(": ")[2] for w in caught if "on one device" in str(w.message)])
    return said


def test_a_global_batch_asked_for_and_idle_arguments_on_one_device() -> None:
    (said,) = run_ranks(1, asked_job)
    assert said[:3] == [[12, 8]] * 3
    assert said[3:] == [
        ["max_samples=4 has no effect"],
        ["nonfinite='skip' has no effect"],
        ["micro_batch_size=2, checkpoint_layers=True has no effect"],
    ]


@pytest.mark.parametrize("engine", [*ENGINES, DDPStrategy])
def test_accelerator_is_the_first_argument(engine: type[DDPStrategy]) -> None:
    from lightning.pytorch.accelerators import CPUAccelerator

    accelerator = CPUAccelerator()
    assert engine(accelerator).accelerator is accelerator
    with pytest.raises(TypeError, match="positional"):
        engine(*[None] * 13)


def early_job(rank: int, world: int) -> list[bool]:
    """The process group is there before any module is."""
    found = []
    for engine in ENGINES:
        strategy = engine(process_group_backend="gloo")
        trainer = quiet_trainer(strategy=strategy, plugins=[RankEnvironment(rank, world)], devices=world)
        strategy.setup_environment()
        found.append(
            torch.distributed.is_initialized() and strategy.root_device.type == "cpu" and trainer is not None
        )
    return found


def test_the_environment_is_set_up_before_there_is_a_module() -> None:
    assert run_ranks(2, early_job) == [[True] * 3] * 2
