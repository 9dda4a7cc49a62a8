"""One rank on simulated GPUs: a fork of `tests.simgpu.warm` that does one job and ends."""

from __future__ import annotations

import faulthandler
import gc
import io
import os
import pickle
import random
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tests.ranks.rank_process import Outcome
from tests.simgpu import sim
from tests.simgpu.sim.check import Entry
from tests.simgpu.warm import Request

_POLL_S = 0.005


@dataclass
class Answer(Outcome):
    """What a rank on simulated GPUs answers.

    Attributes:
        races: texts of all that were found, also of those that somebody caught.
        issued: what it issued to communicators with NCCL's rules, in order.
    """

    races: list[str] = field(default_factory=list)
    issued: list[Entry] = field(default_factory=list)


def run_rank(rank: int, request: Request) -> None:
    """Does the job and ends the process."""
    code = 1
    try:
        os.setpgid(0, 0)
        _become(rank, request)
        answer = _do(rank, request)
        Path(request.folder, f".result-{rank}").write_bytes(_pickled(answer))
        os.rename(Path(request.folder, f".result-{rank}"), Path(request.folder, f"result-{rank}"))
        code = int(answer.error is not None)
        while code == 0 and not Path(request.folder, "leave").exists():
            time.sleep(_POLL_S)  # others may be in need of this rank's store
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _become(rank: int, request: Request) -> None:
    if not request.screen:
        screen = os.open(Path(request.folder, f"screen-{rank}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(screen, 1)
        os.dup2(screen, 2)
    faulthandler.enable(file=2)
    faulthandler.dump_traceback_later(0.9 * request.timeout_s, file=2)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    work = Path(request.folder, "work")
    work.mkdir(exist_ok=True)
    os.chdir(work)
    sys.path[:] = request.sys_path
    launcher = {  # as torchrun's
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": request.port, "RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": 0,
        "GROUP_RANK": 0, "WORLD_SIZE": request.world, "LOCAL_WORLD_SIZE": request.world, "GROUP_WORLD_SIZE": 1,
        "TORCHELASTIC_RUN_ID": f"simgpu-{request.port}", "OMP_NUM_THREADS": 1, "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    os.environ.update({name: str(value) for name, value in launcher.items()})
    torch.set_num_threads(1)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def _do(rank: int, request: Request) -> Answer:
    try:
        sim.install(request.gpus, asynchronous=request.asynchronous, nccl=request.nccl, serial=request.serial)
        job, args = pickle.loads(request.call)
        answer = Answer(value=job(rank, request.world, *args))
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()  # what is given back only now is looked at, too
        sim.finish()
    except BaseException as error:
        answer = Answer(error=error, trace=traceback.format_exc(), failed_at_s=time.monotonic())
    answer.races, answer.issued = sim.found()
    return answer


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.device.type != "cpu":
            raise TypeError(f"a job on simulated GPUs returns tensors of the host, not of {value.device}")
        return NotImplemented


def _pickled(answer: Answer) -> bytes:
    try:
        data = io.BytesIO()
        _Pickler(data).dump(answer)
        pickle.loads(data.getvalue())  # some exceptions pickle but cannot be built again
        return data.getvalue()
    except Exception as error:
        if answer.error is None:
            answer.error, answer.trace = error, traceback.format_exc()
        answer.value = None
        answer.error = RuntimeError(f"{type(answer.error).__name__}: {answer.error}")
        return pickle.dumps(answer)
