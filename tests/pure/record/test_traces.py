"""Traces: what was written is what is read, whatever a crash left behind."""

from __future__ import annotations

import json
import math
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.record import SCHEMA_VERSION, EventWriter, TornTraceWarning, read_events, replay, trace_path
from lightning_hetero.types import Event, SpeedSample

finite = st.floats(allow_nan=False, allow_infinity=False)
plain_values = st.none() | st.booleans() | st.integers() | finite | st.text(max_size=5)
json_values = plain_values | st.lists(plain_values, max_size=3)
some_events = st.lists(
    st.builds(
        Event,
        kind=st.sampled_from(["step", "decision", "fault", "from the future"]),
        rank=st.just(0),
        epoch=st.integers(0, 3),
        step=st.integers(0, 20),
        t_s=finite,
        data=st.dictionaries(st.text(max_size=5), json_values, max_size=3),
    ),
    max_size=6,
)


def step(rank: int, epoch: int, index: int, samples: int = 4, compute_s: float = 0.5, **more: Any) -> Event:
    data = {"samples": samples, "compute_s": compute_s, "wait_s": 0.25, **more}
    return Event(kind="step", rank=rank, epoch=epoch, step=index, t_s=float(index), data=data)


def write(path: Path, events: list[Event], **arguments: Any) -> Path:
    with EventWriter(path, **arguments) as writer:
        for event in events:
            writer.write(event)
    return path


def body(path: Path) -> list[Event]:
    return [e for e in read_events(path) if e.kind != "run"]


@settings(max_examples=15)
@given(some_events, st.integers(1, 5))
def test_round_trip_in_order_of_epoch_and_step(events: list[Event], flush_every: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "new" / "rank0.jsonl", events, flush_every=flush_every)
        assert body(path) == sorted(events, key=lambda e: (e.epoch, e.step, e.rank))


def test_first_line_says_version_world_size_and_names(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [], rank=1, world_size=3, names=["cpu"], about={"engine": "stale"})
    first = json.loads(path.read_text().splitlines()[0])
    assert (first["kind"], first["rank"]) == ("run", 1)
    assert first["data"] == {"version": SCHEMA_VERSION, "world_size": 3, "names": ["cpu"], "engine": "stale"}


def test_lines_are_collected_then_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    writer = EventWriter(path, flush_every=3)
    counts = []
    for i in range(7):
        writer.write(step(0, 0, i))
        counts.append(len(path.read_text().splitlines()) - 1)
    writer.close()
    writer.close()
    assert counts == [0, 0, 3, 3, 3, 6, 6]
    assert len(body(path)) == 7
    with pytest.raises(ValueError, match="closed"):
        writer.write(step(0, 0, 8))


def test_values_json_does_not_know_become_plain(tmp_path: Path) -> None:
    values = [np.float32(0.5), np.arange(3), np.array(2.0), math.inf, {"nan": [math.nan, (1, np.int64(2))]}, Path("a")]
    event = Event(kind="step", rank=0, epoch=0, step=0, t_s=0.0, data={"values": values})
    (event,) = body(write(tmp_path / "t.jsonl", [event]))
    assert event.data == {"values": [0.5, [0, 1, 2], 2.0, None, {"nan": [None, [1, 2]]}, "a"]}


@given(st.integers(1, 10_000))
@settings(max_examples=15)
def test_a_torn_last_line_is_skipped_and_reported(cut: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "t.jsonl", [step(0, 0, i, note="hé\u2028") for i in range(3)])
        content = path.read_bytes()
        last = content[:-1].rindex(b"\n") + 1
        cut = last + 1 + cut % (len(content) - last - 2)  # inside the last line, neither empty nor whole
        path.write_bytes(content[:cut])
        with pytest.warns(TornTraceWarning, match="1 line is cut short or damaged, skipped: line 4"):
            events = body(path)
        assert events == [step(0, 0, i, note="hé\u2028") for i in range(2)]
        write(path, [step(0, 0, 9)])  # a resumed run goes on after it
        with pytest.warns(TornTraceWarning, match="1 line is cut short or damaged, skipped: line 4"):
            assert body(path) == [*events, step(0, 0, 9)]


def test_a_trace_torn_in_its_first_line_is_empty(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [])
    path.write_bytes(path.read_bytes()[:20])
    with pytest.warns(TornTraceWarning, match="line 1,"):
        assert read_events(path) == []
    path.write_bytes(b"")
    assert read_events(path) == []


DAMAGE = b"\0" * 40, b"{", b"not JSON", b'{"kind":"step"}', b"[1]", b"9", b"[" * 9000, b"\xff"


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_lines_anywhere_are_skipped_and_counted(tmp_path: Path, damage: bytes) -> None:
    path = write(tmp_path / "t.jsonl", [step(0, 0, i) for i in range(9)])
    lines = path.read_bytes().splitlines()
    lines[3] = lines[6] = damage
    path.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.warns(TornTraceWarning, match=r"t\.jsonl: 2 lines are cut short or damaged, skipped: line 4,"):
        assert [e.step for e in body(path)] == [0, 1, 3, 4, 6, 7, 8]


def test_a_damaged_first_line_hides_nothing_else(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [step(0, 0, i) for i in range(2)], run="a")
    path.write_bytes(b"{" + path.read_bytes())
    with pytest.warns(TornTraceWarning, match="line 1,"):
        assert [e.step for e in read_events(path, "a")] == [0, 1]


def test_a_file_that_is_no_trace_is_an_error_and_one_of_many_is_skipped(tmp_path: Path) -> None:
    path = trace_path(tmp_path, 1)
    path.write_text("no trace at all")
    with pytest.raises(ValueError, match="not a trace"):
        read_events(path)
    write(trace_path(tmp_path, 0), [step(0, 0, 0)], world_size=2)
    with pytest.warns(TornTraceWarning) as told:
        assert len(body(tmp_path)) == 1
    assert "rank1.jsonl: 1 line is" in str(told[0].message)
    assert "rank1.jsonl: missing, or without a line of this run of 2 ranks" in str(told[1].message)


def test_a_run_is_told_from_another_in_the_same_files(tmp_path: Path) -> None:
    """Both write at the same time, one is resumed last."""

    def opened(run: str, rank: int, unix_s: float) -> EventWriter:
        about = {"unix_s": unix_s}
        return EventWriter(
            trace_path(tmp_path, rank), rank=rank, world_size=2, run=run, about=about, flush_every=2
        )

    writers = {(run, rank): opened(run, rank, 1e9 + n) for n, run in enumerate("ab") for rank in (0, 1)}
    for i in range(8):
        for (run, rank), writer in writers.items():
            writer.write(step(rank, 0, i, samples=ord(run)))
    for writer in writers.values():
        writer.close()
    with pytest.warns(UserWarning, match=r"holds 2 runs; this is the last, 'b' of 2001-09-09 01:46:41 UTC. .*: 'a' of"):
        last = read_events(tmp_path)
    assert last == read_events(tmp_path, "b")
    for run in "ab":
        steps = [e for e in read_events(tmp_path, run) if e.kind == "step"]
        assert [(e.step, e.rank, e.data["samples"]) for e in steps] == [
            (i, r, ord(run)) for i in range(8) for r in (0, 1)
        ]
    opened("a", 0, 1e9 + 5).close()
    with pytest.warns(UserWarning, match="this is the last, 'a' of"):
        assert {e.data.get("samples") for e in body(tmp_path)} == {ord("a")}
    with pytest.raises(ValueError, match=r"run='c' is not in .*: it holds 'b' of .*, 'a' of"):
        read_events(tmp_path, "c")


def test_a_run_without_an_id_before_one_with_an_id(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [step(0, 0, 0)])
    write(path, [step(0, 0, 1)], run="new")
    with pytest.warns(UserWarning, match=r"this is the last, 'new'. run=ID \(--run ID\) selects another: ''"):
        assert [e.step for e in body(path)] == [1]
    assert [e.step for e in read_events(path, "") if e.kind == "step"] == [0]


def test_ranks_without_a_file_are_said(tmp_path: Path) -> None:
    for rank in (0, 2):
        write(trace_path(tmp_path, rank), [step(rank, 0, 0)], rank=rank, world_size=12)
    with pytest.warns(TornTraceWarning, match=r"rank1\.jsonl, rank3\.jsonl, .*rank9\.jsonl, \.\.\.: missing"):
        assert len(body(tmp_path)) == 2


@pytest.mark.parametrize("version", [SCHEMA_VERSION + 1, "1", None])
def test_another_version_is_an_error_that_says_what_to_do(tmp_path: Path, version: Any) -> None:
    path = write(tmp_path / "t.jsonl", [step(0, 0, 0)])
    first, *rest = path.read_text().splitlines()
    row = json.loads(first)
    row["data"]["version"] = version
    path.write_text("\n".join([json.dumps(row), *rest]) + "\n")
    with pytest.raises(ValueError, match=rf"schema version {version!r}.*reads schema version {SCHEMA_VERSION}"):
        read_events(path)
    path.write_text("\n".join(rest) + "\n")
    with pytest.raises(ValueError, match="no 'run' line"):
        read_events(path)


def test_a_folder_is_merged_in_order(tmp_path: Path) -> None:
    world = 11  # rank10 sorts before rank2 as a name
    for rank in range(world):
        steps = [step(rank, e, i) for e in (0, 1) for i in (0, 1)]
        write(trace_path(tmp_path, rank), steps, rank=rank, world_size=world)
    (tmp_path / "notes.txt").write_text("not a trace")
    expected = [step(r, e, i) for e in (0, 1) for i in (0, 1) for r in range(world)]
    assert body(tmp_path) == expected


def test_nothing_to_read_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(FileNotFoundError, match=r"rank0\.jsonl"):
            read_events(path)


@given(st.integers(1, 4), st.integers(0, 6), st.randoms(use_true_random=False))
def test_replay_yields_whole_steps_in_order(world: int, count: int, shuffler: random.Random) -> None:
    both = [(r, i) for i in range(count) for r in range(world)]
    events = [step(r, i // 4, i % 4, samples=r + i, compute_s=0.1 * (r + 1)) for r, i in both]
    decision = Event(kind="decision", rank=0, epoch=0, step=0, t_s=0.0, data={"samples": 1, "compute_s": 1})
    stock = Event(kind="step", rank=9, epoch=0, step=0, t_s=0.0, data={"samples": 1, "step_s": 1.0})
    shuffled = [*events, decision, stock]
    shuffler.shuffle(shuffled)
    found = [sample for row in replay(shuffled) for sample in row]
    assert found == [
        SpeedSample(rank=r, step=i % 4, samples=r + i, compute_s=0.1 * (r + 1), wait_s=0.25) for r, i in both
    ]


def test_replay_passes_over_incomplete_steps_and_takes_the_later_record() -> None:
    events = [step(rank, 0, at) for rank, at in ((0, 0), (1, 0), (0, 1), (0, 2), (1, 2))] + [step(0, 0, 2, samples=7)]
    assert [[(s.step, s.rank, s.samples) for s in row] for row in replay(events)] == [
        [(0, 0, 4), (0, 1, 4)],
        [(2, 0, 7), (2, 1, 4)],
    ]
