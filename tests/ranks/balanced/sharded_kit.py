"""Models that are sharded, and trainings of them on several ranks and on one, for the tests of `hetero_sharded`."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

from lightning_hetero import ShardedBalancedStrategy
from tests.ranks.kit import FEATURES, Scripted, Weights, quiet_trainer, rank_trainer, regression

goes_on_without_memory = pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"), reason="FSDPModule.reset_iter_state came with torch 2.13"
)
WIDTH = 8
BATCH = 16


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Deep(LightningModule):
    """Two blocks between two layers, in float64; ``configure_model`` is the user's business, see `Sharded`.

    Its optimizer handles all parameters at once, as on a GPU: one after another, shards take a third of a step's time.
    """

    optimizer: Callable[..., torch.optim.Optimizer] = staticmethod(lambda p: torch.optim.Adam(p, 1e-2, foreach=True))

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Linear(WIDTH, 1)
        self.double()

    @property
    def mesh(self) -> DeviceMesh | None:
        """The ranks that share the parameters; None in one process."""
        strategy = self.trainer.strategy
        return strategy.device_mesh["data_parallel"] if isinstance(strategy, ModelParallelStrategy) else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return type(self).optimizer(self.parameters())


class Sharded(Deep):
    """Applies ``fully_shard`` as a user does."""

    def configure_model(self) -> None:
        if self.mesh is not None and not isinstance(self, FSDPModule):  # Lightning asks again before a test
            self.shard(self.mesh)

    def shard(self, mesh: DeviceMesh, **options: Any) -> None:
        for block in self.blocks:
            fully_shard(block, mesh=mesh, **options)
        fully_shard(self, mesh=mesh, **options)


class InOrder(Sampler[int]):
    """A custom sampler, which is taken as it is: each global batch has the samples of one process's."""

    def __init__(self, data: Dataset) -> None:
        self._size = len(data)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._size))


@dataclass
class Program:
    """A training.

    Attributes:
        make: the module.
        strategy: arguments of `ShardedBalancedStrategy`.
        trainer: arguments of the Trainer.
        samples: of an epoch.
        batch: samples of a global batch.
        data: what is trained on; ``None``: `regression`.
        val: whether there is a loader for validation, and `Trainer.test` and `Trainer.predict` follow.
        alone: the module of one process, if it is another one.
        callbacks: make those of each of the two trainings.
        exact: relative distance of the weights, at most.
    """

    make: Callable[[], LightningModule]
    strategy: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    samples: int = 400
    batch: int = BATCH
    data: Callable[[], TensorDataset] | None = None
    val: bool = False
    alone: Callable[[], LightningModule] | None = None
    callbacks: Sequence[Callable[[], Callback]] = ()
    exact: float = 1e-12


@dataclass
class Outcome:
    """What a training has left behind.

    Attributes:
        weights: whole ones.
        metrics: `callback_metrics` behind the fit, and behind the test.
        samples: of each batch on this rank.
        told: what callbacks and the module have kept in ``told``.
        predictions: of `Trainer.predict`, this rank's.
    """

    weights: Weights
    metrics: list[dict[str, float]]
    samples: list[int] = field(default_factory=list)
    told: Any = None
    predictions: Any = None


class Watch(Callback):
    """Notes the samples of every batch."""

    def __init__(self) -> None:
        self.samples: list[int] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        samples = getattr(trainer.strategy, "current_samples", lambda: len(batch[0]))()
        self.samples.append(len(batch[0]) if samples is None else samples)


def whole(value: Any) -> Any:
    """Returns a plain tensor of its own; all ranks take part."""
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.detach().clone() if isinstance(value, Tensor) else value


def weights(module: nn.Module) -> Weights:
    named = {name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", ""): value
             for name, value in module.state_dict().items()}  # fmt: skip
    return Weights({name: whole(value) for name, value in named.items() if isinstance(value, Tensor)})


def sharded(**arguments: Any) -> ShardedBalancedStrategy:
    defaults = {"policy": Scripted(), "monitor": False, "exchange_every": 1, "save_distributed_checkpoint": False}
    return ShardedBalancedStrategy(**{**defaults, **arguments})


def run(program: Program, trainer: Any, module: Any, batch: int) -> Outcome:
    """Fits, and evaluates if the program does."""
    data = (program.data or (lambda: regression(program.samples)))()
    watch = Watch()
    trainer.callbacks.append(watch)

    def loader(samples: Dataset, size: int) -> DataLoader:
        return DataLoader(samples, batch_size=size, sampler=InOrder(samples))

    other = regression(48, seed=5)
    trainer.fit(module, loader(data, batch), *([DataLoader(other, batch_size=6)] if program.val else []))
    metrics = [{name: float(value) for name, value in trainer.callback_metrics.items()}]
    outcome = Outcome(weights(module), metrics, watch.samples, getattr(module, "told", None))
    if program.val:
        trainer.test(module, DataLoader(other, batch_size=6), verbose=False)
        metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        outcome.predictions = trainer.predict(module, DataLoader(other, batch_size=6))
    return outcome


def on_ranks(
    rank: int, world: int, programs: Mapping[str, Program], strategy: Callable[..., Any] = sharded
) -> dict[str, Outcome | str]:
    """Trains one program after another; a string is how one ended, on every rank in the same way."""
    outcomes: dict[str, Outcome | str] = {}
    for name, program in programs.items():
        torch.manual_seed(3)
        parts = world // program.strategy.get("tensor_parallel_size", 1)
        try:
            options = {"max_epochs": 2, "callbacks": [make() for make in program.callbacks], **program.trainer}
            trainer = rank_trainer(rank, world, strategy(**program.strategy), **options)
            outcomes[name] = run(program, trainer, program.make(), program.batch // parts)
            del trainer
        except Exception:
            outcomes[name] = traceback.format_exc()
    return outcomes


def alone(program: Program) -> Outcome:
    """Trains in this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"max_epochs": 2, "callbacks": [make() for make in program.callbacks], **program.trainer}
        return run(program, quiet_trainer(devices=1, **options), (program.alone or program.make)(), program.batch)
