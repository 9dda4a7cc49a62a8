"""The table of the fault matrix is whole, and its checks bite."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.faults import observe
from tests.faults.cells import QUICK, cells, hook_cells, launchers_of, places
from tests.faults.judge import Outcome, judge
from tests.faults.outcomes import blamed, expected
from tests.faults.soak import cell_of
from tests.faults.table import ENGINES, FAULTS, LAUNCHERS

LOST = "rank 1 is gone without a word (its connection is closed)"
EVERY = {cell.name: cell for cell in (*cells(), *hook_cells())}


def test_every_cell_has_a_name_of_its_own_and_says_what_must_come_of_it() -> None:
    assert len(EVERY) == len([*cells(), *hook_cells()])
    outcomes = Counter(expected(cell).outcome for cell in EVERY.values())
    assert outcomes.keys() == {"survived", "ended", "refused"}
    assert set(QUICK) <= EVERY.keys()


def test_every_engine_meets_every_launcher_and_every_place() -> None:
    found = {(cell.engine, cell.launcher, cell.fault.name) for cell in EVERY.values()}
    for engine in ENGINES:
        assert {(engine, way, "SIGKILL of a worker") for way in launchers_of(engine)} <= found
        assert {(engine, "SLURM", f"exception in {place}") for place in places()} <= found


@pytest.mark.parametrize("name", FAULTS)
def test_who_does_not_come_back_was_hit(name: str) -> None:
    fault = FAULTS[name]
    assert set(fault.gone) <= set(fault.hit) or fault.asked["kind"].endswith(" all")


def test_a_seed_is_all_there_is_to_a_run_of_the_soak() -> None:
    seen = [cell_of(seed) for seed in range(300)]
    assert seen == [cell_of(seed) for seed in range(300)]
    assert [cell.more for cell in seen] == [cell_of(seed).more for seed in range(300)]
    assert {cell.engine for cell in seen} == set(ENGINES) and {cell.launcher for cell in seen} == set(LAUNCHERS)
    assert len({cell.fault.name for cell in seen}) > 15


# ---- the checks bite ------------------------------------------------------------------------------------------------


def write(path: Path, *rows: str) -> None:
    path.write_text("".join(f"{row}\n" for row in rows))


def test_samples_that_are_lost_counted_twice_or_unknown_are_found(tmp_path: Path) -> None:
    write(tmp_path / "issued-0-7.jsonl", '{"epoch": 0, "ids": [0, 1]}', '{"epoch": 1, "ids": [2]}')
    write(tmp_path / "applied-7.jsonl", '{"ids": [0, 1], "times": [1.0, 2.0]}', '{"ids": [0, 9], "times": [1.0, 1.0]}')
    books = observe.samples(tmp_path, 4)
    assert books.issued == {0, 1, 6} and books.last == {7: {6}}
    assert "{0: 2.0, 1: 2.0}" in books.twice()[0]
    assert books.unknown() == ["samples counted that no rank was given: [9]"]
    assert books.lost({0, 1, 6, 7}, [7], spared={7}) == ["samples lost, by process 7: [6]"]
    assert books.lost({0, 1}, [7], set()) == []


@pytest.mark.parametrize(
    ("name", "codes", "finished", "screens", "found"),
    [
        ("stale, SLURM: SIGKILL of a worker", [0, -9, 0], [0, 2], ["", "", ""], ""),
        ("stale, SLURM: SIGKILL of a worker", [0, -9, 1], [0], ["", "", ""], "came to the end: [0]"),
        ("stale, SLURM: SIGKILL of a worker", [0, -9, 1], [0, 2], ["", "", ""], "exit code 1 of ranks [2]"),
        ("balanced, SLURM: SIGKILL of a worker", [1, -9, 1], [], [LOST] * 3, ""),
        ("balanced, SLURM: SIGKILL of a worker", [1, -9, 0], [], [LOST] * 3, "exit code 0"),
        ("balanced, SLURM: SIGKILL of a worker", [1, -9, 1], [], ["", "", LOST], "ranks [0] has no cause"),
        ("balanced, SLURM: SIGKILL of a worker", [1, -9, 1], [2], [LOST] * 3, "should not: [2]"),
    ],
)
def test_what_is_not_as_the_table_says_is_found(
    name: str, codes: list[int | None], finished: list[int], screens: list[str], found: str
) -> None:
    cell = EVERY[name]
    outcome = "survived" if 0 in codes and finished else "ended"
    result = Outcome(name, outcome, 3.0, codes, finished, screens=screens)
    violations = judge(cell, expected(cell), result, [(rank,) for rank in range(3)], happened=True)
    assert (found in "; ".join(violations)) if found else violations == []


def test_one_that_ends_too_late_is_found() -> None:
    cell = EVERY["balanced, SLURM: SIGKILL of a worker"]
    late = Outcome(cell.name, "ended", 400.0, [1, -9, 1], [], screens=[LOST] * 3)
    ranks = [(rank,) for rank in range(3)]
    assert judge(cell, expected(cell), late, ranks, happened=True) == [
        "ended 400 s after the fault, and should within 60 s"
    ]


def test_what_a_killed_job_leaves_is_found(tmp_path: Path) -> None:
    cell = EVERY["balanced, SLURM: SIGKILL of every process at once"]
    job, temporary, memory = (tmp_path / name for name in ("job", "temporary", "memory"))
    for folder in (job, temporary, memory):
        folder.mkdir()
    assert observe.files_left(cell, job, temporary, memory, []) == []
    (job / ".step=5.ckpt.77.part").touch()
    (temporary / "tmpabc").touch()
    (temporary / "torchelastic_1").touch()
    (memory / "slots").touch()
    assert observe.files_left(cell, job, temporary, memory, [str(memory / "slots")]) == [
        "part of a file is left: .step=5.ckpt.77.part",
        "temporary file is left: tmpabc",
        "shared memory is left: slots",
        f"still there: {memory / 'slots'}",
    ]


def test_who_is_blamed_without_having_done_it_is_found() -> None:
    assert blamed("rank 2 is gone without a word (its connection is closed)", (1,)) == ["rank 2"]
    assert blamed("rank 1 failed: RuntimeError: ...", (1,)) == []
