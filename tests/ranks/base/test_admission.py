"""With whom all go on where some come in and some are lost: real stores, threads for ranks, no process groups."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from lightning_hetero.base.elastic import admission, join
from lightning_hetero.base.elastic.admission import Admission
from lightning_hetero.base.elastic.coming import Coming
from lightning_hetero.base.elastic.members import Members
from tests.ports import free_port

pytestmark = pytest.mark.ranks

GENERATION = 8


@dataclass
class _Address:
    host: str
    port: int


@dataclass
class Run:
    """What the ranks of a run share: who is connected, who is not heard of; where all meet."""

    store: dist.TCPStore
    connected: set[int]
    silent: set[int] = field(default_factory=set[int])
    met: dict[str, set[int]] = field(default_factory=dict[str, set[int]])
    changed: threading.Condition = field(default_factory=threading.Condition)

    def meet(self, rank: int, what: str) -> tuple[int, ...]:
        with self.changed:
            self.met.setdefault(what, set()).add(rank)
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: self.met[what] >= self.connected, 20.0)
            return tuple(sorted(self.connected))


class OneRank:
    """A rank's `Admission`, and all that it needs: it stands for the meetings, their place, and the requests."""

    def __init__(self, run: Run, rank: int, alive: Sequence[int]) -> None:
        self.run, self.rank, self.meetings, self.place = run, rank, 4, self
        self.address = _Address("127.0.0.1", run.store.port)
        self.members = Members(rank, 4)
        self.members.alive = tuple(alive)
        self.changed: list[Callable[[tuple[int, ...]], None]] = []
        self.told: list[str] = []
        self.fails = ""
        self.members.warn_once = lambda text, **_: self.told.append(text)  # type: ignore[method-assign]
        trainer: Any = type("Trainer", (), {"callbacks": [], "current_epoch": 3})()
        own: Any = self
        store: Any = SimpleNamespace(reached=lambda: None)
        self.admission = Admission(trainer, own, self.members, own, store=store, generation=GENERATION)

    # as a place
    def alive(self) -> set[int]:
        return set(self.run.connected)

    def expect(self, ranks: Collection[int]) -> None: ...

    # as meetings
    def regroup(self, alive: tuple[int, ...], generation: int, *, meeting_s: float, living: Callable[[], Any]) -> str:
        assert generation == GENERATION
        self.members.alive = alive
        return self.fails

    def gather(self, what: str) -> None:
        self.members.alive = self.run.meet(self.rank, what)

    # as requests
    def silent(self, ranks: Sequence[int], **_: Any) -> list[int]:
        return [rank for rank in ranks if rank in self.run.silent]

    def announce(self) -> None: ...

    def host(self) -> str:
        return ""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Members 0 and 1 are connected; what takes seconds for a user takes less here."""
    monkeypatch.setattr(admission, "_LOOK_S", 0.005)
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

    def member(self, rank: int, fails: str = "") -> Future[str]:
        own = self.ranks[rank] = OneRank(self.run, rank, self.before)
        own.fails = fails
        return self.pool.submit(own.admission._come_together, list(self.asking), self.alive)

    def joining_rank(self, rank: int) -> Future[None]:
        """It is connected."""
        own = self.ranks[rank] = OneRank(self.run, rank, self.alive)
        with self.run.changed:
            self.run.connected.add(rank)
        return self.pool.submit(own.admission.come_in)

    def together(self) -> set[tuple[int, ...]]:
        return {own.members.alive for own in self.ranks.values()}


def test_all_begin_together_when_the_joining_ranks_have_come(run: Run) -> None:
    ranks = Ranks(run)
    members = [ranks.member(0), ranks.member(1)]
    first = ranks.joining_rank(2)
    with pytest.raises(TimeoutError):  # not before the other one
        members[0].result(0.2)
    second = ranks.joining_rank(3)
    assert [m.result(20.0) for m in members] == ["", ""]
    assert (first.result(20.0), second.result(20.0)) == (None, None)
    assert run.met == {"somebody comes": {0, 1, 2, 3}} and ranks.together() == {(0, 1, 2, 3)}


def test_without_a_joining_rank_that_falls_silent_the_others_begin_with_those_that_have_come(run: Run) -> None:
    ranks = Ranks(run)
    members = [ranks.member(0), ranks.member(1)]
    ready = ranks.joining_rank(2)
    with pytest.raises(TimeoutError):
        ready.result(0.2)
    run.silent.add(3)
    assert [m.result(20.0) for m in members] == ["", ""] and ready.result(20.0) is None
    assert ranks.together() == {(0, 1, 2)}


def test_a_joining_rank_that_is_connected_is_waited_for_where_all_meet(run: Run) -> None:
    """And not left out because it is not heard of at the ranks' first meeting place."""
    ranks = Ranks(run, asking=(2,))
    run.connected.add(2)
    run.silent.add(2)
    members = [ranks.member(0), ranks.member(1)]
    with pytest.raises(TimeoutError):
        members[0].result(0.2)
    assert ranks.joining_rank(2).result(20.0) is None
    assert [m.result(20.0) for m in members] == ["", ""] and ranks.together() == {(0, 1, 2)}


def test_the_members_watch_also_over_a_joining_rank_with_a_lower_rank(run: Run) -> None:
    run.connected = {2, 3}
    ranks = Ranks(run, before=(2, 3), asking=(1,))
    members = [ranks.member(2), ranks.member(3)]
    with pytest.raises(TimeoutError):
        members[1].result(0.2)
    run.silent.add(1)
    assert [m.result(20.0) for m in members] == ["", ""] and ranks.together() == {(2, 3)}


def test_where_a_group_cannot_be_made_all_are_told_and_go_on_as_they_were(run: Run) -> None:
    ranks = Ranks(run, asking=(2,))
    members = [ranks.member(0, "rank 2 did not come"), ranks.member(1, "rank 2 did not come")]
    assert [m.result(20.0) for m in members] == ["rank 2 did not come"] * 2 and ranks.together() == {(0, 1)}
    with pytest.raises(RuntimeError, match="the process group with joining ranks is not made: rank 2 did not come"):
        Coming(run.store, GENERATION).living([0, 1, 2])
    assert Coming(run.store, GENERATION + 1).living([2]) == {2}


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
        "rank 3 wanted to join and did not come: it died or fell silent",
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


def test_who_stops_to_beat_is_silent_after_a_time_since_one_began_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    store = {f"{join._BEATS}/2": b"7"}
    requests: Any = join.JoinRequests(SimpleNamespace())  # type: ignore[arg-type]
    requests._store = SimpleNamespace(check=lambda keys: keys[0] in store, get=store.__getitem__)

    def silent_at(now_s: float) -> list[int]:
        monkeypatch.setattr(join, "awake_s", lambda: now_s)
        return requests.silent([1, 2], for_s=2.0)

    assert silent_at(100.0) == []
    store[f"{join._BEATS}/2"] = b"8"
    assert silent_at(103.0) == [1]
    store[f"{join._BEATS}/1"] = b"1"
    assert silent_at(106.0) == [2]
    requests._beats.pop(2)  # it is invited, and begins again
    assert silent_at(109.0) == [1]
