"""A sharded model on GPUs trains what one process on the CPU trains: FSDP2's shards of ranks that share the cards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_hetero import ShardedBalancedStrategy
from tests.gpu.kit import BATCH, PRECISIONS, SIMULATED, card_trainer, moved, weights
from tests.gpu.ranks import run_card_ranks
from tests.ranks.balanced.sharded_kit import Deep, InOrder, Sharded
from tests.ranks.kit import Weights, quiet_trainer, regression

pytestmark = pytest.mark.skipif(SIMULATED, reason="FSDP resizes storages; simulated ones cannot be")
STEPS = 20


class Whole(Deep):
    """In float32, under SGD, so that a rounding error stays as small as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.float()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)


class InShards(Whole, Sharded):
    pass


def batches(samples: int) -> DataLoader:
    data = regression(STEPS * BATCH, dtype=torch.float32)
    return DataLoader(data, batch_size=samples, sampler=InOrder(data))


def whole(part: Tensor) -> Tensor:
    """Returns a plain tensor on the host; all ranks take part. Torch's ``full_tensor`` ends in gloo on GPUs."""
    if not isinstance(part, DTensor):
        return part.detach().cpu()
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part.to_local().detach().cpu())
    return torch.cat(parts)


class AtTheEnd(Callback):
    """Keeps the whole weights, and the types of devices of the parts, before Lightning moves the model to the host."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.kinds = {parameter.device.type for parameter in pl_module.parameters()}
        self.weights = Weights({name: whole(part) for name, part in pl_module.named_parameters()})


def fitted(rank: int, world: int) -> tuple[Weights, set[str]]:
    end, init, backend = AtTheEnd(), dist.init_process_group, "nccl" if world == 1 else "gloo"
    strategy = ShardedBalancedStrategy(monitor=False, process_group_backend=backend)
    options: dict[str, Any] = {} if world > 1 else {"use_distributed_sampler": False}  # of one rank Lightning shuffles
    trainer = card_trainer(rank, world, strategy, max_steps=STEPS, callbacks=[end], **options)
    with pytest.MonkeyPatch.context() as patch:
        if backend == "gloo":  # torch cannot split a group of gloo's that is bound to a device
            patch.setattr(dist, "init_process_group", lambda *args, device_id=None, **rest: init(*args, **rest))
        trainer.fit(InShards(), batches(BATCH // world))
    return end.weights, end.kinds


@pytest.mark.parametrize("world", [1, 2, 4])
def test_weights_are_those_of_one_process(world: int) -> None:
    alone = Whole()
    start = weights(alone)
    quiet_trainer(accelerator="cpu", devices=1, max_steps=STEPS).fit(alone, batches(BATCH))
    for found, kinds in run_card_ranks(world, fitted):
        assert kinds == {"cuda"}
        assert moved(found, weights(alone), start) <= PRECISIONS["32-true"]
