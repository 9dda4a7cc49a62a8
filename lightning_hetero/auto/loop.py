"""What Lightning's loop takes around a training step, whatever the step is (layer L)."""

from __future__ import annotations

import time
from itertools import pairwise
from statistics import median

from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities import rank_zero_only

from lightning_hetero.lightning_compat.patches import patched

_BARE = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "limit_val_batches")
_STEPS, _FIRST = 15, 5  # of the short fit, and how many of them do not count


def loop_s() -> float:
    """Returns the median time of a step of Lightning's `BoringModel`, which computes next to nothing, on the CPU [s].

    Draws from the generators of random numbers.
    """
    began_s = list[float]()
    noted = LambdaCallback(on_train_batch_start=lambda *_: began_s.append(time.perf_counter()))
    with patched(rank_zero_only, "rank", 1):  # so that it says nothing
        one, bare = LightningEnvironment(), dict.fromkeys(_BARE, False)
        trainer = Trainer(accelerator="cpu", devices=1, max_steps=_STEPS, plugins=[one], callbacks=[noted], **bare)
        trainer.fit(BoringModel())
    return median(b - a for a, b in pairwise(began_s[_FIRST:]))
