"""Ranks that come again into a training under way, as their users start them: each by itself, over the same port."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightning_hetero.base.elastic.admission import COME_S
from tests.e2e.crew import Crew
from tests.e2e.stale.scripts import nothing_left, write_script

pytestmark = pytest.mark.timeout(200)

TICKS = 8  # of an epoch: 96 samples in global batches of 3 * 4

JOINING = """
import os, signal, time

import script
from lightning_hetero.base.elastic import join
from script import ASKED, FOLDER


def pass_gate(name):
    if name in ASKED["gates"]:
        (FOLDER / f"at {name}").touch()
        while not (FOLDER / f"go {name}").exists():
            time.sleep(0.01)


class Gated(script.Faults):
    def on_train_epoch_start(self, trainer, module):
        if trainer.global_rank == ASKED["keeper"]:
            pass_gate(f"start {trainer.current_epoch}")

    def on_train_epoch_end(self, trainer, module):
        if trainer.global_rank == ASKED["keeper"]:
            pass_gate(f"end {trainer.current_epoch}")


def killed(*_):
    (FOLDER / "invited").write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


if (ASKED["fault"] or [""])[0] == "kill when invited":
    join.Invitation.read = killed
script.Faults = Gated
pass_gate(ASKED.get("gate", ""))
script.main()
"""


@pytest.fixture(autouse=True)
def clean(tmp_path: Path) -> Iterator[None]:
    with nothing_left(tmp_path):
        yield
    assert list(tmp_path.rglob("*.ckpt*")) == []  # nor an invitation


class Joining(Crew):
    """Ranks, started one by one; all at once in truth, as starting takes long, but each waits for its gate.

    A gate ``"end 2"`` lets rank 0, or another ``keeper``, wait at the end of epoch 2; any other name, a process before
    it begins.
    """

    def __init__(self, folder: Path, **asked: Any) -> None:
        super().__init__(folder, JOINING)
        self.asked = asked
        write_script(folder)

    def start(self, name: str, rank: int, *gates: str, **asked: Any) -> None:
        gate = name if name.startswith("again") else ""
        super().start(name, rank, **{"keeper": 0, **self.asked, "gates": [*gates, name], "gate": gate, **asked})


def test_several_ranks_come_again_one_in_vain_and_one_too_late(tmp_path: Path) -> None:
    crew = Joining(tmp_path, epochs=5, transport="pairs", trace=True)
    crew.start("zero", 0, "end 0", "end 1", "end 4")
    crew.start("one", 1, fault=["kill", 1], at=[1, 0])
    crew.start("two", 2, fault=["kill", 2], at=[0, 0])
    crew.start("again gone", 2, fault=["kill when invited", 2])
    crew.start("again two", 2, fault=["kill", 2], at=[3, 0])
    crew.start("again one", 1)
    crew.start("again late", 2)

    crew.ended("two")
    crew.at("end 0")
    crew.go("again gone")
    crew.asks(2)
    crew.go("end 0")

    crew.ended("again gone")
    crew.ended("one")
    crew.at("end 1")
    crew.go("again one")
    crew.go("again two")
    crew.asks(1)
    crew.asks(2)
    crew.go("end 1")

    crew.ended("again two")
    crew.at("end 4")
    crew.go("again late")
    crew.asks(2)
    crew.go("end 4")

    codes = crew.end()
    killed = {"one": -9, "two": -9, "again gone": -9, "again two": -9}
    assert codes == {"zero": 0, **killed, "again one": 0, "again late": 1}, crew.left.screens
    crew.left.finished(5 * TICKS, [0, 1])
    # nobody waited as long for the one that had gone as for one that is heard of
    gone_s = float((tmp_path / "invited").read_text())
    assert min(at_s for at_s, _ in crew.left.ranks[0]["batches"] if at_s > gone_s) - gone_s < COME_S / 2
    assert "rank 2 wanted to join and did not come" in crew.said("zero")
    assert "the run that rank 2 wanted to join ended before it was let in" in crew.said("again late")
    assert "Error" not in crew.said("zero") + crew.said("again one")
    traces = [path.read_text().splitlines() for path in (tmp_path / "trace").iterdir()]
    rows = [json.loads(line) for lines in traces for line in lines]
    assert len({row["run"] for row in rows}) == 1  # also of ranks that come again
    assert {row["rank"] for row in rows if row["kind"] == "run"} == {0, 1, 2}
    assert sum(row["kind"] == "run" for row in rows) == 5  # and they go on in their files


@pytest.mark.long
def test_after_rank_0_has_died_a_lower_rank_comes_again_and_lets_in_another(tmp_path: Path) -> None:
    crew = Joining(tmp_path, epochs=6, ranks=4, keeper=2)
    for name, rank in (("zero", 0), ("one", 1), ("three", 3)):
        crew.start(name, rank, fault=["kill", rank], at=[0, 1])
    crew.start("two", 2, "end 1")
    crew.start("again one", 1, "end 3", keeper=1)
    crew.start("again three", 3)

    for name in ("zero", "one", "three"):
        crew.ended(name)
    crew.at("end 1")
    crew.go("again one")
    crew.asks(1)
    crew.go("end 1")
    crew.at("end 3")  # rank 1 is the lowest now, and looks where rank 2 hosts
    crew.go("again three")
    crew.asks(3)
    crew.go("end 3")

    codes = crew.end()
    killed = {"zero": -9, "one": -9, "three": -9}
    assert codes == {**killed, "two": 0, "again one": 0, "again three": 0}, crew.left.screens
    assert "rank 1 has joined in epoch 2" in crew.said("two")
    assert "rank 3 has joined in epoch 4" in crew.said("again one")
    assert crew.left.ranks[3]["batches"]


TWICE = """
import script

script.main()
assert script.Path("rank0.json").exists() or script.Path("rank1.json").exists()
script.main()
"""


def test_a_second_fit_in_the_same_processes_is_without_the_dead_rank(tmp_path: Path) -> None:
    """A new model, Trainer and strategy: they must not wait for it. Evaluation is whole again, too."""
    crew = Joining(tmp_path, epochs=2, fault=["kill", 2], at=[1, 0])
    (tmp_path / "client.py").write_text(TWICE)
    for name, rank in (("zero", 0), ("one", 1), ("two", 2)):
        crew.start(name, rank)
    assert crew.end() == {"zero": 0, "one": 0, "two": -9}, crew.left.screens
    crew.left.finished(2 * TICKS, [0, 1])
    assert crew.said("zero").count("`Trainer.fit` stopped: `max_epochs=2` reached") == 2


@pytest.mark.parametrize("transport", ["auto", "pairs"])
def test_no_server_survives_when_all_ranks_are_killed(tmp_path: Path, transport: str) -> None:
    crew = Joining(tmp_path, ranks=2, epochs=1000, step_s=0.01, transport=transport)
    for rank in range(2):
        crew.start(str(rank), rank, "start 1")
    crew.at("start 1")
    (server,) = [
        child for process in crew.processes.values() for child in psutil.Process(process.pid).children()
        if os.getsid(child.pid) == child.pid
    ]  # fmt: skip
    shared = any("/memfd:lightning-hetero" in m.path for m in server.memory_maps(grouped=False))
    assert shared == (transport == "auto")
    (tmp_path / "go start 1").touch()
    for process in crew.processes.values():
        process.kill()
    assert set(crew.end().values()) == {-9}
    server.wait(10.0)
