"""The strategy from Lightning's own command line (needs ``pip install 'jsonargparse[signatures]'``).

    python examples/03_lightning_cli.py fit \
        --trainer.accelerator=cpu --trainer.devices=2 --trainer.max_epochs=1 \
        --trainer.strategy=lightning_hetero.LoadBalancedStrategy --trainer.strategy.global_batch_size=64

``fit --help`` lists every option of trainer, model and data; a YAML file with the same keys works as well:
``fit --config run.yaml``.
"""

from __future__ import annotations

from lightning.pytorch.cli import LightningCLI

from lightning_hetero.demo import DigitsCNN, DigitsData


def main() -> None:
    LightningCLI(DigitsCNN, DigitsData, seed_everything_default=0, save_config_callback=None)


if __name__ == "__main__":
    main()
