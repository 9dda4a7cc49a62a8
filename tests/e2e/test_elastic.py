"""A rank of a balanced run that is killed and comes back, as its user starts it: by itself, over the same port."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.e2e.crew import Crew
from tests.e2e.programs import left_in
from tests.ranks.kit import Toy, Weights, regression, single, weights

pytestmark = pytest.mark.timeout(200)

SAMPLES, BATCH, EPOCHS, WORKERS = 96, 12, 4, 1  # 8 batches an epoch
EXACT = 1e-12

SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from tests.e2e.test_elastic import BATCH, EPOCHS, SAMPLES, WORKERS
from tests.ranks.kit import Toy, balanced, regression, weights

ASKED = json.loads(sys.argv[1])
RANK = int(os.environ["LOCAL_RANK"])
FOLDER = Path(__file__).parent


def gate(name):
    (FOLDER / f"at {name}").touch()
    while not (FOLDER / f"go {name}").exists():
        time.sleep(0.01)


class Noted(Toy):
    def training_step(self, batch, batch_idx):
        place = [self.trainer.current_epoch, batch_idx]
        with (FOLDER / f"steps{RANK}").open("a") as file:
            file.write(json.dumps([*place, self.trainer.strategy.current_samples()]) + "\\n")
        if place == ASKED.get("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        for name, at in ASKED.get("gates", {}).items():
            if place == at:
                gate(name)
        time.sleep(ASKED.get("step_s", 0.0))
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.7), "interval": "step"}]


class Counts(Callback):
    started = 0

    def on_train_batch_start(self, *args):
        self.started += 1

    def state_dict(self):
        return {"started": self.started}

    def load_state_dict(self, state):
        self.started = state["started"]


if "gate" in ASKED:
    gate(ASKED["gate"])
counts, module, strategy = Counts(), Noted(), balanced(min_ranks=2, policy=None)
trainer = Trainer(accelerator="cpu", devices=3, strategy=strategy, max_epochs=EPOCHS, logger=False, callbacks=[counts],
                  enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False)
trainer.fit(module, DataLoader(regression(SAMPLES), batch_size=BATCH // 3, shuffle=True, num_workers=WORKERS))
told = {"steps": trainer.global_step, "started": counts.started, "shares": strategy.shares}
torch.save((told, weights(module)), FOLDER / f"ended{RANK}")
"""


class Scheduled(Toy):
    def configure_optimizers(self) -> object:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.7), "interval": "step"}]


def test_a_rank_that_is_killed_comes_back_before_the_next_batch(tmp_path: Path) -> None:
    """It has the model, the optimizer, the scheduler and the callbacks of the others, within the epoch."""
    crew = Crew(tmp_path, SCRIPT)
    crew.start("zero", 0, gates={"a": [1, 1]}, step_s=0.1)
    crew.start("one", 1, kill=[0, 3])
    crew.start("two", 2)
    crew.start("again", 1, gate="again")
    crew.ended("one")
    crew.at("a")
    crew.go("again")
    crew.asks(1)
    crew.go("a")
    codes, screens = crew.end(), "\n".join(crew.said(name) for name in crew.processes)
    assert codes == {"zero": 0, "one": -9, "two": 0, "again": 0}, screens
    assert left_in(tmp_path, grace_s=20.0) == [] and list(tmp_path.rglob("*.ckpt*")) == []
    assert "rank 1 is left out (its connection has ended" in screens and "rank 1 has joined in epoch" in screens

    oracle = Scheduled()
    single(oracle, regression(SAMPLES), BATCH, max_epochs=EPOCHS)
    batches = EPOCHS * SAMPLES // BATCH
    for rank in range(3):
        told, trained = torch.load(tmp_path / f"ended{rank}", weights_only=False)
        assert Weights(trained).distance(weights(oracle)) <= EXACT
        assert told["steps"] == told["started"] == batches
        assert sum(told["shares"]) == BATCH and all(told["shares"])
    steps = [json.loads(line) for line in (tmp_path / "steps1").read_text().splitlines()]
    back = [step for step in steps if step[0] > 0]
    assert 0 < back[0][1] < SAMPLES // BATCH, "it was let in within an epoch"
    assert any(samples > 0 for *_, samples in back)
