"""With whom all go on where some come in and some are lost: real stores, threads for ranks, no process groups."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from lightning_hetero.base.elastic import admission
from lightning_hetero.base.elastic.admission import Admission
from lightning_hetero.base.elastic.coming import Beats, Coming
from lightning_hetero.base.elastic.members import Members
from lightning_hetero.transport.groups import MemberMissingError
from lightning_hetero.transport.run_store import RunStore
from tests.e2e.stale.scripts import free_port

pytestmark = pytest.mark.ranks

GENERATION = 8


@dataclass
class _Address:
    host: str
    port: int


@dataclass
class _Met:
    alive: tuple[int, ...]
    notices: tuple[str, ...] = ()


@dataclass
class Run:
    """What the ranks of a run share: who is connected, who is not heard of; where all meet."""

    store: dist.TCPStore
    connected: set[int]
    silent: set[int] = field(default_factory=set[int])
    met: dict[str, set[int]] = field(default_factory=dict[str, set[int]])
    changed: threading.Condition = field(default_factory=threading.Condition)

    def meet(self, rank: int, what: str) -> _Met:
        with self.changed:
            self.met.setdefault(what, set()).add(rank)
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: self.met[what] >= self.connected, 20.0)
            return _Met(tuple(sorted(self.connected)))


class OneRank:
    """A rank's `Admission`, and all that it needs."""

    def __init__(self, run: Run, rank: int, alive: Sequence[int]) -> None:
        self.run, self.rank, self.meetings = run, rank, 4
        self.address = _Address("127.0.0.1", run.store.port)
        self.members = Members(rank, 4)
        self.members.alive = tuple(alive)
        self.rebuilt: list[tuple[int, ...]] = []
        self.told: list[str] = []
        self.fails: RuntimeError | None = None
        self.members.warn_once = lambda text, **_: self.told.append(text)  # type: ignore[method-assign]
        trainer: Any = type("Trainer", (), {"callbacks": [], "current_epoch": 3})()
        store = RunStore(None, b"")
        self.admission = Admission(
            trainer, self, self.members, self, self, store=store, generation=GENERATION  # type: ignore[arg-type]
        )

    # as a place
    def alive(self) -> set[int]:
        return set(self.run.connected)

    def meet(self, what: str) -> _Met:
        self.meetings += 1
        return self.run.meet(self.rank, what)

    # as groups
    def rebuild(self, alive: tuple[int, ...], generation: int, *, meeting_s: float, living: Callable[[], Any]) -> None:
        self.members.alive = alive
        if self.fails is not None:
            raise self.fails

    def rebuild_among_living(self, alive: tuple[int, ...], generation: int) -> None:
        assert generation == self.meetings
        self.members.alive = alive
        self.rebuilt.append(alive)

    # as requests
    def silent(self, ranks: Sequence[int], **_: Any) -> list[int]:
        return [rank for rank in ranks if rank in self.run.silent]

    def announce(self) -> None: ...

    def host(self) -> str:
        return ""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Members 0 and 1 are connected; what takes seconds for a user takes less here."""
    monkeypatch.setattr(admission, "_ASK_S", 0.01)
    monkeypatch.setattr(admission, "_LOOK_S", 0.005)
    monkeypatch.setattr(admission, "leave_default_group", lambda: None)
    monkeypatch.setattr(admission.compat, "trainer_callbacks", lambda trainer: trainer.callbacks)
    store = dist.TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)
    run = Run(store, {0, 1})
    yield run
    del run.store, store
    gc.collect()


class Ranks:
    """Lets ranks do what they do at once, each in a thread."""

    def __init__(self, run: Run, before: Sequence[int] = (0, 1), asking: Sequence[int] = (2, 3)) -> None:
        self.run, self.before, self.asking = run, tuple(before), tuple(asking)
        self.alive = tuple(sorted({*before, *asking}))
        self.pool = ThreadPoolExecutor(4)
        self.ranks: dict[int, OneRank] = {}

    def member(self, rank: int) -> Future[str]:
        own = self.ranks[rank] = OneRank(self.run, rank, self.before)
        return self.pool.submit(own.admission._come_together, self.alive, self.before)

    def joining_rank(self, rank: int) -> Future[None]:
        """It is connected."""
        own = self.ranks[rank] = OneRank(self.run, rank, self.alive)

        def come_in() -> None:
            with self.run.changed:
                self.run.connected.add(rank)
            try:
                own.admission.come_in()
            except RuntimeError:
                with self.run.changed:
                    self.run.connected.discard(rank)
                    self.run.changed.notify_all()
                raise

        return self.pool.submit(come_in)

    def rebuilt(self) -> dict[int, list[tuple[int, ...]]]:
        return {rank: own.rebuilt for rank, own in self.ranks.items()}


def test_all_begin_together_when_the_joining_ranks_are_ready(run: Run) -> None:
    ranks = Ranks(run)
    members = [ranks.member(0), ranks.member(1)]
    first = ranks.joining_rank(2)
    with pytest.raises(TimeoutError):  # not before the other one
        members[0].result(0.2)
    second = ranks.joining_rank(3)
    assert [m.result(20.0) for m in members] == ["", ""]
    assert (first.result(20.0), second.result(20.0)) == (None, None)
    assert run.met == {} and not any(ranks.rebuilt().values())


def test_without_a_joining_rank_that_falls_silent_the_others_begin_with_those_that_are_ready(run: Run) -> None:
    ranks = Ranks(run)
    members = [ranks.member(0), ranks.member(1)]
    ready = ranks.joining_rank(2)
    with pytest.raises(TimeoutError):
        ready.result(0.2)
    run.silent.add(3)
    why = "rank 3 died or fell silent"
    assert [m.result(20.0) for m in members] == [why, why] and ready.result(20.0) is None
    assert ranks.rebuilt() == {rank: [(0, 1, 2)] for rank in (0, 1, 2)}
    assert run.met == {"not all joining ranks have come": {0, 1, 2}}
    late = ranks.joining_rank(3)  # it was only stopped
    with pytest.raises(RuntimeError, match=f"the others train without rank 3, which wanted to join: {why}; start it"):
        late.result(20.0)
    assert ranks.rebuilt()[3] == []


def test_a_connected_joining_rank_that_is_not_ready_in_time_keeps_nobody(run: Run) -> None:
    """The members wait for it where all meet, and it leaves."""
    ranks = Ranks(run, asking=(2,))
    members = [ranks.member(0), ranks.member(1)]
    with run.changed:
        run.connected.add(2)
    run.silent.add(2)
    with pytest.raises(TimeoutError):
        members[0].result(0.2)
    with suppress(RuntimeError):
        ranks.joining_rank(2).result(20.0)
    assert all("rank 2 died or fell silent" in m.result(20.0) for m in members)
    assert ranks.rebuilt() == {0: [(0, 1)], 1: [(0, 1)], 2: []}


def test_when_the_lowest_dies_nobody_waits_for_joining_ranks_that_still_load(run: Run) -> None:
    """Only it would know whether they live."""
    ranks = Ranks(run)
    left, ready = ranks.member(1), ranks.joining_rank(2)
    Coming(run.store, GENERATION).waits(0)
    with pytest.raises(TimeoutError):
        left.result(0.2)
    run.connected.discard(0)
    assert "rank 0 died" in left.result(20.0) and ready.result(20.0) is None
    assert ranks.rebuilt() == {1: [(1, 2)], 2: [(1, 2)]}


def test_when_another_member_dies_joining_ranks_that_still_load_are_waited_for(run: Run) -> None:
    ranks = Ranks(run)
    left, ready = ranks.member(0), ranks.joining_rank(2)
    Coming(run.store, GENERATION).waits(1)
    run.connected.discard(1)
    with pytest.raises(TimeoutError):
        left.result(0.3)
    assert ranks.joining_rank(3).result(20.0) is ready.result(20.0) is None
    assert left.result(20.0) == ""  # where all meet next, rank 1 is missed
    assert not any(ranks.rebuilt().values())


def test_joining_ranks_that_no_member_is_left_for_go_on_alone(run: Run) -> None:
    ranks = Ranks(run)
    for member in (0, 1):
        Coming(run.store, GENERATION).waits(member)
    joining_ranks = [ranks.joining_rank(2), ranks.joining_rank(3)]
    with pytest.raises(TimeoutError):
        joining_ranks[0].result(0.2)
    run.connected -= {0, 1}
    assert [joining_rank.result(20.0) for joining_rank in joining_ranks] == [None, None]
    assert ranks.rebuilt() == {2: [(2, 3)], 3: [(2, 3)]}


def test_a_member_that_falls_silent_is_left_out(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_MEMBER_S", 0.3)
    ranks = Ranks(run, asking=(2,))
    left, ready = ranks.member(0), ranks.joining_rank(2)
    with run.changed:
        assert run.changed.wait_for(lambda: bool(run.met), 20.0)
        run.connected.discard(1)  # the server gives it up
        run.changed.notify_all()
    assert "rank 1 died or fell silent" in left.result(20.0) and ready.result(20.0) is None
    assert ranks.rebuilt() == {0: [(0, 2)], 2: [(0, 2)]}


def test_the_members_watch_also_over_a_joining_rank_with_a_lower_rank(run: Run) -> None:
    run.connected = {2, 3}
    ranks = Ranks(run, before=(2, 3), asking=(1,))
    members = [ranks.member(2), ranks.member(3)]
    run.silent.add(1)
    assert all("rank 1 died or fell silent" in m.result(20.0) for m in members)
    assert ranks.rebuilt() == {2: [(2, 3)], 3: [(2, 3)]}


def test_where_a_group_cannot_be_made_all_are_told_and_go_on_as_they_were(run: Run) -> None:
    ranks = Ranks(run, asking=(2,))
    ranks.ranks[1] = failing = OneRank(run, 1, (0, 1))
    failing.fails = MemberMissingError(GENERATION, [2], 3.0)
    other = ranks.member(0)
    assert "rank 2 did not come" in failing.admission._come_together((0, 1, 2), (0, 1))
    assert "rank 2 did not come" in other.result(20.0)
    assert ranks.rebuilt() == {0: [(0, 1)], 1: [(0, 1)]}
    with pytest.raises(RuntimeError, match="the process group with joining ranks is not made: rank 2 did not come"):
        Coming(run.store, GENERATION).living([0, 1, 2])


def test_what_is_told_names_who_is_in_and_who_is_not(run: Run) -> None:
    ranks = Ranks(run)
    own = ranks.ranks[0] = OneRank(run, 0, (0, 1))
    own.admission._invitations, own.nodes = [], {}  # type: ignore[attr-defined]
    own.invite = lambda *_: None  # type: ignore[attr-defined]
    let_in, other, ready = ranks.pool.submit(own.admission._let_in, [2, 3]), ranks.member(1), ranks.joining_rank(2)
    with pytest.raises(TimeoutError):
        ready.result(0.2)
    run.silent.add(3)
    for future in (let_in, other, ready):
        future.result(20.0)
    assert own.told == [
        "rank 3 wanted to join and did not come: rank 3 died or fell silent",
        "rank 2 has joined in epoch 3",
    ]


def test_who_wrote_the_checkpoint_removes_it_also_if_a_joining_rank_is_lower(run: Run) -> None:
    removed: list[str] = []
    own = OneRank(run, 2, (2, 3))
    own.admission._trainer.strategy = SimpleNamespace(  # type: ignore[assignment]
        broadcast=lambda value: value, checkpoint_io=SimpleNamespace(remove_checkpoint=removed.append)
    )
    own.admission._asking, own.admission._checkpoint = [1], "/a.ckpt"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admission.compat, "write_checkpoint", lambda trainer, path: None)
        own.admission._save()
    own.members.alive = (1, 2, 3)
    own.admission._remove_checkpoint()
    own.admission._remove_checkpoint()
    assert removed == ["/a.ckpt"]


def test_a_decision_holds_for_all(run: Run) -> None:
    one, other = Coming(run.store, GENERATION), Coming(run.store, GENERATION)
    one.decide([2, 3])
    assert other.decided() is None  # not all are ready
    one.ready(3)
    one.decide([2, 3], "it takes too long")
    other.ready(2)
    other.decide([2, 3])
    assert one.decided() == other.decided() == ([3], "it takes too long")
    assert Coming(run.store, GENERATION + 1).decided() is None


def test_who_stops_to_beat_is_silent_after_a_time_since_one_began_to_look() -> None:
    count = {1: b"", 2: b"7"}
    beats = Beats(lambda rank: count[rank])
    assert beats.silent([1, 2], 100.0, for_s=2.0) == []
    count[2] = b"8"
    assert beats.silent([1, 2], 103.0, for_s=2.0) == [1]
    count[1] = b"1"
    assert beats.silent([1, 2], 106.0, for_s=2.0) == [2]
    beats.forget(2)
    assert beats.silent([1, 2], 109.0, for_s=2.0) == [1]
