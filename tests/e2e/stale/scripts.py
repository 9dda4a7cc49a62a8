"""One script, started in every way: trains with the stale engine and lets scripted faults happen.

Where starting is not what a test is about, a process that somebody starts by hand starts warm (`tests.warm`).
Each rank that comes to the end of its training writes what it ended with; the rest is read from exit codes and screens.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests import warm
from tests.e2e.programs import environ, left_in
from tests.ports import free_port

TRAIN, VALID, BATCH, EPOCHS = 96, 24, 4, 3
_LIMIT_S = {False: 60.0, True: 300.0}  # warm and cold: importing takes long on a busy machine

SCRIPT = """
import gc

gc.disable()  # imports make no garbage, and are a fifth faster
import errno, json, os, signal, subprocess, sys, time
from datetime import timedelta
from pathlib import Path

import psutil
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins import TorchCheckpointIO
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import BoundedStalenessStrategy, HeteroTrace
from lightning_hetero.base.elastic import meetings

gc.enable()
FOLDER = Path(__file__).parent
ASKED = {"start": "popen", "ranks": 3, "fault": None, "at": [1, 2], "step_s": 0.0, "liveness_s": 5.0, "save": False,
         "resume": None, "epochs": 3, "train": 96, "transport": "auto", "falls": None, "op": "all_reduce",
         **json.loads(sys.argv[1])}


def data(samples, seed):
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)).double()

    def training_step(self, batch, batch_idx):
        time.sleep(ASKED["step_s"])
        happen(self.trainer, "exception", batch_idx)
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        happen(self.trainer, "kill in validation", 99)
        self.log("val", torch.nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def happen(trainer, kind, batch_idx):
    if not ASKED["fault"] or trainer.sanity_checking:
        return
    wanted, rank = ASKED["fault"]
    # a rank may skip a batch that others made, so: at the first one not before
    if wanted == kind and trainer.global_rank == rank and (trainer.current_epoch, batch_idx) >= tuple(ASKED["at"]):
        (FOLDER / "happened").write_text(str(time.time()))
        if kind == "exception":
            raise RuntimeError("the cause: a flux compensator broke")
        if kind.startswith("stop"):
            ASKED["fault"] = None
            until = {"stop": "sleep 1.5", "stop for long": "while [ ! -s rank0.json ]; do sleep 0.05; done",
                     "stop for ever": "exit"}
            waker = f"{until[kind]}; date +%s.%N > woken; kill -CONT {os.getpid()}"
            subprocess.Popen(["sh", "-c", waker], cwd=FOLDER)
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "kill the server":
            ASKED["fault"] = None
            (server,) = [c for c in psutil.Process().children() if os.getsid(c.pid) == c.pid]
            server.kill()
        elif kind != "kill while writing":
            os.kill(os.getpid(), signal.SIGKILL)
        return True


class Faults(Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        for kind in ("kill", "stop", "stop for long", "stop for ever", "kill the server"):
            happen(trainer, kind, batch_idx)
        if happen(trainer, "kill while writing", batch_idx):
            # the last layer's gradient is the first to be complete and, by hooks that came earlier, in the slot
            die = lambda p: os.kill(os.getpid(), signal.SIGKILL)
            module.net[-1].weight.register_post_accumulate_grad_hook(die)


    def on_validation_epoch_end(self, trainer, module):
        if (ASKED["fault"] or [""])[0] == "kill in a collective" and not trainer.sanity_checking:
            collective = getattr(torch.distributed, ASKED["op"])

            def falls(*args, **kwargs):  # all have met, and wait for each other now
                happen(trainer, "kill in a collective", 99)
                return collective(*args, **kwargs)

            setattr(torch.distributed, ASKED["op"], falls)


if ASKED["falls"] == int(os.environ.get("LOCAL_RANK", -1)):  # on its way into the group of those who are left
    meetings.rebuild_default_group = lambda **_: os.kill(os.getpid(), signal.SIGKILL)


class Report(Callback):
    def __init__(self):
        self.batches, self.shares_memory = [], False

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.batches.append([time.time(), trainer.global_step])
        self.shares_memory = self.shares_memory or "/memfd:lightning-hetero" in Path("/proc/self/maps").read_text()

    def on_train_end(self, trainer, module):
        assert self.shares_memory == (ASKED["transport"] == "auto")
        said = {
            "steps": trainer.global_step,
            "epochs": trainer.current_epoch,
            "world": trainer.world_size,
            "weights": [p.detach().flatten().tolist() for p in module.parameters()],
            "val": trainer.callback_metrics["val"].item(),
            "batches": self.batches,
        }
        (FOLDER / f"rank{trainer.global_rank}.json").write_text(json.dumps(said))


class FullDisk(TorchCheckpointIO):
    def save_checkpoint(self, checkpoint, path, storage_options=None):
        if ASKED["fault"] and ASKED["fault"][0] == "full disk":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        super().save_checkpoint(checkpoint, path, storage_options)


def main():
    strategy = BoundedStalenessStrategy(start_method=ASKED["start"], timeout=timedelta(seconds=100),
                                        liveness_s=ASKED["liveness_s"], monitor=False, transport=ASKED["transport"])
    callbacks = [Faults(), Report()]
    if ASKED.get("trace"):
        callbacks.append(HeteroTrace(str(FOLDER / "trace")))
    if ASKED["save"]:
        callbacks.append(ModelCheckpoint(FOLDER / "saved", "{step}", every_n_train_steps=4, save_top_k=-1))
    trainer = Trainer(accelerator="cpu", devices=ASKED["ranks"], strategy=strategy, max_epochs=ASKED["epochs"],
                      callbacks=callbacks, plugins=[FullDisk()], logger=False, enable_progress_bar=False,
                      enable_checkpointing=ASKED["save"], enable_model_summary=False)
    model = Model()
    trainer.fit(model, data(ASKED["train"], 0), data(24, 1), ckpt_path=ASKED["resume"])
    ended = [p.detach().flatten().tolist() for p in model.parameters()]
    (FOLDER / f"parent{os.environ.get('LOCAL_RANK', 0)}.json").write_text(json.dumps(ended))


if __name__ == "__main__":
    main()
"""

Process = subprocess.Popen | warm.WarmProcess

@dataclass
class Ended:
    """What is left of a run.

    Attributes:
        code: exit code; of each process if there were several.
        said: output of all processes, or of each.
        ranks: what the ranks reported that came to the end.
        ended_at_s: wall clock.
    """

    code: list[int]
    said: list[str]
    ranks: dict[int, dict[str, Any]]
    ended_at_s: float

    def finished(self, steps: int, ranks: Sequence[int]) -> None:
        """These ranks, and no others, came to the end of the same training, with the same model."""
        assert sorted(self.ranks) == list(ranks), "\n".join(self.said)
        first = self.ranks[ranks[0]]
        for rank in ranks:
            assert self.ranks[rank]["steps"] == steps
            assert self.ranks[rank]["weights"] == first["weights"] and self.ranks[rank]["val"] == first["val"]
        # the last validation, over all samples, whoever is left to do it
        assert abs(first["val"] - validation_loss(first["weights"])) <= 1e-12

    @property
    def screens(self) -> str:
        return "\n".join(self.said)


def validation_loss(weights: list[list[float]]) -> float:
    """Returns the loss of the script's model over the whole validation set."""
    x = torch.randn(VALID, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    w1, b1, w2, b2 = (torch.tensor(w, dtype=torch.float64) for w in weights)
    out = torch.tanh(x @ w1.view(3, 4).T + b1) @ w2.view(1, 3).T + b2
    return float((out - x.sum(1, keepdim=True)).square().mean())


def collect(folder: Path, processes: Sequence[Process], outputs: Sequence[Path], limit_s: float) -> Ended:
    """Waits for the processes to end, and kills what has not after ``limit_s``."""
    deadline = time.monotonic() + limit_s
    try:
        codes = [process.wait(max(0.0, deadline - time.monotonic())) for process in processes]
        ended_at_s = time.time()
    except subprocess.TimeoutExpired:
        raise AssertionError("it hangs:\n" + "\n".join(path.read_text() for path in outputs)) from None
    finally:
        for process in processes:
            process.kill()
            process.wait()
    ranks = {
        int(path.stem[4:]): json.loads(path.read_text()) for path in folder.glob("rank*.json") if path.stat().st_size
    }
    return Ended(codes, [path.read_text() for path in outputs], ranks, ended_at_s)


def launch(folder: Path, *options: str, cold: bool = False, **asked: Any) -> Ended:
    """Runs the script as a user would: ``python script.py``, with ``options`` in between."""
    write_script(folder)
    output = folder / "said"
    process = _start(folder, [*options, "script.py", json.dumps(asked)], environ(), output, cold=cold)
    return collect(folder, [process], [output], _LIMIT_S[cold])


def launch_externally(folder: Path, ranks: int = 3, **asked: Any) -> Ended:
    """Starts every rank by itself, each with a screen of its own."""
    write_script(folder)
    port, outputs = free_port(), [folder / f"said{rank}" for rank in range(ranks)]
    processes = [
        start_rank(folder, rank, output, port=port, ranks=ranks, **asked) for rank, output in enumerate(outputs)
    ]
    return collect(folder, processes, outputs, _LIMIT_S[False])


def write_script(folder: Path) -> None:
    """Puts the script where the runs are started."""
    (folder / "script.py").write_text(SCRIPT)


def start_rank(
    folder: Path, rank: int, output: Path, *, port: int, ranks: int, script: str = "script.py", **asked: Any
) -> Process:
    """Starts one rank by itself; the ranks meet at ``port``."""
    command = [script, json.dumps({**asked, "ranks": ranks})]
    its = environ(
        LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(ranks), NODE_RANK="0"
    )
    return _start(folder, command, its, output, cold=False)


def _start(folder: Path, command: Sequence[str], its: dict[str, str], output: Path, *, cold: bool) -> Process:
    with output.open("a") as said:
        if not cold:
            return warm.start(command, folder, its, said.fileno(), said.fileno())
        return subprocess.Popen([sys.executable, *command], cwd=folder, env=its, stdout=said, stderr=said)


@contextmanager
def nothing_left(folder: Path) -> Iterator[None]:
    """Fails if a process that works in the folder outlives the run."""
    yield
    assert left_in(folder, grace_s=20.0) == []
