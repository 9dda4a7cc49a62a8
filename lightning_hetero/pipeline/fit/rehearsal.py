"""A few samples before training starts: what a step on them costs, and how batches of them are cut (layer L)."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_hetero import lightning_compat as compat
from lightning_hetero.data.layouts import Layout, first_samples, learn_layout
from lightning_hetero.lightning_compat.patches import patched
from lightning_hetero.measure.device import device_of, is_out_of_memory, nothing_drawn
from lightning_hetero.measure.timer import Timer
from lightning_hetero.pipeline.fit.leader_step import add_hint, leader_runs
from lightning_hetero.pipeline.runtime.measure.around_backbone import (
    REPEATS,
    count_calls,
    measure_outside,
    measure_whole,
)
from lightning_hetero.pipeline.runtime.measure.layers import profile_on_device
from lightning_hetero.pipeline.runtime.measure.memory import move_but, state_copies
from lightning_hetero.pipeline.runtime.measure.snapshot import Snapshot
from lightning_hetero.pipeline.runtime.step.backbone import Backbone
from lightning_hetero.pipeline.runtime.step.undivided import Undivided
from lightning_hetero.transport.side_channel import SideChannel
from lightning_hetero.types import ModelCost

_FOR_LAYOUT = 4  # samples that a layout is learned from
_MOST_SAMPLES = 64  # that a profile is made with
_FEWEST = 2  # with one size alone a fixed time cannot be told from a time per sample
_GROWTH = 1.5  # of the time from few samples to many, below which more of them are tried on an accelerator
_MORE, _MOST_GROWN = 4, 4096  # times as many, and up to so many

Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsal:
    """What a training step needs when there is no training yet.

    Attributes:
        module: whole, on this rank.
        backbone: its layers.
        found: whether they were found, not named.
        device: this rank's.
        loader: the user's train loader, for a few samples.
        optimizers: for the size of their state.
        to_device: moves a batch, with all hooks of the user.
        context: of a training step, e.g. autocast.
    """

    module: LightningModule
    backbone: Backbone
    found: bool
    device: torch.device
    loader: object
    optimizers: Sequence[torch.optim.Optimizer]
    to_device: Callable[[Any], Any]
    context: Callable[[], AbstractContextManager[Any]]


class Measured(NamedTuple):
    """What steps of a module cost.

    Attributes:
        model: by layer.
        calls: of the backbone, in one step.
        series_s: successive steps of the larger size, where the module was measured as a whole [s].
        own_s: of an update besides, if it was asked for, see `_own_s` [s].
    """

    model: ModelCost
    calls: int
    series_s: tuple[float, ...] = ()
    own_s: float = 0.0


def measure_model(
    step: Rehearsal, *, micro_batch_size: int | None, checkpoint_layers: bool, repeats: tuple[int, int] = REPEATS,
    own: bool = False,
) -> Measured:  # fmt: skip
    """Returns the costs of a module. Nothing of the module changes.

    The layers stay where they are; one at a time is copied to the device. Where that does not fit with so many samples,
    fewer are tried; where an accelerator takes hardly longer for them than for a few, because launching its work takes
    that long, more: else samples would seem to cost nothing.

    Args:
        step: the user's.
        micro_batch_size: largest number of samples to measure with; None: the loader's batch, at most 64.
        checkpoint_layers: whether layers are computed again in the backward pass.
        repeats: how often steps of the smaller and of the larger size run at most, after one of each that does not
            count.
        own: whether what an update takes besides work and exchange is measured, too.

    Raises:
        TypeError, ValueError: the loader yields no example.
        RuntimeError: the step fails, or never calls the backbone.
        torch.OutOfMemoryError: not even a single layer, with what is outside of the layers, fits the device.
    """
    with nobody_notices(step.module, step.loader, step.device):
        measured = partial(_measured, step, repeats, again=checkpoint_layers)
        samples = _few(step.loader, micro_batch_size)
        grows = micro_batch_size is None and device_of(step.device).asynchronous
        few, found = 0, None
        while found is None:
            few = max(1, len(samples) // 4)
            try:
                found = measured(samples, few)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                if micro_batch_size is not None or len(samples) < 2 * _FEWEST:
                    _refuse_size(step, len(samples), error)
                samples = samples[: len(samples) // 2]
            if found is None:
                gc.collect()  # the failed step's frames hold what they computed
        while grows and _is_flat(found.model, (few, len(samples))) and _MORE * len(samples) <= _MOST_GROWN:
            samples = samples * _MORE
            try:
                found = measured(samples, few)
            except Exception:  # so many do not fit, or are more than the step can do with: what is known will do
                break
        return found._replace(own_s=_own_s(step)) if own else found


def calls_in(step: Rehearsal) -> int:
    """Returns how often a step calls the backbone, tried on two samples; 1, if it cannot be tried before training."""
    if isinstance(step.backbone, Undivided) or not isinstance(step.loader, DataLoader):
        return 1
    with suppress(Exception), nobody_notices(step.module, step.loader, step.device, leave=(nn.Parameter,)):
        _move_outside(step)
        with step.context():
            batch = step.to_device(step.loader.collate_fn(first_samples(step.loader, _FEWEST)))
            calls = count_calls(
                partial(compat.call_training_step, step.module, batch, 0), cut=step.backbone.cut(),
                layers=step.backbone.layers, device=step.device,
            )  # fmt: skip
        return max(1, calls)
    return 1  # the first batch shows what is wrong with it


def _own_s(step: Rehearsal) -> float:
    """Returns what an update costs a rank besides work and exchange: reading its batch, and the optimizer's step [s].

    Of a loader with workers reading costs nothing. Optimizers are those of ``configure_optimizers``, on zero gradients;
    where it needs more than there is before training, AdamW's step stands for theirs.
    """
    loader, trained = step.loader, [p for p in step.module.parameters() if p.requires_grad]
    assert isinstance(loader, DataLoader)

    def read() -> None:
        if not loader.num_workers:
            step.to_device(loader.collate_fn(first_samples(loader, loader.batch_size or 1)))

    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    read_s = usual_s(read, step.device)
    try:
        with patched(step.module.trainer.fit_loop, "setup_data", None):  # to estimate steps would begin training
            optimizers = _optimizers_in(step.module.configure_optimizers())
        return read_s + sum(_step_s(optimizer, step.device) for optimizer in optimizers)
    except Exception:  # whatever it needs
        return read_s + (_step_s(torch.optim.AdamW(trained), step.device) if trained else 0.0)


def _step_s(optimizer: torch.optim.Optimizer, device: torch.device) -> float:
    return usual_s(lambda: optimizer.step(lambda: 0.0), device)


def usual_s(call: Callable[[], object], device: torch.device, before: Callable[[], object] = lambda: None) -> float:
    """Returns the median time of three calls, each after ``before``, and after one that does not count [s]."""
    timer, times_s = Timer(device), list[float]()
    for _ in range(1 + 3):
        before()
        start = timer.mark()
        call()
        times_s.append(timer.seconds(start, timer.mark()))
    return median(times_s[1:])


def _optimizers_in(made: Any) -> list[torch.optim.Optimizer]:
    """Returns the optimizers of what ``configure_optimizers`` returns."""
    if isinstance(made, dict):
        return _optimizers_in(made.get("optimizer"))
    if isinstance(made, list | tuple):
        return [optimizer for one in made for optimizer in _optimizers_in(one)]
    return [made] if isinstance(made, torch.optim.Optimizer) else []


def _is_flat(model: ModelCost, sizes: tuple[int, int]) -> bool:
    """Whether a step of many samples takes hardly longer than one of few."""
    parts = [cost for part in (model.before, *model.layers, model.head) for cost in (part.forward, part.backward)]
    few_s, many_s = (sum(cost.seconds(n) for cost in parts) for n in sizes)
    return many_s < _GROWTH * few_s


def _measured(step: Rehearsal, repeats: tuple[int, int], samples: list[Any], few: int, *, again: bool) -> Measured:
    """Measures with a few of these samples and with all, ``again``: layers are computed again for their backward."""
    module, layers, device = step.module, step.backbone.layers, step.device
    _move_outside(step)
    optimizer = getattr(step.optimizers[0], "_optimizer", step.optimizers[0]) if step.optimizers else None
    copies = state_copies(optimizer)
    assert isinstance(step.loader, DataLoader)
    with step.context():
        bodies = [
            (n, partial(compat.call_training_step, module, step.to_device(step.loader.collate_fn(samples[:n])), 0))
            for n in sorted({few, len(samples)})
        ]
        if isinstance(step.backbone, Undivided):
            name = step.backbone.names[0]
            whole = {"module": module, "name": name, "copies": copies, "device": device, "repeats": repeats}
            model, series_s = measure_whole(bodies, **whole)
            return Measured(model, 1, series_s)
        inside = {id(t) for layer in layers for t in (*layer.parameters(), *layer.buffers())}
        before, head, calls, first = measure_outside(
            bodies, cut=step.backbone.cut(), layers=layers,
            parameters=[p for p in module.parameters() if id(p) not in inside],
            buffers=[b for b in module.buffers() if id(b) not in inside], copies=copies, device=device,
            repeats=repeats,
        )  # fmt: skip
        model = profile_on_device(
            layers, first, names=step.backbone.names, device=device, copies=copies,
            before=before, head=head, call=_computed_again if again else None,
        )  # fmt: skip
    return Measured(model, calls)


def _move_outside(step: Rehearsal) -> None:
    """What is outside of the layers goes to the device."""
    module, device = step.module, step.device
    if any(not t.is_meta and t.device != device for t in (*module.parameters(), *module.buffers())):
        left = () if isinstance(step.backbone, Undivided) else step.backbone.layers
        move_but(module, [t for layer in left for t in (*layer.parameters(), *layer.buffers())], device)


def _refuse_size(step: Rehearsal, samples: int, error: Exception) -> NoReturn:
    """Says what does not fit and what helps."""
    if isinstance(step.backbone, Undivided):
        raise torch.OutOfMemoryError(
            f"the whole model with {samples} samples does not fit {step.device}, where it would be measured ({error});"
            f" and {step.backbone.reason}"
        ) from error
    raise torch.OutOfMemoryError(
        f"what is outside of the layers, with one layer at a time and {samples} samples, does not fit {step.device}:"
        " name more of the model in backbone=, take a smaller micro_batch_size=, or pass profile= with costs measured"
        f" elsewhere ({error})"
    ) from error


def _computed_again(layer: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """As stages call layers with ``checkpoint_layers=True``: kept is the input only, backward begins with a forward."""
    return checkpoint(layer, *args, use_reentrant=False, **kwargs)


def _few(loader: object, micro_batch_size: int | None) -> list[Any]:
    """Returns what a profile is made with."""
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"the train loader is a {type(loader).__name__}; to measure the model a torch DataLoader is needed: give"
            " one, or pass profile= or plan="
        )
    samples = first_samples(loader, micro_batch_size or min(loader.batch_size or _MOST_SAMPLES, _MOST_SAMPLES))
    return samples * 2 if len(samples) == 1 else samples


@contextmanager
def nobody_notices(
    module: LightningModule, loader: object, device: torch.device, *, leave: tuple[type[Tensor], ...] = ()
) -> Iterator[None]:
    """Inside, steps log nothing; what they leave behind, and what they draw, is put back afterwards.

    Args:
        module: whose steps they are.
        loader: of the samples.
        device: of this rank.
        leave: types of tensors that do not change.
    """
    trainer = module.trainer
    data = [loader, getattr(trainer, "datamodule", None)]
    with ExitStack() as stack:
        shared = [trainer, trainer.strategy, *trainer.loggers]
        snapshot = Snapshot([module, *compat.trainer_callbacks(trainer)], data=data, shared=shared, leave=leave)
        stack.callback(device_of(device).empty_cache)  # other processes on it may have what measuring took
        stack.callback(snapshot.put_back)
        for metric in compat.metrics_of(module):
            local = compat.combine_metric_with(
                metric, lambda state: [state], inside=lambda: True, computed=lambda _: None
            )
            stack.callback(local)
        stack.enter_context(nothing_drawn(device_of(device)))
        stack.enter_context(compat.unlogged(module))
        stack.enter_context(leader_runs("training_step"))
        yield


# ---- what one rank finds goes to all -----------------------------------------------------------------------------


def first_finds(channel: SideChannel, find: Callable[[], Found], *, rank: int = 0) -> Found:
    """Returns what one rank finds, rank 0 if no other is named; raises on all ranks if it fails. Collective."""
    told: list[Any] = [None, ""]  # what is found, or why nothing is
    error: Exception | None = None
    if channel.rank == rank:
        try:
            told[0] = find()
        except Exception as caught:  # told to all ranks, or they would wait
            add_hint(caught)
            error, told[1] = caught, f"{type(caught).__name__}: {caught}"
    dist.broadcast_object_list(told, src=rank, group=channel.group)
    if error is not None:
        raise error
    if told[1]:
        raise RuntimeError(f"rank {rank} could not plan the pipeline: {told[1]}")
    return told[0]


def agree_layout(
    loader: DataLoader, module: LightningModule, *, channel: SideChannel, leader: int, device: torch.device,
    to_device: Callable[[Any], Any], needed: bool,
) -> Layout | None:  # fmt: skip
    """Returns how the batches of a loader are cut, the same on all ranks; None: it is not known. Collective.

    Args:
        loader: the user's.
        module: whose hooks see a batch on its way to the device.
        channel: over all ranks.
        leader: the rank that reads a few samples; it holds what is outside of the layers.
        device: of this rank.
        to_device: moves a batch, with all hooks of the user.
        needed: a plan cuts them, or another one may.

    Raises:
        TypeError: they cannot be cut, but must be; on all ranks, with the way out.
    """
    if isinstance(loader.dataset, Sized) and not len(loader.dataset):  # no batch will be cut
        return None
    causes: list[Exception] = []

    def learned() -> Layout | str:
        try:
            with nobody_notices(module, loader, device, leave=(Tensor,)):
                samples = first_samples(loader, _FOR_LAYOUT)
                return learn_layout(lambda part: to_device(loader.collate_fn(part)), samples)
        except Exception as error:
            causes.append(error)
            return f"{'' if isinstance(error, TypeError) else type(error).__name__ + ': '}{error}"

    layout = first_finds(channel, learned, rank=leader)
    if not isinstance(layout, str):
        return layout
    if not needed:
        return None
    raise TypeError(
        f"the batches of the train loader cannot be cut into micro-batches: {layout}. Or use"
        " strategy='hetero_balanced', which gives training_step the whole batch of a rank"
    ) from (causes[0] if causes else None)
