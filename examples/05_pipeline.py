"""A small GPT that fits none of four unequal devices, divided into pipelines; and the same on one large device.

Two devices are fast, one is half and one a quarter as fast, and each has 6 MiB: the model needs more for its
parameters, gradients, optimizer state and activations. The devices are emulated, so this runs on any CPU.

    python examples/05_pipeline.py          # one device with enough memory, the whole batch
    python examples/05_pipeline.py --hetero # the same training on the four small ones
"""

from __future__ import annotations

import sys

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import Timer

from lightning_hetero import HeteroPipelineStrategy, Scenario
from lightning_hetero.callbacks import ThrottleCallback
from lightning_hetero.demo import CharTransformer, TopicsText

CLUSTER = {
    "devices": [
        {"name": "fast", "speed": 1.0, "mem": "6 MiB", "count": 2},
        {"name": "half", "speed": 0.5, "mem": "6 MiB"},
        {"name": "quarter", "speed": 0.25, "mem": "6 MiB"},
    ],
    "link": {"bandwidth": "10 Gbit/s", "latency": "50 us"},
}


def main() -> None:
    seed_everything(0, verbose=False)
    torch.set_num_threads(1)
    hetero = "--hetero" in sys.argv
    strategy = HeteroPipelineStrategy(backbone="blocks", cluster=CLUSTER, emulate_links=True)
    timer = Timer()
    trainer = Trainer(
        strategy=strategy if hetero else "ddp",  # the only line that changes
        accelerator="cpu",
        devices=4 if hetero else 1,
        max_epochs=1,
        callbacks=[ThrottleCallback(Scenario(speeds=[1.0, 1.0, 0.5, 0.25], sample_s=0.006)), timer],
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = TopicsText(batch_size=16 if hetero else 64, block_size=16, max_train_windows=640)  # per device: 64 per step
    trainer.fit(CharTransformer(layers=8, block_size=16), datamodule=data)
    if trainer.is_global_zero:
        perplexity = float(trainer.callback_metrics["val_perplexity"])
        seconds = timer.time_elapsed("train")
        name = type(trainer.strategy).__name__
        print(f"{name}: {trainer.global_step} steps in {seconds:.1f} s, val_perplexity {perplexity:.4f}")


if __name__ == "__main__":
    main()
