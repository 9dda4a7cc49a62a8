"""What somebody looks for who trains with ``strategy="ddp"``: the rows of docs/reference/drop_in.md, by key.

Lightning's public names are in the rows between backticks, ``*`` for the rest of a name: a flag, hook, callback, logger
or profiler that is in no row fails the build (tests/docs/test_drop_in.py), so a new one is noticed. `ELSEWHERE` has
those that have nothing to do with the strategy, or cannot be tried without another machine or account.
"""

from __future__ import annotations

ROWS = """
# Arguments of the Trainer
accelerator: `accelerator` (tested on CPUs; [what ran on a GPU](gpu.md))
strategy: `strategy` as an object or as a name, with each suffix that `ddp` has
devices: `devices`, `num_nodes`, also with another number of devices on each node
max_epochs: `max_epochs`, `min_epochs`, `max_steps`, `min_steps`, `max_time`
limit_batches: `limit_train_batches`, `limit_val_batches`, `limit_test_batches`, `limit_predict_batches`
fast_dev_run: `fast_dev_run`
overfit_batches: `overfit_batches`
val_check_interval: `val_check_interval`, `check_val_every_n_epoch`, `num_sanity_val_steps`
log_every_n_steps: `log_every_n_steps`
default_root_dir: `default_root_dir`, `enable_checkpointing`, `enable_progress_bar`, `enable_model_summary`
accumulate_grad_batches: `accumulate_grad_batches`
gradient_clip_val: `gradient_clip_val`, `gradient_clip_algorithm` (by norm, by value)
precision_mixed: `precision="bf16-mixed"`, `"16-mixed"`
precision_mixed_manual: `precision="16-mixed"` with manual optimization
precision_true: `precision="bf16-true"`, `"64-true"`
deterministic: `deterministic`, `benchmark`, `detect_anomaly`, `inference_mode=False`
barebones: `barebones`
use_distributed_sampler: `use_distributed_sampler=False`, where each rank reads its own data
plugins: `plugins`: a cluster environment, a `CheckpointIO` (`AsyncCheckpointIO`)
sync_batchnorm: `sync_batchnorm=True`, layers of SyncBatchNorm
reload_dataloaders: `reload_dataloaders_every_n_epochs`, also with another batch size or number of samples
enable_autolog_hparams: `enable_autolog_hparams`, `save_hyperparameters()`
callbacks: `callbacks`: your own subclasses of `Callback`
logger: `logger`: your own `Logger` or another (`WandbLogger`, `MLFlowLogger`, `CometLogger`, `LitLogger`) is
  given the same values
profiler: `profiler`: `SimpleProfiler`, `AdvancedProfiler`, `PyTorchProfiler`

# Arguments of DDPStrategy
find_unused_parameters: `find_unused_parameters=True`, for parameters that not every loss uses
static_graph: `static_graph`, `gradient_as_bucket_view`, `bucket_cap_mb`
ddp_comm_hook: `ddp_comm_hook`, `ddp_comm_state`, `ddp_comm_wrapper`
model_averaging_period: `model_averaging_period` (post-localSGD)

# Hooks
hooks_setup: `setup`, `teardown`, `configure_model`, `configure_optimizers`, `configure_callbacks`, `on_fit_start`,
  `on_fit_end`
prepare_data: `prepare_data`, on each node or on the first only
hooks_train: `on_train_start`, `on_train_epoch_start`, `on_train_batch_start`, `on_train_batch_end`,
  `on_train_epoch_end`, `on_train_end`
hooks_evaluation: `on_validation_*`, `on_test_*`, `on_predict_*`, `on_sanity_check_*`
hooks_step: `on_before_backward`, `on_after_backward`, `on_before_optimizer_step`, `on_before_zero_grad`,
  `optimizer_step`, `optimizer_zero_grad`, `configure_gradient_clipping`, `lr_scheduler_step`
hooks_loaders: `train_dataloader`, `val_dataloader`, `test_dataloader`, `predict_dataloader`
hooks_transfer: `on_before_batch_transfer`, `transfer_batch_to_device`, `on_after_batch_transfer`
hooks_transfer_rows: batch transfer hooks that change how many rows a batch has
hooks_checkpoint: `on_save_checkpoint`, `on_load_checkpoint`, `state_dict`, `load_state_dict`
backward: your own `backward`
batch_argument: the `batch` that `on_train_batch_start` and `on_train_batch_end` are given
outputs_argument: the `outputs` that `on_train_batch_end` is given, besides the loss
epoch_ended: epochs that end early or are added (`on_train_batch_start` returns -1, `trainer.should_stop`,
  `max_epochs` set in a hook)
exceptions: your exceptions, which leave `trainer.fit` as they were raised; `on_exception`; Ctrl-C

# Callbacks of Lightning
ModelCheckpoint: `ModelCheckpoint` by value, by steps or by time, `save_last`, `save_weights_only`; `Checkpoint`
EarlyStopping: `EarlyStopping` on a value of training or of validation
LearningRateMonitor: `LearningRateMonitor`, `DeviceStatsMonitor`
ProgressBar: `TQDMProgressBar`, `RichProgressBar`, `ProgressBar`
ModelSummary: `ModelSummary`, `RichModelSummary`
Timer: `Timer`
LambdaCallback: `LambdaCallback`
GradientAccumulationScheduler: `GradientAccumulationScheduler`
LearningRateFinder: `LearningRateFinder`
BatchSizeFinder: `BatchSizeFinder`
StochasticWeightAveraging: `StochasticWeightAveraging`
StochasticWeightAveraging_norm: `StochasticWeightAveraging` of a module with BatchNorm
WeightAveraging: `WeightAveraging`, `EMAWeightAveraging`
BaseFinetuning: `BaseFinetuning`: layers frozen at first, trained later
BackboneFinetuning: `BackboneFinetuning`
ModelPruning: `ModelPruning`
BasePredictionWriter: `BasePredictionWriter`
OnExceptionCheckpoint: `OnExceptionCheckpoint`
SpikeDetection: `SpikeDetection`
ThroughputMonitor: `ThroughputMonitor`

# Logging and metrics
loggers: `CSVLogger`, `TensorBoardLogger`
log_epoch: `self.log(..., on_epoch=True)`: the mean over all samples
log_step: `self.log(..., on_step=True, sync_dist=True)`: the mean over the global batch
log_anywhere: `self.log` and `self.log_dict` in any hook, and with several validation loaders
torchmetrics: torchmetrics, `MetricCollection`, `MetricTracker`, your own metrics, `dist_sync_on_step`
metric_kept: metrics that are never reset
all_gather_hook: `self.all_gather`, `torch.distributed` in hooks that every rank runs
all_gather_step: `self.all_gather`, `torch.distributed` in `training_step`
kept_by_steps: sums, counts and lists that `training_step` keeps on the module, read when an epoch ends
calls_counted: `training_step` counts its own calls
rank_zero: `self.trainer.is_global_zero`, `rank_zero_only` in `training_step`

# Optimization
optimizers: optimizers that treat each parameter separately (SGD, Adam, LARS, Adafactor); groups of parameters
schedulers: several learning rate schedulers, stepped per batch or per epoch
plateau_epoch: `ReduceLROnPlateau` at the end of an epoch or of a validation
plateau_step: `ReduceLROnPlateau` in every step
manual: manual optimization, several optimizers, `toggle_optimizer`
manual_backward: `loss.backward()` instead of `self.manual_backward(loss)`
no_optimizer: `configure_optimizers` returns none
closures: optimizers that call their closure several times per step (SAM)
optimizer_norm: optimizers with a norm over all gradients (LAMB's first step)
lbfgs: `torch.optim.LBFGS`
zero: `ZeroRedundancyOptimizer`
lookahead: optimizers around another one, with their own weights (Lookahead)
schedule_free: optimizers that swap the weights for evaluation
optimizer_state: the optimizer's state is read, reset or replaced during the fit
rates_in_hooks: learning rates, clipping and attributes of layers, set in a hook
rates_in_step: learning rates and attributes of layers, set in `training_step`
gradients_linear: gradients that a hook scales, masks or centres
gradients_clipped: `clip_grad_norm_` called in a hook
gradients_of_gradients: `torch.autograd.grad` through the network in `training_step` (gradient penalties, MAML)

# Models
layers: models that are not a sequence of layers
batchnorm: BatchNorm
frozen_norm: BatchNorm kept in evaluation mode; `torch.utils.checkpoint`
tied: layers that share a weight
parametrized: weight_norm, hooks on parameters, learned weights of losses
token_means: losses that are means over tokens, with `batch_weight`
row_state: a state for each row, kept from batch to batch
forward_hooks: forward hooks that keep what a layer returns
layers_in_hooks: layers called in a hook, such as predictions at the end of an epoch
copies: a frozen copy of the network, made in a hook
moving_average: a teacher or target network that follows by a moving average
weights_set_batch: weights that a hook changes between batches (clamping, normalising)
weights_set_epoch: weights that are set or loaded between epochs
buffers_set: buffers that are set in a hook
parameters_asked: devices and sizes of parameters, asked for in a hook

# Data
workers: `num_workers`, `persistent_workers`, `worker_init_fn`, `collate_fn`
samplers: your own samplers, `WeightedRandomSampler`
batch_sampler: your own `batch_sampler`
batch_kinds: batches that are dictionaries, dataclasses or your own objects
subclasses: subclasses of DataLoader with their own arguments
time_major: batches whose first dimension is not that of the samples; lists of images
left_out: a `collate_fn` that leaves samples out
iterable: `IterableDataset`
no_dataloader: train loaders that are not a DataLoader
train_loaders: several train loaders (`CombinedLoader`)
dataloader_iter: `training_step(self, dataloader_iter)`
data_state: the state of a data set or sampler, set in `on_train_epoch_start`

# Checkpoints and evaluation
from_ddp: continue a checkpoint of DDP
to_ddp: DDP continues a checkpoint of the engine
other_devices: continue on another number of devices
ckpt_path: `ckpt_path="best"` and `"last"`, `load_from_checkpoint`
entry_points: `fit`, `validate`, `test` and `predict` in turn with one Trainer

# Launching
popen: a script started once per node, which starts the other processes
spawn: `_spawn`, `_fork` and `_notebook` behind the strategy's name
torchrun: `torchrun`
slurm: SLURM (`srun`)
slurm_signal: SLURM's signal before the time is over: the job saves and is queued again

# On one device
one_device: everything that DDP takes on one device, such as LBFGS, iterable datasets, communication hooks
"""

ELSEWHERE = {
    "model_registry": "uploads checkpoints to Lightning's own service, whatever the strategy",
    "XLAProfiler": "of TPUs",
    "PassThroughProfiler": "does nothing",
    "Profiler": "the base of the others",
    "configure_sharded_model": "the old name of `configure_model`",
    "state_key": "names a callback's state in a checkpoint",
}


def features() -> dict[str, dict[str, str]]:
    """Returns {group: {key: what a reader sees}}.

    Raises:
        ValueError: a row is there twice, or says nothing.
    """
    found: dict[str, dict[str, str]] = {}
    texts: dict[str, str] = {}
    for line in filter(None, ROWS.replace("\n  ", " ").splitlines()):
        if line.startswith("# "):
            found[line[2:]] = group = {}
            continue
        key, colon, text = line.partition(": ")
        if not (colon and text) or key in texts or text in texts.values():
            raise ValueError(f"the row {line!r} must be 'key: text', neither of them twice")
        texts[key] = group[key] = text
    return found
