"""``python -m lightning_hetero``: the same training with stock DDP and with `hetero_balanced`, drawn (layer A).

    python -m lightning_hetero           # four emulated devices of speeds 1, 1, 1/2 and 1/4, random data
    python -m lightning_hetero FOLDER    # keeps the traces: lightning-hetero-report FOLDER/ddp FOLDER/hetero_balanced
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

from lightning_hetero.callbacks import HeteroTrace, StragglerMonitor, ThrottleCallback
from lightning_hetero.cli.loading import quiet_trainer
from lightning_hetero.cluster.score import shares_text
from lightning_hetero.emulate import Scenario
from lightning_hetero.record import read_events
from lightning_hetero.record.ledger import ledger_of
from lightning_hetero.record.run import RecordedRun, run_of

SPEEDS = (1.0, 1.0, 0.5, 0.25)
STRATEGIES = ("ddp", "hetero_balanced")
_STEPS, _BATCH, _SAMPLE_S = 32, 16, 0.003
_SHOWN = 4  # of stock DDP's steps, in a time line


def train(strategy: str, folder: Path) -> Trainer:
    """Trains and records a run; on every rank."""
    emulated = ThrottleCallback(Scenario(speeds=list(SPEEDS), sample_s=_SAMPLE_S))
    trainer = quiet_trainer(
        strategy=strategy, accelerator="cpu", devices=len(SPEEDS), max_steps=_STEPS,
        callbacks=[emulated, StragglerMonitor(), HeteroTrace(str(folder / strategy))],
    )  # fmt: skip
    data = RandomDataset(32, _STEPS * _BATCH * len(SPEEDS))
    trainer.fit(BoringModel(), DataLoader(data, _BATCH, shuffle=True))
    trainer.strategy.barrier()
    return trainer


def time_lines(run: RecordedRun, span_s: float, width: int) -> Iterator[str]:
    """Yields a line per rank: what it did in the last ``span_s`` of the run that begin with a step."""
    ends = [max(turn.end_s for turn in step.turns.values()) for step in run.complete]
    begin_s = max((end for end in ends if end <= ends[-1] - span_s), default=0.0)
    for rank in range(run.ranks):
        worked = [(turn.begin_s, turn.begin_s + turn.compute_s) for s in run.complete if (turn := s.turns[rank])]
        at = [begin_s + (i + 0.5) * span_s / width for i in range(width)]
        yield f"rank {rank}  " + "".join("█" if any(a <= t < b for a, b in worked) else "·" for t in at)


def told(runs: dict[str, RecordedRun], width: int) -> Iterator[str]:
    """Yields what is printed of the runs."""
    ledgers = {strategy: ledger_of(run) for strategy, run in runs.items()}
    ddp, ours = ledgers.values()
    yield f"\nThe last {_SHOWN * ddp.step_s:.1f} s of each run: █ working, · waiting for slower ranks"
    for strategy, ledger in ledgers.items():
        yield f"\n{strategy}: {ledger.step_s * 1e3:.0f} ms per step, samples per rank {shares_text(ledger.shares)}"
        yield from time_lines(runs[strategy], _SHOWN * ddp.step_s, width)
    yield f"\nhetero_balanced is {ddp.step_s / ours.step_s:.1f} times as fast as stock DDP."


def main() -> None:
    about = "Trains a small module on four emulated devices, with stock DDP and with hetero_balanced, and draws both."
    parser = argparse.ArgumentParser("python -m lightning_hetero", description=about)
    kept = "keep the traces there: lightning-hetero-report FOLDER/ddp FOLDER/hetero_balanced"
    parser.add_argument("folder", nargs="?", help=kept)
    kept = parser.parse_args().folder
    if kept is None:
        sys.argv.append(tempfile.mkdtemp())  # Lightning starts the other ranks with these arguments
    folder = Path(sys.argv[1])
    if "LOCAL_RANK" not in os.environ:
        print("Training on emulated devices of speeds 1, 1, 1/2 and 1/4: about half a minute ...", flush=True)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    seed_everything(0, verbose=False)
    trainers = [train(strategy, folder) for strategy in STRATEGIES]
    if trainers[0].is_global_zero:
        runs = {strategy: run_of(read_events(folder / strategy)) for strategy in STRATEGIES}
        print(*told(runs, min(shutil.get_terminal_size().columns, 80) - 8), sep="\n", flush=True)
        if kept is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
