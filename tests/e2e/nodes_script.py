"""What every rank of `test_nodes` runs: the engines, one after another; each rank writes what it ended with."""

import json
import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import BoundedStalenessStrategy, FederatedStrategy, HeteroPipelineStrategy, LoadBalancedStrategy

FOLDER = Path.cwd()
# one pipeline from node to node, one inside the first
PLAN = {
    "groups": [
        {"ranks": [0, 3], "cuts": [0, 2, 4], "samples": 10, "micro_samples": 4},
        {"ranks": [2, 1], "cuts": [0, 1, 4], "samples": 6, "micro_samples": 3},
    ]
}
STRATEGIES = {
    "balanced": lambda: LoadBalancedStrategy(max_samples=[2, 4, 5, 5]),
    "stale": lambda: BoundedStalenessStrategy(policy="bsp"),
    "pipeline": lambda: HeteroPipelineStrategy(backbone="net", plan=PLAN),
    "federated": lambda: FederatedStrategy(local_steps=3, policy="fedavg"),
}


def numbered(samples, seed):
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return TensorDataset(torch.arange(samples), x, x.sum(1, keepdim=True))


class Data(LightningDataModule):
    def __init__(self, per_node):
        super().__init__()
        self.prepare_data_per_node = per_node
        self.prepared = False

    def prepare_data(self):
        self.prepared = True

    def train_dataloader(self):
        return DataLoader(numbered(70, 0), batch_size=4)

    def val_dataloader(self):
        return DataLoader(numbered(24, 1), batch_size=2)


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layers = [torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)]
        self.net = torch.nn.Sequential(*layers).double()
        self.trained, self.validated, self.files = [], [], set()

    def training_step(self, batch, batch_idx):
        numbers, x, y = batch
        self.trained.append([self.current_epoch, batch_idx, numbers.tolist()])
        return torch.nn.functional.mse_loss(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        self.validated += batch[0].tolist()
        self.log("val", torch.nn.functional.mse_loss(self.net(batch[1]), batch[2]), sync_dist=True)

    def on_train_epoch_end(self):
        maps = Path("/proc/self/maps")
        for line in maps.read_text().splitlines() if maps.exists() else ():
            if "/memfd:lightning-hetero " in line:
                self.files.add("the server's memory")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(engine, devices):
    module, data = Model(), Data(per_node=engine != "pipeline")
    trainer = Trainer(
        accelerator="cpu", devices=devices, strategy=STRATEGIES[engine](), max_epochs=2, num_sanity_val_steps=0,
        check_val_every_n_epoch=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, data)
    return {
        "places": [trainer.global_rank, trainer.local_rank, trainer.node_rank, trainer.is_global_zero],
        "sizes": [trainer.world_size, trainer.num_devices, trainer.num_nodes],
        "steps": trainer.global_step,
        "prepared": data.prepared,
        "trained": module.trained,
        "validated": module.validated,
        "files": sorted(module.files),
        "weights": [p.detach().flatten().tolist() for p in module.parameters()],
    }


if __name__ == "__main__":
    given = sys.argv[1]
    said = {
        engine: fit(engine, given if given == "auto" else int(given)) for engine in sys.argv[2].split(",")
    }
    rank = said[next(iter(said))]["places"][0]
    (FOLDER / f"rank{rank}.json").write_text(json.dumps(said))
