r"""An application of its own, laid out like lightning-hydra-template; nothing in it is ours but the model and the data.

Hydra finds the group ``hetero`` because lightning-hetero is installed (``pip install -e .`` in a checkout will do).
This app reads its strategy from ``trainer.strategy``, so that is where it goes:

    python examples/02_hydra_app/app.py trainer=ddp                                    # stock DDP, as the app has it
    python examples/02_hydra_app/app.py trainer=ddp trainer.strategy=hetero_balanced   # by name
    python examples/02_hydra_app/app.py trainer=ddp +hetero/strategy@trainer.strategy=hetero_balanced \
        trainer.strategy.dead_band=0.05                                                # with arguments
    python examples/02_hydra_app/app.py trainer=ddp +hetero/emulation@callbacks.throttle=one_straggler   # a straggler
"""

from __future__ import annotations

import hydra
from hydra.utils import instantiate
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from omegaconf import DictConfig


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def main(cfg: DictConfig) -> None:
    seed_everything(cfg.seed, verbose=False)
    model: LightningModule = instantiate(cfg.model)
    data: LightningDataModule = instantiate(cfg.data)
    callbacks: list[Callback] = [instantiate(callback) for callback in cfg.callbacks.values()]
    trainer: Trainer = instantiate(cfg.trainer, callbacks=callbacks, logger=False)
    trainer.fit(model, datamodule=data)
    if trainer.is_global_zero:
        accuracy = float(trainer.callback_metrics["val_acc"])
        print(f"{type(trainer.strategy).__name__}: val_acc {accuracy:.3f}")


if __name__ == "__main__":
    main()
