"""Clients that die, sleep and come again, as their users start them: each by itself, over the same port."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.crew import Crew
from tests.e2e.programs import left_in
from tests.ranks.federated.kit import EXACT, Plain, data

pytestmark = pytest.mark.timeout(200)

LIVENESS_S = 3.0
BATCH, TAU, EPOCHS, ROUNDS = 4, 2, 4, 3  # rounds of an epoch
PARTS = (range(0, 20), range(20, 42), range(42, 64))  # 5, 6 and 6 batches
LR, MOMENTUM = 0.7, 0.5  # of the server

SCRIPT = """
import json, os, signal, sys, time
from functools import partial
from pathlib import Path

import torch
from lightning.pytorch import Callback, Trainer

from lightning_hetero.federated.policy import FedAvg
from tests.ranks.federated.kit import Plain, federated, own
from tests.e2e.test_federated import BATCH, EPOCHS, LIVENESS_S, LR, MOMENTUM, PARTS, TAU

ASKED = json.loads(sys.argv[1])
RANK = int(os.environ["LOCAL_RANK"])
FOLDER = Path(__file__).parent


def gate(name):
    (FOLDER / f"at {name}").touch()
    while not (FOLDER / f"go {name}").exists():
        time.sleep(0.01)


class Client(Plain):
    def training_step(self, batch, batch_idx):
        place = [self.trainer.current_epoch, batch_idx]
        note = {"epoch": place[0], "batch": batch_idx, "indices": batch[0].tolist(), "at_s": time.time(),
                "step": self.trainer.global_step}
        with (FOLDER / f"steps{RANK}").open("a") as file:
            file.write(json.dumps(note) + "\\n")
        if place == ASKED.get("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if place == ASKED.get("stop"):
            (FOLDER / "stopped").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        for name, at in ASKED.get("gates", {}).items():
            if place == at:
                gate(name)
        return super().training_step(batch, batch_idx)


if "gate" in ASKED:
    gate(ASKED["gate"])
server = partial(torch.optim.SGD, lr=LR, momentum=MOMENTUM)
strategy = federated(policy=FedAvg(again=True), local_steps=TAU, server=server, min_clients=2,
                     liveness_s=LIVENESS_S, monitor=True)
trainer = Trainer(accelerator="cpu", devices=3, strategy=strategy, max_epochs=EPOCHS, logger=False,
                  enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False)
module = Client(momentum=0.9)
trainer.fit(module, own(PARTS[RANK], BATCH), own(range(9), 2))
said = {"weights": [p.flatten().tolist() for p in module.parameters()], "steps": trainer.global_step,
        "val": float(trainer.callback_metrics["val"]), "shares": strategy.shares}
(FOLDER / f"rank{RANK}.json").write_text(json.dumps(said))
"""


def simulated(trained: dict[int, dict[int, list[list[int]]]]) -> list[list[float]]:
    """FedAvgM by hand of who took part in each round.

    Args:
        trained: by round and rank, the indices of its batches.
    """
    whole, module = data(), Plain(momentum=0.9)
    common = [p.detach().clone() for p in module.parameters()]
    kept: list[Any] = [None] * len(common)
    m = [torch.zeros_like(p) for p in common]
    for number in sorted(trained):
        ended, used = [], []
        for batches in trained[number].values():
            mine = Plain(momentum=0.9)
            optimizer: Any = mine.configure_optimizers()
            for p, value, momentum in zip(mine.parameters(), common, kept, strict=True):
                p.data.copy_(value)
                if momentum is not None:
                    optimizer.state[p]["momentum_buffer"] = momentum.clone()
            for indices in batches:
                _, x, y = whole[indices]
                optimizer.zero_grad()
                mine.loss((x, y)).backward()
                optimizer.step()
            ended.append([(p.detach(), optimizer.state[p]["momentum_buffer"]) for p in mine.parameters()])
            used.append(sum(map(len, batches)))
        for i in range(len(common)):
            mean, kept[i] = (
                sum(n * client[i][k] for n, client in zip(used, ended, strict=True)) / sum(used) for k in (0, 1)
            )
            m[i] = MOMENTUM * m[i] + common[i] - mean
            common[i] = common[i] - LR * m[i]
    return [p.flatten().tolist() for p in common]


def test_clients_are_lost_and_come_again(tmp_path: Path) -> None:
    """One is killed and comes back within an epoch; one sleeps too long, is told so, and comes back between two.

    The weights are those of the same rounds by hand: without what a client did in the round in which it was lost, and
    with the model, the momentum and the server's momentum of the others from the round on in which it came again.
    """
    crew = Crew(tmp_path, SCRIPT)
    crew.start("zero", 0, gates={"a": [1, 1], "b": [2, 5]})
    crew.start("one", 1, stop=[2, 3])
    crew.start("two", 2, kill=[0, 3])
    crew.start("again two", 2, gate="again two")
    crew.start("again one", 1, gate="again one")

    crew.ended("two")
    crew.at("a")  # in the fourth round: the death was noticed
    crew.go("again two")
    crew.asks(2)
    crew.go("a")

    crew.at("b")  # in the ninth
    os.kill(int((tmp_path / "stopped").read_text()), signal.SIGCONT)
    crew.ended("one")
    crew.go("again one")
    crew.asks(1)
    crew.go("b")

    codes, screens = crew.end(), "\n".join(crew.said(name) for name in crew.processes)
    assert codes == {"zero": 0, "one": 1, "two": -9, "again two": 0, "again one": 0}, screens
    assert left_in(tmp_path, grace_s=20.0) == [] and list(tmp_path.rglob("*.ckpt*")) == []
    ended = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(3)]
    assert ended[0] == ended[1] == ended[2] and ended[0]["steps"] == EPOCHS * 6 and ended[0]["shares"] == [4, 4, 4]

    steps = [
        [json.loads(line) for line in (tmp_path / f"steps{rank}").read_text().splitlines()] for rank in range(3)
    ]
    trained: dict[int, dict[int, list[list[int]]]] = {}
    for rank, notes in enumerate(steps):
        for note in notes:
            number = 1 + ROUNDS * note["epoch"] + note["batch"] // TAU
            if (rank, number) not in ((2, 2), (1, 8)):  # lost
                trained.setdefault(number, {}).setdefault(rank, []).append(note["indices"])
    there = {number: sorted(clients) for number, clients in sorted(trained.items())}
    everybody = {number: [0, 1, 2] for number in range(1, 1 + ROUNDS * EPOCHS)}
    assert there == {**everybody, 2: [0, 1], 3: [0, 1], 4: [0, 1], 8: [0, 2], 9: [0, 2]}, screens
    # its own data go on where all had met last
    assert trained[5][2][0] == list(PARTS[2])[8:12] and trained[10][1][0] == list(PARTS[1])[8:12]
    expected = simulated(trained)
    for mine, its in zip(ended[0]["weights"], expected, strict=True):
        assert max(abs(a - b) for a, b in zip(mine, its, strict=True)) <= EXACT

    # the others have waited as long as they say, and little more
    at_s = {(note["epoch"], note["batch"]): note["at_s"] for note in steps[0]}
    assert at_s[0, 4] - at_s[0, 3] < LIVENESS_S + 10.0
    for text in (
        "rank 2 is left out (its connection has ended", "rank 2 has joined in epoch 1",
        "rank 1 is left out (no sign of life for 3 s", "rank 1 has joined in epoch 3",
    ):  # fmt: skip
        assert text in crew.said("zero"), screens
    assert "the others have gone on without rank 1 (no sign of life for 3 s" in crew.said("one")
