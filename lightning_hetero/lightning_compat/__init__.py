"""Every private name of Lightning and torchmetrics we need, in one place (layer L).

``progress``  the loops' counters: where a fit stands, what counts as a batch or a step
``loaders``   the loaders of a fit, and how Lightning would change them
``results``   values logged and metrics updated: what counts in them
``logs``      ``self.log`` diverted and made again, metrics combined over some of the ranks
``batches``   what the loop does with one batch, and the callbacks it calls

Each function says what it reads, why no public way exists, and which test pins it to the installed versions
(`tests/ranks/test_lightning_compat.py`). Verified with Lightning 2.5 and 2.6.
"""

from __future__ import annotations

from lightning_hetero.lightning_compat.batches import (
    averaged_weights,
    averaging_callbacks,
    call_training_step,
    collect_clipping,
    replace_sigterm_broadcast,
    run_again,
    skip_empty_batches,
    stop_sigterm_broadcast,
    trainer_callbacks,
)
from lightning_hetero.lightning_compat.loaders import (
    count_val_batches,
    is_train_iterator,
    keep_train_sampler,
    overfits,
    train_loaders,
    train_source,
    uses_dataloader_iter,
    uses_distributed_sampler,
    val_loaders,
)
from lightning_hetero.lightning_compat.logs import (
    combine_metric_with,
    divert_logs,
    log_again,
    logged_reduction,
    results_of,
    running_hook,
    size_of_batch,
)
from lightning_hetero.lightning_compat.progress import (
    accumulates_now,
    batches_of_all_epochs,
    batches_trained,
    count_started,
    count_step,
    epoch_running,
    last_batch_done,
    resume_from,
    step_limit,
    steps_uncounted,
    upcoming_batch,
    zeroes_now,
)
from lightning_hetero.lightning_compat.results import (
    as_batch,
    batch_results_open,
    dummy_batch_unlogged,
    log_interval,
    metrics_frozen,
    reduced_names,
    unlogged,
)

__all__ = [
    "accumulates_now",
    "as_batch",
    "averaged_weights",
    "averaging_callbacks",
    "batch_results_open",
    "batches_of_all_epochs",
    "batches_trained",
    "call_training_step",
    "collect_clipping",
    "combine_metric_with",
    "count_started",
    "count_step",
    "count_val_batches",
    "divert_logs",
    "dummy_batch_unlogged",
    "epoch_running",
    "is_train_iterator",
    "keep_train_sampler",
    "last_batch_done",
    "log_again",
    "log_interval",
    "logged_reduction",
    "metrics_frozen",
    "overfits",
    "reduced_names",
    "replace_sigterm_broadcast",
    "results_of",
    "resume_from",
    "run_again",
    "running_hook",
    "size_of_batch",
    "skip_empty_batches",
    "step_limit",
    "steps_uncounted",
    "stop_sigterm_broadcast",
    "train_loaders",
    "train_source",
    "trainer_callbacks",
    "unlogged",
    "upcoming_batch",
    "uses_dataloader_iter",
    "uses_distributed_sampler",
    "val_loaders",
    "zeroes_now",
]
