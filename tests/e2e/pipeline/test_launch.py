"""A process that starts the ranks of a pipeline itself gets the whole model back, as from stock DDP."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.programs import left_in, run

pytestmark = pytest.mark.timeout(300)

SCRIPT = """
import json
import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_hetero import HeteroPipelineStrategy

FOLDER = Path(__file__).parent
PLAN = {"groups": [{"ranks": [1, 0], "cuts": [0, 2, 8], "samples": 16, "micro_samples": 4}]}


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))).double()
        self.head = nn.Linear(4, 1).double()

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.head(self.model(batch[0])), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)


def main():
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    options = {"accelerator": "cpu", "max_epochs": 2, "logger": False, "enable_progress_bar": False}
    model, alone = Model(), Model()
    trainer = Trainer(devices=2, strategy=HeteroPipelineStrategy(plan=PLAN, start_method=sys.argv[1]), **options)
    trainer.fit(model, DataLoader(data, batch_size=8, shuffle=True))
    sampler = DistributedSampler(data, num_replicas=1, rank=0, seed=0)
    oracle = Trainer(devices=1, enable_checkpointing=False, **options)
    oracle.fit(alone, DataLoader(data, batch_size=16, sampler=sampler))
    best = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=True)
    pairs = [(p, q, best["state_dict"][n]) for (n, p), q in zip(model.named_parameters(), alone.parameters())]
    said = {
        "far": max(float((p - q).abs().max()) for p, q, _ in pairs),
        "saved": all(torch.equal(p, saved) for p, _, saved in pairs),
        "loss": [float(t.callback_metrics["loss"]) for t in (trainer, oracle)],
    }
    (FOLDER / "parent.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
"""


@pytest.mark.stock_ddp("spawn", "pipeline")
@pytest.mark.parametrize("start", ["spawn", pytest.param("fork", marks=pytest.mark.long)])
def test_the_weights_come_back_to_the_process_that_called_fit(start: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run(["script.py", start], tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads((tmp_path / "parent.json").read_text())
    assert said["far"] <= 1e-12 and said["saved"]
    assert said["loss"][0] == pytest.approx(said["loss"][1], rel=1e-6)
    assert left_in(tmp_path, grace_s=5.0) == []
