"""The loaders a fit trains and validates on, and how Lightning would change them (layer L).

Where a fit stands, by the loops' own counters, and counting what a rank did not do itself.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lightning_hetero.lightning_compat.patches import replace_methods


def train_loaders(trainer: Trainer) -> list[Any]:
    """The processed train loaders in order. Public ``trainer.train_dataloader`` gives them in the user's nesting."""
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else list(combined.flattened)


def train_source(trainer: Trainer) -> Any:
    """The user's train loader as given, or as ``train_dataloader()`` makes it, before the Trainer has set it up.

    ``trainer.train_dataloader`` is the loader in use; before training starts no loader is.
    """
    return trainer.fit_loop._data_source.dataloader()


def watch_train_source(trainer: Trainer, told: Callable[[list[Any]], None]) -> Callable[[], None]:
    """Tells the user's train loaders, all that are trained on at once, before the first is set up; returns undo.

    The hook for strategies, ``process_dataloader``, sees one at a time.
    """
    source = trainer.fit_loop._data_source
    original = source.dataloader

    def dataloader() -> Any:
        given = original()
        combined = given if isinstance(given, CombinedLoader) else CombinedLoader(given)
        told(list(combined.flattened))
        return given

    return replace_methods(source, dataloader=dataloader)


def val_loaders(trainer: Trainer) -> list[Any]:
    """The processed validation loaders of a fit in order."""
    combined = trainer.fit_loop.epoch_loop.val_loop._combined_loader
    return [] if combined is None else list(combined.flattened)


def count_val_batches(trainer: Trainer, *, begin: bool = False) -> None:
    """Takes note that the validation loaders have changed their lengths; Lightning asks for them once.

    Args:
        begin: within ``on_validation_start``: begin this validation with the new lengths, too.
    """
    from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches

    loop = trainer.fit_loop.epoch_loop.val_loop
    limit = trainer.limit_val_batches
    lengths = [sized_len(loader) for loader in val_loaders(trainer)]
    loop._max_batches = [
        _parse_num_batches(RunningStage.VALIDATING, math.inf if length is None else length, limit)
        for length in lengths
    ]
    if begin:
        loop.reset()


def fetch_limit(trainer: Trainer) -> float:
    """Batches of an epoch that the training loop fetches at most (``limit_train_batches``); inf without a limit.

    Not always ``num_training_batches``, which `StochasticWeightAveraging` raises by one for its last epoch.
    """
    combined = trainer.fit_loop._combined_loader
    limits = None if combined is None else combined.limits
    return min(limits, default=math.inf) if limits else math.inf


def fetch_singly(trainer: Trainer) -> None:
    """Has the training loop fetch no batch ahead of the one that it trains, though their number is not known.

    `last_is_fetched` then says which is the last. To be called while it makes an iterator of the train loader.
    """
    fetcher: Any = trainer.fit_loop._data_fetcher
    fetcher.prefetch_batches = 0


def last_is_fetched(trainer: Trainer) -> None:
    """The batch that the training loop fetches now is the epoch's last."""
    fetcher: Any = trainer.fit_loop._data_fetcher
    fetcher.done = True


def is_train_iterator(trainer: Trainer, iterator: object) -> bool:
    """Whether the training loop fetches from this iterator of a train loader, or somebody else looks at its batches."""
    combined = trainer.fit_loop._combined_loader
    running = None if combined is None else combined._iterator
    return running is not None and any(iterator is i for i in running.iterators)


def keep_train_sampler(trainer: Trainer) -> Callable[[], None]:
    """Stops Lightning from rebuilding *train* loaders with a `DistributedSampler`; returns the undo function.

    The strategy divides the global batch itself. Rebuilding would lose custom batch samplers and fails for DataLoader
    subclasses with required arguments; the hook for strategies, ``process_dataloader``, runs only afterwards.
    """
    connector = trainer._data_connector
    original = type(connector)._prepare_dataloader

    def prepare(self: Any, dataloader: object, shuffle: bool, mode: RunningStage) -> object:
        if mode == RunningStage.TRAINING:
            return dataloader
        return original(self, dataloader, shuffle, mode)

    return replace_methods(connector, _prepare_dataloader=types.MethodType(prepare, connector))


def stock_train_loader(trainer: Trainer, loader: object) -> object:
    """Returns the train loader as stock DDP reads it, whatever `keep_train_sampler` has put aside.

    Raises:
        TypeError, MisconfigurationException: Lightning's own, where it cannot give the loader a `DistributedSampler`.
    """
    connector = trainer._data_connector
    return type(connector)._prepare_dataloader(connector, loader, True, RunningStage.TRAINING)


def uses_distributed_sampler(trainer: Trainer) -> bool:
    """The Trainer's ``use_distributed_sampler`` argument; kept only on a private connector."""
    return bool(trainer._accelerator_connector.use_distributed_sampler)


def uses_dataloader_iter(trainer: Trainer) -> bool:
    """Whether ``training_step`` takes a ``dataloader_iter`` and fetches batches itself."""
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

    step = trainer.lightning_module.training_step
    return is_param_in_hook_signature(step, "dataloader_iter", explicit=True)


def overfits(trainer: Trainer) -> bool:
    """Whether ``overfit_batches`` is on; public, set by a connector."""
    return bool(trainer.overfit_batches)  # pyright: ignore[reportAttributeAccessIssue]


def epoch_running(trainer: Trainer) -> int:
    """Epoch being trained; the value Lightning itself gives to samplers' ``set_epoch``."""
    return _processed(trainer.fit_loop.epoch_progress.current)


def upcoming_batch(trainer: Trainer) -> int:
    """Index inside the epoch of the batch that is fetched next, once the loop runs (settled after a resume)."""
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready


def batches_trained(trainer: Trainer) -> int:
    """Batches of the running epoch already trained on, right also before the loop has settled a resume."""
    return _processed(trainer.fit_loop.epoch_loop.batch_progress.current)


def batches_of_all_epochs(trainer: Trainer) -> int:
    """Batches trained since the first epoch, also before a resume; those that yielded None count."""
    return _processed(trainer.fit_loop.epoch_loop.batch_progress.total)


def _processed(tracker: Any) -> int:
    """A count of these trackers that the class they are declared as does not have."""
    return tracker.processed


def behind_the_epoch(trainer: Trainer) -> bool:
    """Whether all batches of the epoch are trained; the loop goes on there if ``max_steps`` ended the run before."""
    return upcoming_batch(trainer) >= trainer.num_training_batches


def last_batch_done(trainer: Trainer) -> bool:
    """Whether the checkpoint or the loop stands behind the last batch of an epoch."""
    return trainer.fit_loop.epoch_loop.batch_progress.is_last_batch


def is_last_prediction(trainer: Trainer) -> bool:
    """Whether the batch that the prediction loop has fetched is its last."""
    return getattr(trainer.predict_loop.batch_progress, "is_last_batch", False)  # set by the loop on each batch


def step_limit(trainer: Trainer) -> int | None:
    """Optimizer steps still allowed by ``max_steps``; None without a limit."""
    limit = trainer.fit_loop.epoch_loop.max_steps
    return None if limit < 0 else max(0, limit - trainer.global_step)


def logging_step(trainer: Trainer) -> int:
    """The step that Lightning gives to loggers for the batch that runs; public ``global_step`` is one more at a batch's
    end, and counts each optimizer in manual optimization. Once a batch is over, it is the next one's."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def accumulates_now(trainer: Trainer) -> bool:
    """Whether the batch that is running only accumulates gradients."""
    return trainer.fit_loop._should_accumulate()


def zeroes_now(trainer: Trainer) -> bool:
    """Whether the loop is about to zero the gradients in the running batch: the first one of an accumulation window."""
    return trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0


def count_started(trainer: Trainer) -> None:
    """Counts a batch as started, as Lightning does not for None. Otherwise it takes a checkpoint of this batch for one
    from the middle of a batch, and the resumed run makes the batch a second time."""
    trainer.fit_loop.epoch_loop.batch_progress.increment_started()


def count_step(trainer: Trainer) -> None:
    """Counts an optimizer step that was made elsewhere, so that ``global_step`` and what follows from it agree."""
    step = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step
    step.increment_ready()
    step.increment_completed()


@contextmanager
def steps_uncounted(trainer: Trainer) -> Iterator[None]:
    """Inside, the steps of manual optimization do not count: they belong to a batch already counted."""
    progress = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
    with ExitStack() as stack:
        for tracker in (progress.total, progress.current):
            stack.callback(vars(tracker).update, ready=tracker.ready, completed=tracker.completed)
        yield


def resume_from(trainer: Trainer, checkpoint: str) -> None:
    """Lets the fit that has begun resume from ``checkpoint``, not its own ``ckpt_path``; its ``weights_only`` holds."""
    connector = trainer._checkpoint_connector
    original = connector.resume_start

    def resume_start(checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> None:
        put_back()
        original(checkpoint, *args, **kwargs)

    put_back = replace_methods(connector, resume_start=resume_start)


def write_checkpoint(trainer: Trainer, path: str) -> None:
    """As `Trainer.save_checkpoint`, without the barrier behind it, at which the others wait for one that fails."""
    trainer.strategy.save_checkpoint(trainer._checkpoint_connector.dump_checkpoint(), path)
