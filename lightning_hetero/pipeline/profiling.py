"""What a module costs, measured on the first rank before training starts: its own step, on a few samples (layer L)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset

from lightning_hetero import lightning_compat as compat
from lightning_hetero.emulate.scenario import Scenario
from lightning_hetero.pipeline.ambient import nothing_drawn
from lightning_hetero.pipeline.backbone import Backbone
from lightning_hetero.pipeline.carriers import CarrierName
from lightning_hetero.pipeline.cut import BackboneCut
from lightning_hetero.pipeline.footprint import OptimizerSpec, optimizer_bytes
from lightning_hetero.pipeline.outside import measure_outside
from lightning_hetero.pipeline.profile import profile_on_device
from lightning_hetero.types import AffineCost, ModelCost

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

__all__ = ["Rehearsal", "emulated", "measure_model"]

_MOST_SAMPLES = 64  # that a profile is made with


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsal:
    """What a training step needs when there is no training yet.

    Attributes:
        module: whole, on this rank.
        backbone: its layers.
        device: this rank's.
        loader: the user's train loader, for a few samples.
        loss_of: from what ``training_step`` returns to its loss.
        optimizers: for the size of their state.
        to_device: moves a batch, with all hooks of the user.
        context: of a training step, e.g. autocast.
        carrier: see `make_carrier`.
    """

    module: LightningModule
    backbone: Backbone
    device: torch.device
    loader: object
    loss_of: Callable[[Any], Tensor]
    optimizers: Sequence[torch.optim.Optimizer]
    to_device: Callable[[Any], Any]
    context: Callable[[], AbstractContextManager[Any]]
    carrier: CarrierName


def measure_model(
    step: Rehearsal, *, micro_batch_size: int | None, checkpoint_layers: bool, cache_folder: str | None
) -> tuple[ModelCost, int]:
    """Returns the costs of a module, and how often a step calls the backbone. Nothing of the module changes.

    Args:
        step: the user's.
        micro_batch_size: largest number of samples to measure with; None: the loader's batch, at most 64.
        checkpoint_layers: whether layers are computed again in the backward pass.
        cache_folder: see `profile_on_device`.

    Raises:
        TypeError, ValueError: the loader yields no example.
        RuntimeError: the step fails, or never calls the backbone.
        torch.OutOfMemoryError: the module does not fit the device.
    """
    module, layers, device = step.module, step.backbone.layers, step.device
    inside = {id(p) for layer in layers for p in (*layer.parameters(), *layer.buffers())}
    parameters = [p for p in module.parameters() if id(p) not in inside]
    buffers = [b for b in module.buffers() if id(b) not in inside]
    optimizer = _known(list(module.parameters()), step.optimizers)
    with _nobody_notices(module, device), _resident(module, device), step.context():
        batches = list(_examples(step.loader, micro_batch_size))
        outside = measure_outside(
            [(n, partial(compat.call_training_step, module, step.to_device(batch), 0)) for n, batch in batches],
            cut=BackboneCut(*step.backbone.cut_modules),
            layers=layers,
            parameters=parameters,
            buffers=buffers,
            loss_of=step.loss_of,
            optimizer=optimizer,
            device=device,
            carrier=step.carrier,
        )
        model = profile_on_device(
            layers,
            outside.message,
            names=step.backbone.names,
            micro_samples=[n for n, _ in batches],
            optimizer=optimizer,
            before=outside.before,
            head=outside.head,
            call=_computed_again if checkpoint_layers else _called,
            cache_folder=cache_folder,
        )
    return model, outside.calls


def emulated(model: ModelCost, scenario: Scenario) -> ModelCost:
    """Returns the costs with the emulated times in place of the measured ones, in the measured proportions.

    The whole model takes ``step_s + sample_s * samples`` on a device of speed 1, as a step does in the scenario. What a
    micro-batch costs whatever its size stays as measured: a real processor starts every computation.
    """
    costs = (model.before, *model.layers, model.head)
    weights = [(cost.forward.seconds(1e6), cost.backward.seconds(1e6)) for cost in costs]
    total_s = sum(map(sum, weights)) or 1.0

    def part(seconds: float, measured: AffineCost) -> AffineCost:
        share = seconds / total_s
        fixed_s = scenario.step_s * share + measured.fixed_s
        return AffineCost(fixed_s=fixed_s, per_sample_s=(scenario.sample_s or 0.0) * share)

    new = [
        replace(cost, forward=part(forward_s, cost.forward), backward=part(backward_s, cost.backward))
        for cost, (forward_s, backward_s) in zip(costs, weights, strict=True)
    ]
    return ModelCost(before=new[0], layers=tuple(new[1:-1]), head=new[-1])


def _called(layer: nn.Module, value: Any) -> Any:
    return layer(value)


def _computed_again(layer: nn.Module, value: Any) -> Any:
    """As stages call layers with ``checkpoint_layers=True``: kept is the input only, backward begins with a forward."""
    return checkpoint(layer, value, use_reentrant=False)


def _examples(loader: object, micro_batch_size: int | None) -> Iterator[tuple[int, Any]]:
    """Yields two batches of different sizes, as the loader would collate them."""
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"the train loader is a {type(loader).__name__}; to measure the model a torch DataLoader is needed: give"
            " one, or pass profile= or plan="
        )
    most = micro_batch_size or min(loader.batch_size or _MOST_SAMPLES, _MOST_SAMPLES)
    if isinstance(loader.dataset, IterableDataset):
        samples = list(islice(iter(loader.dataset), most))
    else:
        samples = [loader.dataset[i] for i in range(min(most, len(loader.dataset)))]  # type: ignore[arg-type]
    if not samples:
        raise ValueError("the train dataset is empty: there is nothing to measure the model with, or to train on")
    if len(samples) == 1:
        samples = samples * 2
    for n in sorted({max(1, len(samples) // 4), len(samples)}):
        yield n, loader.collate_fn(samples[:n])


def _known(parameters: Sequence[nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]) -> OptimizerSpec:
    """Returns the optimizer if it is known how much state it keeps, else a guess: twice the parameters, as Adam."""
    if not optimizers:
        return None
    optimizer = getattr(optimizers[0], "_optimizer", optimizers[0])
    try:
        optimizer_bytes([p for p in parameters if p.requires_grad], optimizer)
    except ValueError:
        rank_zero_warn(
            f"how much state {type(optimizer).__name__} keeps is not known: the plan counts twice the parameters'"
            " size, as for Adam. Give memory with room to spare if it keeps more"
        )
        return lambda trained: 2.0 * sum(p.numel() * p.element_size() for p in trained)
    return optimizer


@contextmanager
def _nobody_notices(module: LightningModule, device: torch.device) -> Iterator[None]:
    """Inside, steps log nothing and change no metric; what they and the samples draw, nobody has drawn afterwards."""
    with ExitStack() as stack:
        stack.enter_context(nothing_drawn(device))
        stack.enter_context(compat.metrics_frozen(module))
        stack.enter_context(compat.unlogged(module))
        yield


@contextmanager
def _resident(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, the module is on the device, where it is measured; afterwards where it was.

    Raises:
        torch.OutOfMemoryError: it does not fit; `profile=` takes what was measured or estimated elsewhere.
    """
    before = next((p.device for p in module.parameters()), device)
    if before == device:
        yield
        return
    try:
        module.to(device)
        yield
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(
            f"the whole model does not fit {device}, where it would be measured: pass profile= with costs estimated"
            f" on the meta device (lightning_hetero.pipeline.profile.estimate_on_meta) or measured elsewhere ({error})"
        ) from error
    finally:
        module.to(before)
