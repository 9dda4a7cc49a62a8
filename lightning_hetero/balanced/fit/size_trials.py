"""Steps that only find out whether so many samples fit this rank's memory (layer L)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import cycle, islice

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy
from torch import nn
from torch.utils.data import DataLoader

from lightning_hetero import lightning_compat as compat
from lightning_hetero.balanced.fit.piece_runner import PieceRunner
from lightning_hetero.balanced.fit.recovery import alone, loss_of
from lightning_hetero.balanced.runtime.pieces import PieceGradients, free_memory
from lightning_hetero.callbacks.balancing import HeteroBatchSizeFinder
from lightning_hetero.data.layouts import first_samples
from lightning_hetero.data.order import Channel
from lightning_hetero.lightning_compat.patches import patched, replace_methods
from lightning_hetero.measure.device import HostDevice, device_of, is_out_of_memory
from lightning_hetero.shares.caps import MemoryCap

_SAMPLES = 64  # of the train data, again and again


def found_sizes(
    finder: HeteroBatchSizeFinder, trainer: Trainer, loader: DataLoader, channel: Channel
) -> tuple[int, ...]:
    """Returns how many samples fit each rank: as a checkpoint says, or by trials, equally many on all ranks.

    Raises:
        ValueError: not even one fits some rank.
        TypeError: see `size_trials`.
    """
    sizes = finder.sizes if len(finder.sizes) == channel.world_size else ()
    if not sizes:
        samples = getattr(loader.dataset, "__len__", lambda: None)()
        search, device = finder.search(samples), device_of(trainer.strategy.root_device)
        with size_trials(trainer, loader, device=device, steps=search.steps) as fits:
            while not all(channel.all_gather_object(search.done)):
                search.tell(search.size > 0 and fits(search.size))
        sizes = tuple(channel.all_gather_object(search.found))
    if not all(sizes):
        raise ValueError(f"not even one sample fits the memory of rank {sizes.index(0)}, of {sizes} for all ranks")
    return sizes


@contextmanager
def size_trials(
    trainer: Trainer, loader: DataLoader, *, device: HostDevice, steps: int
) -> Iterator[Callable[[int], bool]]:
    """Inside, a function finds out whether so many samples fit; afterwards all is as before.

    It makes training steps of this rank without its peers: forward and backward, no update. What a step gathers or
    reduces through Lightning is as large as in training, and made of this rank's own.

    Args:
        trainer: the running trainer; with automatic optimization.
        loader: the user's train loader.
        device: of this rank.
        steps: of a trial.

    Raises:
        TypeError: a step waits for peers in a way that nothing stands for.
    """
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict  # takes long

    module = trainer.lightning_module
    if any(isinstance(layer, nn.SyncBatchNorm) for layer in module.modules()):
        raise TypeError("SyncBatchNorm waits for the other ranks, which a trial must not: give max_samples")
    put_back = PieceRunner(trainer, module, device=device, cap=MemoryCap()).save()
    samples = first_samples(loader, _SAMPLES, in_use=True)
    move = partial(Strategy.batch_to_device, trainer.strategy)

    def step(size: int) -> None:
        batch = loader.collate_fn(list(islice(cycle(samples), size)))
        loss = loss_of(compat.call_training_step(module, compat.batch_to_device(trainer, batch, move), 0))
        if loss is not None:
            PieceGradients(p for p in module.parameters() if p.requires_grad).add(loss, 1.0)

    def fits(size: int) -> bool:
        try:
            for _ in range(steps):
                step(size)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        else:
            return True
        free_memory(device)  # out of the handler, so that the error's frames are gone
        return False

    weights = [(p, p.detach().to("cpu", copy=True)) for p in module.parameters()]
    new = [optimizer for optimizer in trainer.optimizers if not optimizer.state]
    with ExitStack() as stack:
        for optimizer in new:
            stack.callback(optimizer.state.clear)
            get_optimizer_state_dict(module, optimizer)  # makes its state, which needs memory, too
        stack.enter_context(compat.unlogged(module))
        for metric in compat.metrics_of(module):
            stack.enter_context(patched(metric, "distributed_available_fn", lambda: False))
        stack.callback(replace_methods(trainer.strategy, **alone(trainer)))
        stack.enter_context(trainer.precision_plugin.train_step_context())
        yield fits
    with torch.no_grad():
        for parameter, value in weights:
            parameter.copy_(value)
    put_back()
    free_memory(device)
