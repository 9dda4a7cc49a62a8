"""Every private name of Lightning and torchmetrics we need, in one place (layer L).

``progress``       the loops' counters: where a fit stands, what counts as a batch or a step
``loaders``        the loaders of a fit, and how Lightning would change them
``results``        values logged and metrics updated: what counts in them
``logs``           ``self.log`` diverted and made again, metrics combined over some of the ranks
``norms``          norms of gradients that torch and Lightning are asked for
``batches``        what the loop does with one batch, and the callbacks it calls
``empty_batches``  batches that are None, and which hooks hear of them
``launchers``      launchers that let a run go on without a process that was killed; import them from there
``patches``        an attribute of an instance replaced for a while; likewise
``transfer``       a batch's way to the device

Each function says what it reads, why no public way exists, and which test pins it to the installed versions
(`tests/ranks/lightning_compat`). Verified with Lightning 2.5 and 2.6.
"""

from __future__ import annotations

from lightning_hetero.lightning_compat.batches import (
    averaged_weights,
    averaging_callbacks,
    call_training_step,
    collect_clipping,
    defer_requeue,
    manual_outputs,
    module_attributes,
    note_sigterm,
    outputs_of,
    raise_sigterm,
    replace_sigterm_broadcast,
    requeues,
    run_again,
    stop_sigterm_broadcast,
    trainer_callbacks,
    wrap_training,
)
from lightning_hetero.lightning_compat.empty_batches import finds_learning_rate, skip_empty_batches
from lightning_hetero.lightning_compat.loaders import (
    count_val_batches,
    fetch_limit,
    is_train_iterator,
    keep_train_sampler,
    overfits,
    stock_train_loader,
    train_loaders,
    train_source,
    uses_dataloader_iter,
    uses_distributed_sampler,
    val_loaders,
    watch_train_source,
)
from lightning_hetero.lightning_compat.logs import (
    combine_metric_with,
    divert_logs,
    forget_computed,
    log_again,
    logged_reduction,
    results_of,
    running_hook,
    size_of_batch,
)
from lightning_hetero.lightning_compat.norms import norms_by
from lightning_hetero.lightning_compat.progress import (
    accumulates_now,
    batches_of_all_epochs,
    batches_trained,
    behind_the_epoch,
    count_started,
    count_step,
    epoch_running,
    is_last_prediction,
    last_batch_done,
    logging_step,
    resume_from,
    step_limit,
    steps_uncounted,
    upcoming_batch,
    write_checkpoint,
    zeroes_now,
)
from lightning_hetero.lightning_compat.results import (
    as_batch,
    batch_results_open,
    dummy_batch_unlogged,
    log_interval,
    metrics_frozen,
    metrics_of,
    reduced_names,
    save_logs,
    save_metrics,
    show_on_progress_bar,
    unlogged,
    watch_epoch_values,
    weigh_logs,
)
from lightning_hetero.lightning_compat.throughput import count_throughput
from lightning_hetero.lightning_compat.transfer import batch_to_device

__all__ = [
    "accumulates_now",
    "as_batch",
    "averaged_weights",
    "averaging_callbacks",
    "batch_results_open",
    "batch_to_device",
    "batches_of_all_epochs",
    "batches_trained",
    "behind_the_epoch",
    "call_training_step",
    "collect_clipping",
    "combine_metric_with",
    "count_started",
    "count_step",
    "count_throughput",
    "count_val_batches",
    "defer_requeue",
    "divert_logs",
    "dummy_batch_unlogged",
    "epoch_running",
    "fetch_limit",
    "finds_learning_rate",
    "forget_computed",
    "is_last_prediction",
    "is_train_iterator",
    "keep_train_sampler",
    "last_batch_done",
    "log_again",
    "log_interval",
    "logged_reduction",
    "logging_step",
    "manual_outputs",
    "metrics_frozen",
    "metrics_of",
    "module_attributes",
    "norms_by",
    "note_sigterm",
    "outputs_of",
    "overfits",
    "raise_sigterm",
    "reduced_names",
    "replace_sigterm_broadcast",
    "requeues",
    "results_of",
    "resume_from",
    "run_again",
    "running_hook",
    "save_logs",
    "save_metrics",
    "show_on_progress_bar",
    "size_of_batch",
    "skip_empty_batches",
    "step_limit",
    "steps_uncounted",
    "stock_train_loader",
    "stop_sigterm_broadcast",
    "train_loaders",
    "train_source",
    "trainer_callbacks",
    "unlogged",
    "upcoming_batch",
    "uses_dataloader_iter",
    "uses_distributed_sampler",
    "val_loaders",
    "watch_epoch_values",
    "watch_train_source",
    "weigh_logs",
    "wrap_training",
    "write_checkpoint",
    "zeroes_now",
]
