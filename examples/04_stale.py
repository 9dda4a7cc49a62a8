"""Four equal devices on a shared machine, one of which is lost: stock DDP against the parameter server.

Every device now and then gets a neighbour that makes it six times slower for a while, and in the second epoch rank 1
is killed (SIGKILL), as when a preempted machine goes. The devices are emulated, so this runs on any CPU.

    python examples/04_stale.py          # stock DDP: waits for whoever is slow, and ends with the lost rank
    python examples/04_stale.py --hetero # the same training: nobody is waited for, three ranks finish it
"""

from __future__ import annotations

import sys

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import Timer

from lightning_hetero import BoundedStalenessStrategy, Scenario
from lightning_hetero.callbacks import ThrottleCallback
from lightning_hetero.demo import DigitsCNN, DigitsData
from lightning_hetero.emulate import SlowSpells


def main() -> None:
    seed_everything(0, verbose=False)
    torch.set_num_threads(1)
    spells = SlowSpells(probability=0.03, factor=6.0, steps=8)
    scenario = Scenario(speeds=[1.0], sample_s=0.002, spells=spells).kill(1, at_step=30)
    timer = Timer()
    trainer = Trainer(
        strategy=BoundedStalenessStrategy() if "--hetero" in sys.argv else "ddp",  # the only line that changes
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
