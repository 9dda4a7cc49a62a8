"""What a rank finds out before it trains (layer L).

By steps on their own, whether so many samples fit its memory. From a file, the speed of this device when the same work
last ran on it, so that a fit begins with good shares.

One file per device, in the folder that the variable ``LIGHTNING_HETERO_CACHE`` names, or else in
``~/.cache/lightning_hetero``. It holds the predictor's state of the latest kinds of work. Where it cannot be written
no file is kept and a fit begins with equal shares, as it does where one device of the cluster is not known.
"""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property, partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

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
from lightning_hetero.callbacks.throttle import ThrottleCallback
from lightning_hetero.data.layouts import first_samples
from lightning_hetero.data.order import Channel
from lightning_hetero.lightning_compat.patches import patched, replace_methods
from lightning_hetero.measure.device import HostDevice, device_of, is_out_of_memory
from lightning_hetero.record.files import write_file
from lightning_hetero.shares.caps import MemoryCap
from lightning_hetero.shares.policy import Learned

_MOST = 64  # kinds of work per device
_LEAST = 5  # steps that a speed must rest on


class EarlierRuns:
    """What earlier runs have learned of this device, for the kind of work that a fit is.

    Two fits are of one kind if their modules have the same class and size, at the same precision, on as many devices.

    Args:
        trainer: of the fit; the ranks' devices are known.
        device: of this rank.
        counts: whether speeds are read and kept at all.

    Attributes:
        most: the most samples of this rank's part that the run of a checkpoint has found to fit; None: it has not.
    """

    def __init__(self, trainer: Trainer, device: HostDevice, *, counts: bool) -> None:
        self.most: int | None = None
        self._trainer, self._counts = trainer, counts
        name = device.identity() or f"{device.name()}-{trainer.local_rank}"
        folder = os.path.expanduser(os.environ.get("LIGHTNING_HETERO_CACHE") or "~/.cache/lightning_hetero")
        safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in f"{socket.gethostname()}-{name}")
        self._path = Path(os.devnull if folder.startswith("~") else folder) / f"{safe}.json"  # ~: there is no home

    @cached_property
    def _work(self) -> str:
        """Asked for once the module is set up: before that it may have no layers, or lazy ones."""
        trainer, module = self._trainer, self._trainer.lightning_module
        emulated = [repr(c.scenario) for c in compat.trainer_callbacks(trainer) if isinstance(c, ThrottleCallback)]
        size = sum(p.numel() for p in module.parameters())
        work = type(module).__module__, type(module).__qualname__, size, trainer.precision, trainer.world_size
        return json.dumps([*work, *emulated])

    def _all(self) -> dict[str, Any]:
        with suppress(OSError, TypeError, ValueError):
            return dict(json.loads(self._path.read_text(encoding="utf-8")))
        return {}

    def read(self) -> Learned | None:
        """Returns what was learned last from this kind of work; None: nothing, or nothing that can be used."""
        with suppress(AttributeError, KeyError, TypeError, ValueError):
            predictor, state, guard = (self._all() if self._counts else {})[self._work]
            numbers = [x for value in state.values() for x in (value if isinstance(value, list) else [value])]
            if all(map(math.isfinite, [*numbers, *guard.values()])):
                return predictor, state, guard
        return None

    def write(self, learned: Learned | None) -> None:
        """Keeps what was learned, if it rests on enough steps."""
        if learned is None or not self._counts or learned[1].get("updates", 0) < _LEAST:
            return
        others = [(work, one) for work, one in self._all().items() if work != self._work]
        write_file(self._path, json.dumps(dict([*others[1 - _MOST :], (self._work, learned)])), told=False)


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
