"""What `test_ray` runs: trainings under Ray's TorchTrainer on two CPU workers; writes what came out as JSON."""

import json
import os
import signal
import sys
from pathlib import Path

import ray.train
import torch
from lightning.pytorch import LightningModule, Trainer
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback
from ray.train.torch import TorchTrainer
from torch.utils.data import DataLoader, TensorDataset

BATCH, DIES_AT = 8, 14  # samples of all ranks; step, in the middle of the second epoch


class Model(LightningModule):
    def __init__(self, died):
        super().__init__()
        self.died = died
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


class ReportSteps(RayTrainReportCallback):
    def on_train_batch_end(self, trainer, pl_module, *args):
        if trainer.global_step % 4 == 0:
            self.on_train_epoch_end(trainer, pl_module)


def train(config):
    import lightning_hetero  # noqa: F401  the strategies' names, in each worker

    folder, world = Path(config["folder"]), ray.train.get_context().get_world_size()
    x = torch.randn(100, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=BATCH // world)
    trainer = Trainer(
        accelerator="cpu", devices="auto", strategy=config["strategy"], plugins=[RayLightningEnvironment()],
        callbacks=[ReportSteps()], max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    module, ckpt = Model(folder / "died"), config.get("ckpt")
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as reported:
            trainer.fit(module, loader, ckpt_path=os.path.join(reported, ReportSteps.CHECKPOINT_NAME))
    else:
        trainer.fit(module, loader, ckpt_path=ckpt)
    if trainer.global_rank == 0:
        weights = [p.detach().flatten().tolist() for p in module.parameters()]
        said = {"steps": trainer.global_step, "resumed": checkpoint is not None, "weights": weights}
        (folder / f"{config['name']}.json").write_text(json.dumps(said))


def run(name, workers, **config):
    TorchTrainer(
        train, train_loop_config={"name": name, "strategy": "hetero_balanced", "folder": os.getcwd(), **config},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(storage_path=os.getcwd(), name=name, failure_config=FailureConfig(max_failures=2)),
    ).fit()  # fmt: skip


if __name__ == "__main__":
    ray.init("local", num_cpus=int(sys.argv[1]), include_dashboard=False)
    run("killed", 2)  # a worker is lost in the middle of an epoch
    inside = sorted(Path("killed").absolute().glob("checkpoint_*"))[2]  # of step 12; 13 are an epoch
    run("others", int(sys.argv[1]), ckpt=str(inside / ReportSteps.CHECKPOINT_NAME))
    ray.shutdown()
