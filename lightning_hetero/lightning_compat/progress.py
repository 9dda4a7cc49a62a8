"""Where a fit stands, by the loops' own counters, and counting what a rank did not do itself (layer L)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Trainer

from lightning_hetero.lightning_compat.patches import replace_methods


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
    before = [(p, p.ready, p.completed) for p in (progress.total, progress.current)]
    try:
        yield
    finally:
        for tracker, ready, completed in before:
            tracker.ready, tracker.completed = ready, completed


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
