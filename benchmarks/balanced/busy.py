"""Other people's load: processes that compute on a core while they are told to, and real work to be disturbed by it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import Dataset

from benchmarks.planner.models import MODELS, Model, Net

WIDTH, LENGTH, LAYERS, EXAMPLES = 128, 64, 6, 256
WORDS, WINDOW = 256, 32  # of the GPT

# Computes while the last byte that came was a 1, and ends with its parent: then there is nothing more to read.
_LOOP = """
import os, select
os.write(1, b"r")
busy = False
while True:
    if not busy or select.select([0], [], [], 0)[0]:
        told = os.read(0, 1)
        if not told:
            break
        busy = told == b"1"
    for _ in range(50_000):
        pass
"""


def usable_cores() -> list[int]:
    """Returns the cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


def pin(cores: Sequence[int]) -> None:
    """Keeps this process, and those that it starts, on these cores."""
    os.sched_setaffinity(0, set(cores))


class BusyLoops:
    """Processes that compute in vain while they are told to, on the cores of whoever starts them.

    Args:
        number: of processes.
    """

    def __init__(self, number: int) -> None:
        command = [sys.executable, "-S", "-c", _LOOP]
        pipe = subprocess.PIPE
        self.processes = [subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0) for _ in range(number)]
        self._busy = False
        for process in self.processes:
            assert process.stdout is not None
            process.stdout.read(1)

    def run(self, busy: bool) -> None:
        """Lets them compute, or not."""
        if busy != self._busy:
            for process in self.processes:
                assert process.stdin is not None
                process.stdin.write(b"1" if busy else b"0")
            self._busy = busy

    def __enter__(self) -> BusyLoops:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            process.kill()
            with process:  # closes the pipes and waits
                pass


class Load(Callback):
    """Tells the loops at the beginning of each step; ``loops`` None: they are another rank's."""

    def __init__(self, loops: BusyLoops | None, is_loaded: Callable[[int], bool]) -> None:
        self._loops, self._is_loaded = loops, is_loaded

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._loops is not None:
            self._loops.run(self._is_loaded(batch_idx))


class Products(LightningModule):
    """A few matrix products per position of a sequence: much to compute, few parameters to exchange."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for _ in range(LAYERS):
            layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
        self.net = nn.Sequential(*layers)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.net(batch) - batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Sequences(Dataset[Tensor]):
    """As many sequences as are asked for, of which a few are made."""

    def __init__(self, samples: int) -> None:
        g = torch.Generator().manual_seed(1)
        self._made = torch.randn(EXAMPLES, LENGTH, WIDTH, generator=g)
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Tensor:
        return self._made[index % EXAMPLES]


class Logits(nn.Module):
    """A small GPT-2 of transformers, from words to logits."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        self.gpt = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=WORDS, n_positions=WINDOW, n_embd=WIDTH, n_layer=3, n_head=4, use_cache=False,
                bos_token_id=0, eos_token_id=0,
            )
        )  # fmt: skip

    def forward(self, ids: Tensor) -> Tensor:
        return self.gpt(ids).logits


def _texts(samples: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, WORDS, (2, samples, WINDOW))
    return ids[0], ids[1]


REAL = {
    "GPT": Model(
        name="GPT", model=lambda: Net(nn.Identity(), [Logits()], nn.Identity()), inputs=_texts, per_rank=16
    ),
    "CNN": next(model for model in MODELS if model.name == "cnn, small"),
}
"""What two ranks train beside busy loops, by the name of its cases."""
