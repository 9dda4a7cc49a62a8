"""The user's program of the fault matrix: a small training, and one fault where and when it is told.

``python program.py '{"engine": "stale", "start": "popen", "kind": "kill", "ranks_hit": [1]}'``; see `ASKED`. In its
folder it leaves what `tests.faults.observe` reads: which samples were given to which rank (``issued``), which counted
in which step of the optimizer (``applied``), what a process holds (``held``), when the fault happened (``happened``),
who came to the end (``ended``).

That a sample counted, and how often, is read from the gradient itself: the first layer gets one-hot numbers of epoch
and sample, and the first of its outputs goes to the loss unchanged. So the gradient of that row is -1/B in the column
of every sample of a global batch of B, -2/B if it counted twice, and 0 elsewhere, whatever the engine does meanwhile.
"""

from __future__ import annotations

import ctypes
import json
import os
import tempfile
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

from lightning_hetero import (
    BoundedStalenessStrategy,
    FederatedStrategy,
    HeteroPipelineStrategy,
    HeteroTrace,
    LoadBalancedStrategy,
    ShardedBalancedStrategy,
    StragglerMonitor,
)
from lightning_hetero.stale.policy import Flexible
from tests.faults import asked
from tests.faults.asked import ASKED, my_rank, note
from tests.faults.happen import NOW, here, hooked

HIDDEN = 5  # no shape of the small copies on which the pipeline tries an optimizer
DTYPE = torch.float32 if ASKED["precision"] else torch.float64
# Rank 1 leads a group with rank 0 as its second stage; further ranks are groups of their own.
GROUPS = [
    {"ranks": [1, 0], "cuts": [0, 2, 3], "samples": 8, "micro_samples": 3},
    {"ranks": [2], "cuts": [0, 3], "samples": 4, "micro_samples": 2},
    {"ranks": [3], "cuts": [0, 3], "samples": 4, "micro_samples": 4},
]


def own_part(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor; of a sharded one rank 0 has the first row."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# ---- what is written for the observer ------------------------------------------------------------------------------


class Ledger(torch.optim.SGD):
    """Notes for each step which samples count in it, and how often."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        here("Ledger.step")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        columns = ASKED["epochs"] * ASKED["samples"]
        for p in (p for group in self.param_groups for p in group["params"]):
            elsewhere = isinstance(p, DTensor) and my_rank() > 0
            if tuple(p.shape) == (HIDDEN, columns) and p.grad is not None and not elsewhere:
                row = own_part(p.grad)[0].detach()
                ids = row.nonzero().flatten()
                shares = row[ids]
                one = shares.abs().min() if len(ids) else 1.0
                times = (shares.abs() / one).round(decimals=1 if ASKED["precision"] else 3)
                note(f"applied-{os.getpid()}.jsonl", ids=ids.tolist(), times=times.tolist())
        super().step()
        return loss


class Watch(Callback):
    """Notes what this process and its children hold of what may outlive them, and who comes to the end."""

    def __init__(self) -> None:
        self.told = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.told += 1
        if self.told == 1:
            (asked.FOLDER / f"pid-{trainer.global_rank}").write_text(str(os.getpid()))
        if self.told == 2:
            me = psutil.Process()
            files, ports, begun_s = set(), set(), {}
            for process in (me, *me.children(recursive=True)):
                with suppress(OSError, psutil.Error):  # it has ended meanwhile
                    maps = [line.split(None, 5) for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines()]
                    named = {line[5] for line in maps if len(line) > 5}
                    files |= {name for name in named if "/lightning-hetero-" in name or name.startswith("/dev/shm/")}
                    begun_s[process.pid] = process.create_time()
                    ports |= {c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
            held = {"pids": begun_s, "files": sorted(files), "ports": sorted(ports)}
            note(f"held-{os.getpid()}.jsonl", rank=trainer.global_rank, **held)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        own = [own_part(p.detach()).flatten().tolist() for p in pl_module.parameters() if not p.is_meta]
        said = {"steps": trainer.global_step, "epochs": trainer.current_epoch, "world": trainer.world_size, "own": own}
        (asked.FOLDER / f"ended-{trainer.global_rank}.json").write_text(json.dumps({**said, "pid": os.getpid()}))


# ---- the training --------------------------------------------------------------------------------------------------


class Straight(nn.Module):
    """A layer that hands its first input on as it is."""

    def __init__(self, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN - 1, out)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, :1], self.linear(x[:, 1:]).tanh()], 1)


class Numbers(Dataset):
    """Samples that are their own numbers."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> int:
        return self.numbers[index]


def collate(items: list[int]) -> Tensor:
    here("collate")
    return torch.tensor(items)


class Data(LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        numbers = list(range(ASKED["samples"]))
        if ASKED["engine"] == "federated":  # each rank's own
            numbers = numbers[my_rank() :: ASKED["ranks"]]
        return DataLoader(Numbers(numbers), batch_size=ASKED["batch"], shuffle=len(numbers) > 0, collate_fn=collate)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(Numbers(list(range(12))), batch_size=ASKED["batch"], collate_fn=collate)


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        columns = ASKED["epochs"] * ASKED["samples"]
        layers = [nn.Linear(columns, HIDDEN, bias=False), Straight(HIDDEN - 1), Straight(1)]
        self.net = nn.Sequential(*layers).to(DTYPE)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, numbers: Tensor, epoch: int) -> Tensor:
        columns = ASKED["epochs"] * ASKED["samples"]
        x = nn.functional.one_hot((numbers + epoch * ASKED["samples"]) % max(1, columns), columns).to(DTYPE)
        out = self(x)
        counted = -out[:, 0].mean()
        learned = (out[:, 1] - torch.sin(numbers.to(DTYPE))).square().mean()
        if (late := getattr(self, "late", None)) is not None:  # a submodule that was added
            learned = learned + late(out.detach()).square().mean()
        if NOW["nan"]:
            NOW["nan"] = False
            learned = learned * float("nan")
        return counted + learned

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        said = {"epoch": self.current_epoch, "batch": batch_idx, "ids": batch.tolist()}
        note(f"issued-{my_rank()}-{os.getpid()}.jsonl", at_s=time.time(), **said)
        time.sleep(ASKED["step_s"] * (10 if NOW["slow"] else 1))
        if NOW["out of memory"]:
            NOW["out of memory"] = False
            raise torch.OutOfMemoryError("out of memory: tried to allocate 3 GiB")
        loss = self.loss(batch, self.current_epoch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.loss(batch, 0), sync_dist=True, batch_size=len(batch))

    def configure_optimizers(self) -> Any:
        optimizer = Ledger(self.parameters(), lr=0.01)
        if ASKED["place"] != "Model.lr_scheduler_step":
            return optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "epoch"}}


class Hooks(Callback):
    """A callback for the faults in callbacks' hooks, and for checkpoints that take long to write."""

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if ASKED["write_s"]:
            checkpoint["slow"] = Slow()


class Slow:
    """Takes its time when it is written."""

    def __reduce__(self) -> tuple[Any, ...]:
        time.sleep(ASKED["write_s"])
        return str, ("slow",)


class Joining(Flexible):
    """The default policy, but what is late joins the next update, whose gradient tells then what has counted."""

    completes = False


def strategy() -> Any:
    how = {"timeout": timedelta(seconds=ASKED["timeout_s"]), "monitor": False, **ASKED["options"]}
    if ASKED["start"] and ASKED["engine"] != "sharded":  # which Lightning starts as scripts only
        how["start_method"] = ASKED["start"]
    match ASKED["engine"]:
        case "balanced":
            return LoadBalancedStrategy(**how)
        case "sharded":
            return ShardedBalancedStrategy(**{"shard": "auto", **how})
        case "stale":
            settings = {name: how.pop(name) for name in ("bound", "grace") if name in how}
            if how.get("policy", "flexible") == "flexible":  # counts are read from gradients, which completing mixes
                how["policy"], settings = Joining(**settings), {}
            return BoundedStalenessStrategy(liveness_s=ASKED["liveness_s"], **how, **settings)
        case "pipeline":
            plan = {"groups": GROUPS[: ASKED["ranks"] - 1]}
            return HeteroPipelineStrategy(**{"backbone": "net", "plan": plan, **how})
        case "federated":
            return FederatedStrategy(**{"local_steps": 3, "policy": "fedavg", **how})
    raise AssertionError(ASKED["engine"])


def callbacks() -> list[Callback]:
    found: list[Callback] = [Watch(), Hooks()]
    if ASKED["save_every"]:
        saved, every = asked.FOLDER / ASKED["save_in"], ASKED["save_every"]
        found.append(ModelCheckpoint(saved, "{step}", every_n_train_steps=every, save_top_k=1))
    if ASKED["trace"] is not None:
        found += [HeteroTrace(str(asked.FOLDER / ASKED["trace"]) if ASKED["trace"] else None), StragglerMonitor()]
    return found


def enter_namespaces() -> None:
    """Goes where the observer wants this process: to a small disk, or to one side of a network."""
    libc = ctypes.CDLL(None, use_errno=True)
    for path in json.loads(os.environ.get("FAULTS_NAMESPACES", "[]")):
        file = os.open(path, os.O_RDONLY)
        if libc.setns(file, 0):
            raise OSError(ctypes.get_errno(), f"setns({path})")
        os.close(file)
    os.chdir(asked.FOLDER)


def train(devices: int, **more: Any) -> Trainer:
    """Trains as `ASKED` says; ``more`` is for the Trainer."""
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy(),
        max_epochs=ASKED["last_epoch"] or ASKED["epochs"],
        callbacks=callbacks(),
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=bool(ASKED["save_every"]),
        enable_model_summary=False,
        limit_val_batches=None if ASKED["validation"] else 0,
        accumulate_grad_batches=ASKED["accumulate"],
        precision=ASKED["precision"] or None,
        default_root_dir=ASKED["root"] or asked.FOLDER,
        **more,
    )
    trainer.fit(Model(), Data(), ckpt_path=ASKED["resume"] or None)
    return trainer


tempfile.tempdir = None  # which this process may have looked up before it had this program's environment
if my_rank() or __name__ != "__main__":
    time.sleep(ASKED["import_s"])
hooked(Model, Data, Numbers, Hooks)  # in a process that was spawned, too

if __name__ == "__main__":
    enter_namespaces()
    train(ASKED["devices"] or ASKED["ranks"], num_nodes=ASKED["nodes"])
