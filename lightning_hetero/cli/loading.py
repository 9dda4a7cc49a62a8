"""Objects that a command line names: modules and data by import path or ``_target_``, and what they cost."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from hydra.utils import get_object, instantiate
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from torch.utils.data import DataLoader, Dataset

from lightning_hetero import lightning_compat as compat
from lightning_hetero.cli.ranks import quiet_loggers
from lightning_hetero.pipeline.fit.planning import tied_spans
from lightning_hetero.pipeline.fit.rehearsal import Rehearsal, measure_model
from lightning_hetero.pipeline.runtime.measure.around_backbone import NeverCalledError
from lightning_hetero.pipeline.runtime.step.layer_calls.chain import NotAChainError
from lightning_hetero.pipeline.runtime.step.undivided import Undivided, find_layers, undivided
from lightning_hetero.solvers.tied_layers import Span
from lightning_hetero.types import ModelCost

T = TypeVar("T")

_USUAL_BATCH = 8  # samples, of a dataset without a loader


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """What a module costs on the device it was measured on.

    Attributes:
        model: costs by layer; one layer, where they cannot be divided.
        spans: layers that must stay together.
        batch_size: of the user's loader, per device; None: not set.
        undivided: why the layers cannot be divided; empty: they can.
    """

    model: ModelCost
    spans: tuple[Span, ...]
    batch_size: int | None
    undivided: str


def _named(what: str, given: Any) -> Any:
    """Returns what ``pkg.module:Name``, ``pkg.module.Name`` or a ``_target_`` stands for, made if it is a class."""
    if isinstance(given, Mapping):
        if "_target_" not in given:
            raise ValueError(
                f"{what}={dict(given)!r} must have a key _target_, or be an import path such as pkg.mod:Name"
            )
        return instantiate(given, _convert_="all")
    if not isinstance(given, str):
        return given
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as ``python -m`` has it, and an installed command has not
    try:
        found = get_object(given.replace(":", "."))
    except Exception as error:
        raise ValueError(f"{what}={given!r} cannot be imported ({error}): give a path such as pkg.mod:Name") from error
    if not callable(found) or isinstance(found, LightningModule | LightningDataModule):
        return found
    try:
        return found()
    except TypeError as error:
        raise TypeError(
            f"{what}={given!r} cannot be made without arguments ({error}): name a function that makes it, or give"
            f" {what}={{_target_: ..., ...}} with arguments"
        ) from error


def load_module(given: Any) -> LightningModule:
    """Returns a new LightningModule.

    Raises:
        TypeError, ValueError: it cannot be imported or made, or is something else.
    """
    module = _named("module", given)
    if not isinstance(module, LightningModule):
        raise TypeError(f"module={given!r} is a {type(module).__name__}; it must be a LightningModule")
    return module


def load_data(given: Any, *, name: str = "data") -> Any:
    """Returns a new LightningDataModule, DataLoader or Dataset; None: the module brings its own.

    Args:
        given: import path, node, or one of these.
        name: how messages call it.

    Raises:
        TypeError, ValueError: it cannot be imported or made, or is something else.
    """
    if given is None:
        return None
    data = _named(name, given)
    if not isinstance(data, LightningDataModule | DataLoader | Dataset):
        kinds = "a LightningDataModule, a DataLoader or a Dataset"
        raise TypeError(f"{name}={given!r} is a {type(data).__name__}; it must be {kinds}")
    return data


def quiet_trainer(**options: Any) -> Trainer:
    """Returns a Trainer that writes and shows nothing."""
    quiet_loggers()
    return Trainer(
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, **options,
    )  # fmt: skip


class _SeenError(Exception):
    """Ends the fit when what was wanted is known."""


def before_first_batch(
    module: LightningModule, data: Any, look: Callable[[Trainer, LightningModule], T], **options: Any
) -> T:
    """Returns what ``look`` returns when the user's hooks have set up a fit; nothing is trained.

    Args:
        module, data: the user's, see `load_data`.
        look: is given the Trainer and the module.
        options: of the Trainer.

    Raises:
        ValueError: the loader yields nothing.
    """
    seen: list[T] = []

    def look_once(trainer: Trainer, pl_module: LightningModule) -> None:
        seen.append(look(trainer, pl_module))
        raise _SeenError

    if isinstance(data, Dataset):
        data = DataLoader(data, batch_size=_USUAL_BATCH, shuffle=True)
    given: dict[str, Any] = {"datamodule" if isinstance(data, LightningDataModule) else "train_dataloaders": data}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = quiet_trainer(callbacks=[LambdaCallback(on_train_start=look_once)], **options)
        try:
            trainer.fit(module, **given)
        except _SeenError:
            return seen[0]
    raise ValueError("the train loader yields no batch: there is nothing to measure the module with")


def profile_module(
    module: LightningModule, data: Any, *, backbone: Any = None, accelerator: str = "auto", precision: Any = "32-true"
) -> Profile:
    """Measures a module's own training step on one device of this machine; nothing is trained.

    Args:
        module: the user's.
        data: see `load_data`.
        backbone: see `HeteroPipelineStrategy`.
        accelerator, precision: as in ``Trainer``.

    Raises:
        TypeError, ValueError: there is no DataLoader, or it yields nothing.
        RuntimeError: the step fails.
    """

    def profile(trainer: Trainer, module: LightningModule) -> Profile:
        loader: Any = compat.train_source(trainer)

        def measured(layers: Any) -> ModelCost:
            step = Rehearsal(
                module=module, backbone=layers, found=backbone is None, device=trainer.strategy.root_device,
                loader=loader, optimizers=trainer.optimizers, to_device=partial(compat.batch_to_device, trainer),
                context=trainer.precision_plugin.train_step_context,
            )  # fmt: skip
            return measure_model(step, micro_batch_size=None, checkpoint_layers=False)[0]

        layers = find_layers(module, backbone)
        try:
            model = measured(layers)
        except (NotAChainError, NeverCalledError) as error:
            layers = undivided(module, f"the layers that were found cannot be divided: {error}")
            model = measured(layers)
        whole = isinstance(layers, Undivided)
        return Profile(
            model=model, spans=() if whole else tuple(tied_spans(module, layers)),
            batch_size=getattr(loader, "batch_size", None),
            undivided=layers.reason if isinstance(layers, Undivided) else "",
        )  # fmt: skip

    return before_first_batch(
        module, data, profile, accelerator=accelerator, devices=1, precision=precision, max_epochs=1
    )
