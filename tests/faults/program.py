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
import functools
import inspect
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_hetero import (
    BoundedStalenessStrategy,
    FederatedStrategy,
    HeteroPipelineStrategy,
    LoadBalancedStrategy,
)
from lightning_hetero.stale.policy import Flexible

ASKED: dict[str, Any] = {
    "engine": "balanced",
    "start": "popen",  # how Lightning starts the other ranks, where nobody else does
    "ranks": 3,
    "devices": 0,  # of this node; 0: all
    "nodes": 1,
    "samples": 96,
    "batch": 4,
    "epochs": 2,
    "step_s": 0.01,  # a device's work
    "timeout_s": 120.0,
    "liveness_s": 0.5,
    "save_every": 0,  # steps; 0: no checkpoints
    "kind": "",  # of fault; "": none
    "place": "Model.on_train_batch_start",
    "call": 3,  # which call of the place on a rank that is hit
    "ranks_hit": [1],
    "hold_s": 0.0,  # how long, for what lasts
    "options": {},  # further arguments of the strategy
    **json.loads(sys.argv[1] if len(sys.argv) > 1 and sys.argv[1].startswith("{") else "{}"),
}
CAUSE = "the cause: a flux compensator broke"
FOLDER = Path.cwd()
HIDDEN = 4
# Rank 1 leads a group with rank 0 as its second stage; a third rank is a group of its own.
GROUPS = [
    {"ranks": [1, 0], "cuts": [0, 2, 3], "samples": 8, "micro_samples": 3},
    {"ranks": [2], "cuts": [0, 3], "samples": 4, "micro_samples": 2},
]


# ---- what is written for the observer ------------------------------------------------------------------------------


def note(name: str, **said: Any) -> None:
    """Appends a line at once: a kill in the next moment does not lose it."""
    file = os.open(FOLDER / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(file, (json.dumps(said) + "\n").encode())
    os.close(file)


RANK: list[int] = []


def my_rank() -> int:
    """Returns the rank of the start: in the group of those who are left it may be another."""
    if not RANK and dist.is_initialized():
        RANK.append(dist.get_rank())
    if RANK:
        return RANK[0]
    return int(next(filter(None, map(os.environ.get, ("RANK", "SLURM_PROCID", "LOCAL_RANK"))), 0))


class Ledger(torch.optim.SGD):
    """Notes for each step which samples count in it, and how often."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        columns = ASKED["epochs"] * ASKED["samples"]
        for p in (p for group in self.param_groups for p in group["params"]):
            if tuple(p.shape) == (HIDDEN, columns) and p.grad is not None:
                row = p.grad[0].detach()
                ids = row.nonzero().flatten()
                shares = row[ids]
                one = shares.abs().min() if len(ids) else 1.0
                times = (shares.abs() / one).round(decimals=3)
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
            (FOLDER / f"pid-{trainer.global_rank}").write_text(str(os.getpid()))
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
        own = [p.detach().flatten().tolist() for p in pl_module.parameters() if not p.is_meta]
        said = {"steps": trainer.global_step, "epochs": trainer.current_epoch, "world": trainer.world_size, "own": own}
        (FOLDER / f"ended-{trainer.global_rank}.json").write_text(json.dumps({**said, "pid": os.getpid()}))


# ---- faults --------------------------------------------------------------------------------------------------------

CALLS, FIRED = [0], [False]
NOW = {"slow": False, "nan": False, "out of memory": False}


def here(place: str) -> None:
    """Lets the fault happen if it is due here and now."""
    if not ASKED["kind"] or place != ASKED["place"] or FIRED[0] or my_rank() not in ASKED["ranks_hit"]:
        return
    CALLS[0] += 1
    if CALLS[0] < ASKED["call"]:
        return
    FIRED[0] = True
    note("happened.jsonl", at_s=time.time(), rank=my_rank(), pid=os.getpid(), place=place)
    happen(ASKED["kind"])


def happen(kind: str) -> None:
    me = os.getpid()
    if kind == "exception":
        raise RuntimeError(CAUSE)
    if kind == "kill":
        os.kill(me, signal.SIGKILL)
    elif kind == "kill together":  # the first of them kills all
        for pid in pids(ASKED["ranks_hit"]):
            os.kill(pid, signal.SIGKILL)
    elif kind == "kill the server":
        (server,) = [c for c in psutil.Process().children() if os.getsid(c.pid) == c.pid]
        server.kill()
    elif kind in ("SIGTERM", "SIGUSR1"):
        os.kill(me, getattr(signal, kind))
    elif kind in ("SIGTERM to all", "SIGUSR1 to all"):
        for pid in pids(range(ASKED["ranks"])):
            os.kill(pid, getattr(signal, kind.split()[0]))
    elif kind == "stop":
        os.kill(me, signal.SIGSTOP)
    elif kind == "segfault":
        ctypes.string_at(0)
    elif kind == "hold the GIL":
        holds = threading.Thread(target=ctypes.PyDLL(None).sleep, args=(int(ASKED["hold_s"]),))
        holds.start()
    elif kind in NOW:
        NOW[kind] = True
    elif kind == "fill the disk":
        fill(FOLDER / "saved")
    elif kind == "fill /dev/shm":
        fill(Path("/dev/shm"))
    elif kind != "cut":  # the observer cuts the network
        raise AssertionError(f"no such fault: {kind}")


def pids(ranks: Iterable[int]) -> list[int]:
    """Returns the processes of these ranks, this one last; waits for those that have not begun to train."""
    files = [FOLDER / f"pid-{rank}" for rank in ranks]
    while not all(file.exists() and file.stat().st_size for file in files):
        time.sleep(0.01)
    return sorted((int(file.read_text()) for file in files), key=lambda pid: pid == os.getpid())


def fill(folder: Path) -> None:
    """Leaves no room there; the observer has put a small file system of its own in this place."""
    for size in (1 << 16, 1 << 9, 1):
        try:
            with open(folder / "filler", "ab", buffering=0) as file:
                while True:
                    file.write(b"x" * size)
        except OSError:
            pass


def hooked(*classes: type) -> None:
    """Wraps the one method that is the place of the fault; others stay as they are, overridden or not."""
    for cls in classes:
        owner, _, name = ASKED["place"].partition(".")
        if owner == cls.__name__:
            original = getattr(cls, name)

            @functools.wraps(original)
            def wrapper(self: Any, *args: Any, original: Any = original, **kwargs: Any) -> Any:
                here(ASKED["place"])
                return original(self, *args, **kwargs)

            wrapper.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
            del wrapper.__wrapped__  # through which Lightning would see that nothing was overridden
            setattr(cls, name, wrapper)


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
        self.net = nn.Sequential(*layers).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, numbers: Tensor, epoch: int) -> Tensor:
        columns = ASKED["epochs"] * ASKED["samples"]
        x = nn.functional.one_hot((numbers + epoch * ASKED["samples"]) % max(1, columns), columns).double()
        out = self(x)
        counted = -out[:, 0].mean()
        learned = (out[:, 1] - torch.sin(numbers.double())).square().mean()
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
    """A callback for the faults in callbacks' hooks."""


class Joining(Flexible):
    """The default policy, but what is late joins the next update, whose gradient tells then what has counted."""

    completes = False


def strategy() -> Any:
    how = {"timeout": timedelta(seconds=ASKED["timeout_s"]), "monitor": False, **ASKED["options"]}
    if ASKED["start"]:
        how["start_method"] = ASKED["start"]
    match ASKED["engine"]:
        case "balanced":
            return LoadBalancedStrategy(**how)
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
        found.append(ModelCheckpoint(FOLDER / "saved", "{step}", every_n_train_steps=ASKED["save_every"], save_top_k=1))
    return found


def enter_namespaces() -> None:
    """Goes where the observer wants this process: to a small disk, or to one side of a network."""
    libc = ctypes.CDLL(None, use_errno=True)
    for path in json.loads(os.environ.get("FAULTS_NAMESPACES", "[]")):
        file = os.open(path, os.O_RDONLY)
        if libc.setns(file, 0):
            raise OSError(ctypes.get_errno(), f"setns({path})")
        os.close(file)
    os.chdir(FOLDER)


def train(devices: int, **more: Any) -> Trainer:
    """Trains as `ASKED` says; ``more`` is for the Trainer."""
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy(),
        max_epochs=ASKED["epochs"],
        callbacks=callbacks(),
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=bool(ASKED["save_every"]),
        enable_model_summary=False,
        default_root_dir=FOLDER,
        **more,
    )
    trainer.fit(Model(), Data())
    return trainer


hooked(Model, Data, Numbers, Hooks)  # in a process that was spawned, too

if __name__ == "__main__":
    enter_namespaces()
    train(ASKED["devices"] or ASKED["ranks"], num_nodes=ASKED["nodes"])
