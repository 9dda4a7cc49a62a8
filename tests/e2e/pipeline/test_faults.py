"""Ranks of a pipeline that fail, die or are interrupted in real trainings: everybody ends soon, with the cause."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests import warm
from tests.e2e.programs import environ, left_in
from tests.e2e.stale.scripts import Ended, collect, start_rank
from tests.ports import free_port

pytestmark = pytest.mark.timeout(120)

# Rank 1 leads a group with rank 0 as its second stage; rank 2 is another group. Rank 0 hosts the failure board.
SCRIPT = """
import json, os, signal, sys, time
from datetime import timedelta
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import HeteroPipelineStrategy
from lightning_hetero.pipeline.runtime.ownership import migration

ASKED = {"ranks": 3, "place": "", "at": 0, "kind": "exception", **json.loads(sys.argv[1])}
PLAN = {"groups": [{"ranks": [1, 0], "cuts": [0, 2, 4], "samples": 8, "micro_samples": 3},
                   {"ranks": [2], "cuts": [0, 4], "samples": 4, "micro_samples": 2}]}


def happen(place, trainer):
    if ASKED["place"] != place or ASKED["at"] != trainer.global_rank or trainer.global_step < 5:
        return
    Path("happened").write_text(str(time.time()))
    if ASKED["kind"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if ASKED["kind"] == "interrupt":
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have let the tests ignore it
        signal.raise_signal(signal.SIGINT)
    raise RuntimeError("the cause: a flux compensator broke")


class Layer(torch.nn.Linear):
    module = None

    def forward(self, x):
        happen("layer", Layer.module.trainer)
        return super().forward(x).tanh()


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Sequential(*(Layer(4, 4) for _ in range(4)))
        Layer.module = self

    def training_step(self, batch, batch_idx):
        happen("step", self.trainer)
        loss = self.model(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        happen("validation", self.trainer)
        self.log("val", self.model(batch[0]).square().mean())

    def on_train_batch_end(self, outputs, batch, batch_idx):
        happen("hook", self.trainer)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data():
    return DataLoader(TensorDataset(torch.randn(72, 4)), batch_size=4)


migrates, options = ASKED["place"].startswith("migration"), {}
if migrates:  # rank 2 joins the group of the others: after seven batches, as it has read samples of the sixth
    from lightning.pytorch.callbacks import ModelCheckpoint
    from tests.ranks.pipeline.replan_kit import Scripted, group, plan

    script = {5: plan(group([1, 2, 0], [0, 1, 2, 4], 12, 3))}
    options = {"controller": Scripted(script)}
    saver = ModelCheckpoint("saved", filename="{step}", every_n_train_steps=1, save_top_k=-1)
    transfer = migration.Migration._transfer

    def interrupted(*args, **kwargs):
        if ASKED["place"] == "migration, sending":
            happen(ASKED["place"], trainer)
        transfer(*args, **kwargs)
        happen("migration", trainer)

    migration.Migration._transfer = interrupted
strategy = HeteroPipelineStrategy(backbone="model", plan=PLAN, timeout=timedelta(seconds=100), **options)
trainer = Trainer(accelerator="cpu", devices=3, strategy=strategy, max_epochs=3, logger=False,
                  enable_checkpointing=migrates, enable_progress_bar=False, enable_model_summary=False,
                  num_sanity_val_steps=0, callbacks=[saver] if migrates else [])
torch.manual_seed(0)
trainer.fit(Model(), data(), data())
Path(f"finished{trainer.global_rank}").write_text("")
"""
CAUSE = "the cause: a flux compensator broke"
SOON_S = 20.0  # the timeout is 100 s


@pytest.fixture(autouse=True)
def clean(tmp_path: Path) -> Iterator[None]:
    (tmp_path / "script.py").write_text(SCRIPT)
    yield
    assert left_in(tmp_path, grace_s=10.0) == []


def launch(folder: Path, **asked: object) -> Ended:
    port, outputs = free_port(), [folder / f"said{rank}" for rank in range(3)]
    processes = [start_rank(folder, rank, output, port=port, ranks=3, **asked) for rank, output in enumerate(outputs)]
    return collect(folder, processes, outputs, 60.0)


def check_ended(folder: Path, ended: Ended) -> None:
    assert not list(folder.glob("finished*")) and (folder / "happened").exists(), ended.screens
    assert ended.ended_at_s - float((folder / "happened").read_text()) < SOON_S, ended.screens
    assert all(code != 0 for code in ended.code), ended.screens


@pytest.mark.parametrize(
    ("place", "rank"),
    [("step", 1), *(pytest.param(*p, marks=pytest.mark.long) for p in (("layer", 0), ("hook", 0), ("validation", 2)))],
)
def test_an_exception_is_on_every_screen(tmp_path: Path, place: str, rank: int) -> None:
    ended = launch(tmp_path, place=place, at=rank)
    check_ended(tmp_path, ended)
    for r, screen in enumerate(ended.said):
        assert CAUSE in screen, (r, screen)
        last = screen.strip().splitlines()[-1]
        if r == rank:  # what was raised, not what came of it
            assert last.removeprefix(f"[rank{r}]: ") == f"RuntimeError: {CAUSE}", screen
        else:
            assert f"rank {rank} failed: RuntimeError: {CAUSE}" in screen, (r, screen)


def launch_and_kill(folder: Path, place: str, rank: int) -> None:
    """A rank is killed there: all end, and the others say on their screens which one is gone."""
    ended = launch(folder, place=place, at=rank, kind="kill")
    check_ended(folder, ended)
    assert ended.code[rank] == -9
    for r, screen in enumerate(ended.said):
        if r != rank:
            assert "Traceback" in screen, (r, screen)
            assert f"rank {rank} is gone without a word" in screen, (r, screen)


@pytest.mark.parametrize(("place", "rank"), [("layer", 0), pytest.param("step", 2, marks=pytest.mark.long)])
def test_a_killed_rank_ends_all(tmp_path: Path, place: str, rank: int) -> None:
    launch_and_kill(tmp_path, place, rank)


@pytest.mark.parametrize(
    ("place", "rank"), [("migration, sending", 0), pytest.param("migration", 2, marks=pytest.mark.long)]
)
def test_a_rank_killed_while_layers_move_loses_nothing_that_was_saved(tmp_path: Path, place: str, rank: int) -> None:
    launch_and_kill(tmp_path, place, rank)
    saved = sorted(tmp_path.glob("saved/*.ckpt"), key=lambda path: int(path.stem.partition("=")[2]))
    assert [path.stem for path in saved] == [f"step={n}" for n in range(1, 8)]
    last = torch.load(saved[-1], weights_only=True)
    assert last["global_step"] == 7
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    model.load_state_dict({name.removeprefix("model."): t for name, t in last["state_dict"].items()})
    assert last["lightning_hetero"]["plan"]["groups"][0]["ranks"] == [1, 0], "the plan that the file was written under"


def test_an_interrupted_rank_ends_all(tmp_path: Path) -> None:
    ended = launch(tmp_path, place="step", at=1, kind="interrupt")
    check_ended(tmp_path, ended)
    assert "Detected KeyboardInterrupt" in ended.screens or "rank 1 failed: KeyboardInterrupt" in ended.screens
    for r in (0, 2):
        assert "rank 1 failed: KeyboardInterrupt" in ended.said[r], ended.said[r]


def test_of_processes_started_by_the_first_the_cause_is_shown(tmp_path: Path) -> None:
    command = ["script.py", json.dumps({"place": "step", "at": 1})]
    result = warm.run(command, tmp_path, environ(), 60.0)
    assert result.returncode > 0 and CAUSE in result.stderr + result.stdout
    assert "flux compensator" in result.stderr and "happen(" in result.stderr  # the user's lines
