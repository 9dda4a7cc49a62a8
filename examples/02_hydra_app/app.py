"""An application of its own that borrows one thing: the config group ``strategy``.

`conf/` here has no folder ``strategy``; Hydra finds the group because lightning-hetero is installed
(``pip install -e .`` in a checkout will do).

    python examples/02_hydra_app/app.py                            # hetero_balanced, from conf/config.yaml
    python examples/02_hydra_app/app.py strategy=ddp
    python examples/02_hydra_app/app.py strategy.predictor=ewma
"""

from __future__ import annotations

import hydra
from hydra.utils import instantiate
from lightning.pytorch import Trainer, seed_everything
from omegaconf import DictConfig

from lightning_hetero.demo import DigitsCNN, DigitsData


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    seed_everything(cfg.seed, verbose=False)
    trainer = Trainer(
        **cfg.trainer,
        strategy=instantiate(cfg.strategy, _convert_="all"),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(DigitsCNN(lr=cfg.lr), datamodule=DigitsData(batch_size=cfg.batch_size))
    if trainer.is_global_zero:
        accuracy = float(trainer.callback_metrics["val_acc"])
        print(f"{type(trainer.strategy).__name__}: val_acc {accuracy:.3f}")


if __name__ == "__main__":
    main()
