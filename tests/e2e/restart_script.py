"""What every rank of `test_restart` runs, engine by engine: rank 1 is killed in each, once; the next start resumes."""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import BoundedStalenessStrategy, FederatedStrategy, HeteroPipelineStrategy, LoadBalancedStrategy

FOLDER = Path.cwd()
DIES_AT = 7  # step
PLAN = {"groups": [{"ranks": [1, 0], "cuts": [0, 1, 3], "samples": 8, "micro_samples": 3}]}
STRATEGIES = {
    "balanced": lambda: LoadBalancedStrategy(max_samples=[3, 5]),
    "stale": lambda: BoundedStalenessStrategy(policy="bsp"),
    "pipeline": lambda: HeteroPipelineStrategy(backbone="net", plan=PLAN, controller=None),
    "federated": lambda: FederatedStrategy(local_steps=3, policy="fedavg"),
}


class Model(LightningModule):
    def __init__(self, engine):
        super().__init__()
        self.died = FOLDER / f"{engine}-died"
        torch.manual_seed(0)
        layers = [torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)]
        self.net = torch.nn.Sequential(*layers).double()

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.mse_loss(self.net(x), y)

    def on_train_batch_start(self, batch, batch_idx):
        if self.trainer.global_rank == 1 and self.trainer.global_step >= DIES_AT and not self.died.exists():
            self.died.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def fit(engine):
    x = torch.randn(100, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    module = Model(engine)
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=STRATEGIES[engine](), max_epochs=2, logger=False,
        callbacks=ModelCheckpoint(FOLDER / engine, every_n_train_steps=3, save_last=True), enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4), ckpt_path="last")
    return {"steps": trainer.global_step, "weights": [p.detach().flatten().tolist() for p in module.parameters()]}


if __name__ == "__main__":
    for engine in sys.argv[1:]:
        said = FOLDER / f"{engine}-rank{os.environ['RANK']}.json"
        if not said.exists():
            said.write_text(json.dumps(fit(engine)))
