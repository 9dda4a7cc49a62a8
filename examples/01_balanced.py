"""Four devices of unequal speed, stock DDP against the balanced strategy, in a plain Lightning script.

The devices are emulated, so this runs on any CPU: two at full speed, one at half, one at a quarter.

    python examples/01_balanced.py          # stock DDP: everybody waits for the slowest
    python examples/01_balanced.py --hetero # the same training, shares fitted to the speeds
"""

from __future__ import annotations

import sys

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import Timer

from lightning_hetero import LoadBalancedStrategy, Scenario
from lightning_hetero.callbacks import ThrottleCallback
from lightning_hetero.demo import DigitsCNN, DigitsData


def main() -> None:
    seed_everything(0, verbose=False)
    torch.set_num_threads(1)
    scenario = Scenario(speeds=[1.0, 1.0, 0.5, 0.25], sample_s=0.002)
    timer = Timer()
    trainer = Trainer(
        strategy=LoadBalancedStrategy()
        if "--hetero" in sys.argv
        else "ddp",  # the only line that changes
        accelerator="cpu",
        devices=4,
        max_epochs=2,
        callbacks=[ThrottleCallback(scenario), timer],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(DigitsCNN(), datamodule=DigitsData(batch_size=16))
    if trainer.is_global_zero:
        accuracy = float(trainer.callback_metrics["val_acc"])
        print(
            f"{type(trainer.strategy).__name__}: {trainer.global_step} steps "
            f"in {timer.time_elapsed('train'):.1f} s, val_acc {accuracy:.3f}"
        )


if __name__ == "__main__":
    main()
