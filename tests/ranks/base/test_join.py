"""How a rank that comes late and the members of a run find each other: over a real store; threads for processes."""

from __future__ import annotations

import gc
import os
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from torch.utils.data import DataLoader

from lightning_hetero.base.elastic import join
from lightning_hetero.base.elastic.admission import Admission
from lightning_hetero.base.elastic.join import Coming, Invitation, JoiningRank, JoinRequests
from lightning_hetero.base.elastic.members import Members
from lightning_hetero.transport.run_store import BoundedStore, RunStore
from tests.ports import free_port
from tests.ranks.harness import RankEnvironment
from tests.ranks.kit import Toy, quiet_trainer, regression

pytestmark = pytest.mark.ranks

ADDRESS = {"directory": "/dev/shm/x#y", "host": "127.0.0.1", "port": 7, "token": "00" * 16, "near": [0, 1, 2]}
INVITATION = Invitation(
    checkpoint="/a.ckpt", generation=8, members=(0, 2), nodes=((0, 0), (2, 1)), meetings=5, address=ADDRESS
)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[LightningEnvironment]:
    """Of a rank that somebody else has started; what takes seconds for a user takes less here."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(join, "_LOOK_S", 0.5)
    monkeypatch.setattr(join, "_PAUSE_S", 0.005)
    yield LightningEnvironment()
    gc.collect()


@pytest.fixture
def requests(environment: LightningEnvironment) -> Iterator[JoinRequests]:
    """Open."""
    requests = JoinRequests(environment)
    assert requests.host() == ""
    yield requests
    requests.close([])


def host(environment: LightningEnvironment) -> dist.TCPStore:
    """What torch does at rank 0."""
    return dist.TCPStore(environment.main_address, environment.main_port, is_master=True, wait_for_workers=False)


class Waiting(threading.Thread):
    """A joining rank that waits; keeps what it gets."""

    def __init__(self, environment: LightningEnvironment, rank: int = 2) -> None:
        super().__init__()
        self.joining_rank = JoiningRank(environment, rank)
        self.got: Any = None
        self.start()

    def run(self) -> None:
        try:
            self.got = self.joining_rank.wait()
        except (RuntimeError, OSError) as error:
            self.got = error

    def ended(self) -> Any:
        self.join(20.0)
        assert not self.is_alive()
        return self.got


def asked(requests: JoinRequests, ranks: list[int]) -> list[int]:
    """Asks until somebody is there."""
    deadline_s = time.monotonic() + 20.0
    while not (found := requests.asking(ranks)):
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
    return found


def invite(requests: JoinRequests, rank: int, invitation: Invitation = INVITATION) -> None:
    """Into a file of its own."""
    requests.invite(rank, invitation, os.path.join(tempfile.mkdtemp(), "invitation"))


# ---- invitations ----------------------------------------------------------------------------------------------


def test_an_invitation_survives_its_file_which_is_the_users_alone(tmp_path: Path) -> None:
    path = tmp_path / "invitation"
    INVITATION.write(str(path), "4711")
    assert Invitation.read(str(path), "4711") == INVITATION
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):  # somebody was there before us
        INVITATION.write(str(path), "4711")


@pytest.mark.parametrize("what", ["readable", "of another user", "for another", "url", "relative", "link", "folder"])
def test_an_invitation_that_somebody_else_may_have_written_is_not_believed(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, checkpoint = tmp_path / "invitation", {"url": "http://x/a.ckpt", "relative": "a.ckpt"}.get(what, "/a.ckpt")
    replace(INVITATION, checkpoint=checkpoint).write(str(path), "1" if what == "for another" else "4711")
    if what == "readable":
        path.chmod(0o640)
    elif what == "of another user":
        monkeypatch.setattr(os, "getuid", lambda: 12345678)
    elif what in ("link", "folder"):
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere") if what == "link" else path.mkdir(0o700)
    with pytest.raises(OSError, match="Too many levels of symbolic links" if what == "link" else "is not believed"):
        Invitation.read(str(path), "4711")


class Noting:
    """A store that keeps what is written into it."""

    def __init__(self, store: Any) -> None:
        self._store, self.written = store, list[str]()

    def set(self, key: str, value: str) -> None:
        self.written.append(value)
        self._store.set(key, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_the_store_that_anybody_may_read_has_nothing_secret(environment: Any, requests: JoinRequests) -> None:
    noting: Any = Noting(requests._store)
    requests._store = noting
    waiting = Waiting(environment)
    asked(requests, [2])
    invite(requests, 2)
    assert waiting.ended() == INVITATION
    written = [*noting.written, noting.get("lightning_hetero/run").decode()]
    assert len(written) > 1 and not any(ADDRESS["token"] in value or "#" in value for value in written)


def test_an_invitation_of_a_stranger_in_the_store_is_refused(
    environment: Any, requests: JoinRequests, tmp_path: Path
) -> None:
    waiting = Waiting(environment)
    asked(requests, [2])
    forged = tmp_path / "invitation"
    replace(INVITATION, checkpoint="/tmp/evil.ckpt").write(str(forged), "guessed")
    store = dist.TCPStore(environment.main_address, environment.main_port, is_master=False)
    store.set("lightning_hetero/invited/2", str(forged))
    assert "not for this process" in str(waiting.ended())


# ---- is there a run to join? ----------------------------------------------------------------------------------


def test_nobody_is_a_joining_rank_where_nothing_runs(environment: LightningEnvironment) -> None:
    assert JoiningRank.find(environment, 2) is None  # no store
    store = host(environment)
    assert JoiningRank.find(environment, 2) is None  # a run that is just starting
    JoinRequests(environment).announce()
    assert store.check(["lightning_hetero/run"])
    assert JoiningRank.find(environment, 2) is not None


def test_only_ranks_that_somebody_else_started_can_join(
    requests: JoinRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = LightningEnvironment()
    assert JoiningRank.find(environment, 2) is not None
    assert JoiningRank.find(environment, 0) is None
    assert JoiningRank.find(TorchElasticEnvironment(), 2) is None
    with monkeypatch.context() as patch:
        patch.delenv("LOCAL_RANK")
        assert JoiningRank.find(environment, 2) is None  # Lightning will start the ranks
    monkeypatch.setenv("LIGHTNING_HETERO_LAUNCHER", "1:-1")
    assert JoiningRank.find(environment, 2) is None


# ---- asking and answering -------------------------------------------------------------------------------------


def test_who_asks_is_found_as_often_as_one_looks_and_invited_once(environment: Any, requests: JoinRequests) -> None:
    assert requests.asking([1, 2]) == []
    waiting = Waiting(environment)
    assert asked(requests, [1, 2]) == [2] == requests.asking([1, 2])
    assert requests.asking([1]) == []
    invite(requests, 2)
    assert waiting.ended() == INVITATION
    assert requests.asking([1, 2]) == []
    again = Waiting(environment)  # it died, and has no use for the invitation before
    assert asked(requests, [2]) == [2]
    later = replace(INVITATION, checkpoint="/b.ckpt", generation=10, members=(0, 1, 2), meetings=50)
    invite(requests, 2, later)
    assert again.ended() == later


def test_several_wait_at_once(environment: Any, requests: JoinRequests) -> None:
    waiting = {rank: Waiting(environment, rank) for rank in (1, 2)}
    asked(requests, [1])
    asked(requests, [2])
    assert requests.asking([1, 2, 3]) == [1, 2]
    for rank in waiting:
        invite(requests, rank)
    assert [thread.ended() for thread in waiting.values()] == [INVITATION, INVITATION]


def test_who_has_died_since_he_asked_is_not_there(
    environment: Any, requests: JoinRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(join, "_ANSWER_S", 0.1)
    store = dist.TCPStore(environment.main_address, environment.main_port, is_master=False)
    store.set("lightning_hetero/asks/2", "4711")
    assert requests.asking([2]) == []
    assert not store.check(["lightning_hetero/asks/2"])  # nobody waits for him a second time
    monkeypatch.setattr(join, "_ANSWER_S", 20.0)
    waiting = Waiting(environment)
    assert asked(requests, [2]) == [2]
    invite(requests, 2)
    assert waiting.ended() == INVITATION


def test_an_invitation_that_nobody_has_read_is_not_for_the_next(environment: Any, requests: JoinRequests) -> None:
    invite(requests, 2)
    waiting = Waiting(environment)
    assert asked(requests, [2]) == [2]
    requests.close([2])
    assert "ended before it was let in" in str(waiting.ended())


def test_whether_a_joining_rank_comes_or_has_gone_is_said_once(environment: Any) -> None:
    store = host(environment)
    member, joining_rank = Coming(store, 8), Coming(store, 8)
    assert joining_rank.comes(2)
    member.goes(2)
    assert joining_rank.comes(2) and member.living([1, 2]) == {1, 2}
    member.goes(1)
    assert not joining_rank.comes(1) and joining_rank.living([1, 2]) == {2}
    assert Coming(store, 9).comes(1), "another group"


class Comes(threading.Thread):
    """A joining rank that comes into a process group; keeps the invitation, or the error.

    Args:
        fails: how often no group can be made with it.
    """

    def __init__(self, joining_rank: JoiningRank, fails: int = 0) -> None:
        super().__init__()
        self.joining_rank, self.fails, self.got = joining_rank, fails, None
        self.built: list[int] = []
        self.start()

    def run(self) -> None:
        try:
            self.got: Any = self.joining_rank.come(self.build)
        except RuntimeError as error:
            self.got = error

    def build(self, invitation: Invitation, store: dist.Store, coming: Coming) -> None:
        self.built.append(invitation.generation)
        if len(self.built) <= self.fails:
            raise RuntimeError("a rank did not come")


class Place:
    """Where the members of a new group find each other."""

    def __init__(self) -> None:
        self.store = dist.TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)


@pytest.fixture
def place() -> Iterator[Place]:
    place = Place()
    yield place
    del place.store
    gc.collect()


def invited(requests: JoinRequests, place: Place, *generations: int) -> None:
    """Invites rank 2 as often as that."""
    for generation in generations:
        assert asked(requests, [2]) == [2]
        invite(requests, 2, replace(INVITATION, generation=generation, address={**ADDRESS, "port": place.store.port}))


def beat_of(requests: Any, rank: int) -> bytes:
    key = f"{join._BEATS}/{rank}"
    return requests._store.get(key) if requests._store.check([key]) else b""


def test_a_joining_rank_is_heard_of_until_it_trains_or_dies(
    environment: Any, requests: JoinRequests, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(join, "_BEAT_S", 0.01)
    comes = Comes(JoiningRank(environment, 2))
    invited(requests, place, 8)
    comes.join(20.0)
    assert comes.got.generation == 8
    assert Coming(place.store, 8).living([2]) == {2}

    deadline_s, beat = time.monotonic() + 20.0, beat_of(requests, 2)
    while beat_of(requests, 2) == beat:
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
    assert requests.silent([2], for_s=20.0) == []
    comes.joining_rank.trains()
    while not requests.silent([2], for_s=0.25):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_who_asks_again_is_not_waited_for_where_it_was_invited_before(
    environment: Any, requests: JoinRequests, place: Place
) -> None:
    """Its process has died, and was started again at once: it is heard of, but does not come."""
    comes = Comes(JoiningRank(environment, 2))
    invited(requests, place, 8)
    comes.join(20.0)
    assert requests.silent([2], for_s=20.0) == []
    again = Comes(JoiningRank(environment, 2))
    assert asked(requests, [2]) == [2] == requests.silent([2], for_s=20.0)
    invited(requests, place, 10)
    again.join(20.0)
    assert again.got.generation == 10 and requests.silent([2], for_s=20.0) == []
    comes.joining_rank.trains()
    again.joining_rank.trains()


def test_who_is_taken_for_gone_asks_again(environment: Any, requests: JoinRequests, place: Place) -> None:
    Coming(place.store, 8).goes(2)
    comes = Comes(JoiningRank(environment, 2))
    invited(requests, place, 8, 10)
    comes.join(20.0)
    comes.joining_rank.trains()
    assert comes.got.generation == 10 and comes.built == [10]


@pytest.mark.parametrize("fails", [1, 3])
def test_where_no_group_can_be_made_a_joining_rank_asks_again_but_not_for_ever(
    environment: Any, requests: JoinRequests, place: Place, fails: int
) -> None:
    comes = Comes(JoiningRank(environment, 2), fails=fails)
    invited(requests, place, *range(8, 8 + min(3, 1 + fails)))
    comes.join(20.0)
    if fails == 3:
        assert "a rank did not come" in str(comes.got) and comes.built == [8, 9, 10]
    else:
        assert comes.got.generation == 9
    comes.joining_rank.trains()


# ---- stores come and go ---------------------------------------------------------------------------------------


def test_who_asks_before_the_death_was_noticed_asks_again_in_the_next_store(environment: Any) -> None:
    store = host(environment)
    requests = JoinRequests(environment)
    requests.announce()
    waiting = Waiting(environment)
    while not store.check(["lightning_hetero/asks/2"]):
        time.sleep(0.005)
    assert requests.asking([2]) == []  # nobody was missed yet
    del store
    assert requests.host() == ""
    assert asked(requests, [2]) == [2]
    invite(requests, 2)
    assert waiting.ended() == INVITATION
    requests.close([2])


def test_without_a_store_the_run_has_ended(environment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "_SILENT_S", 0.3)
    with pytest.raises(RuntimeError, match="the run that rank 2 wanted to join has ended"):
        JoiningRank(environment, 2).wait()


@pytest.mark.parametrize("whose", ["torch's", "ours"])
def test_the_end_of_a_run_sends_home_who_waits_and_who_comes_later(environment: Any, whose: str) -> None:
    requests = JoinRequests(environment)
    store = host(environment) if whose == "torch's" else None
    if store is None:
        assert requests.host() == ""
    else:
        requests.announce()
    waiting = Waiting(environment)
    look = dist.TCPStore(environment.main_address, environment.main_port, is_master=False)
    while not look.check(["lightning_hetero/asks/2"]):
        time.sleep(0.005)
    requests.close([1, 2])
    assert "ended before it was let in; start all ranks" in str(waiting.ended())
    if store is not None:  # torch's store stays, e.g. for trainer.test
        assert JoiningRank.find(environment, 2) is None
        assert "ended before it was let in" in str(Waiting(environment).ended())
    requests.close([1, 2])


def test_a_store_without_an_announcement_yet_will_have_one(environment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "_LOOK_S", 20.0)
    store = host(environment)
    waiting = Waiting(environment)
    while not store.check(["lightning_hetero/asks/2"]):
        time.sleep(0.005)
    requests = JoinRequests(environment)
    requests.announce()
    requests._store = BoundedStore(lambda: store, 5.0)  # as if it hosted it
    assert asked(requests, [2]) == [2]
    invite(requests, 2)
    assert waiting.ended() == INVITATION
    requests.close([])


def test_a_lower_rank_that_has_come_again_asks_where_another_hosts_and_hosts_when_that_one_has_died(
    environment: Any,
) -> None:
    second, first = JoinRequests(environment), JoinRequests(environment)
    assert second.host() == ""
    assert first.host() == ""  # rank 1 is the lowest now, and somebody is missing
    waiting = Waiting(environment, 3)
    assert asked(first, [3]) == [3]
    invite(first, 3)
    assert waiting.ended() == INVITATION
    del second._store  # rank 2 dies
    assert first.asking([3]) == []
    assert first.host() == ""
    waiting = Waiting(environment, 3)
    assert asked(first, [3]) == [3]
    first.close([3])
    assert "ended before it was let in" in str(waiting.ended())


def test_a_meeting_place_that_does_not_answer_holds_nobody(environment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host is stopped, or busy with strangers' connections."""
    monkeypatch.setattr(join, "_LOOK_S", 0.1)
    monkeypatch.setattr(join, "_ANSWER_S", 0.2)
    with socket.create_server((environment.main_address, environment.main_port)):
        assert JoiningRank.find(environment, 2) is None
        requests = JoinRequests(environment)
        requests.announce()
        assert "no rank can come again into this run" in requests.host()
        requests.close([1, 2])


def test_a_store_that_falls_silent_holds_nobody(environment: Any) -> None:
    hears = threading.Event()

    class Silent:
        def check(self, keys: list[str]) -> bool:
            return hears.wait(60.0)

    silent: Any = Silent()
    requests = JoinRequests(environment)
    requests._store = BoundedStore(lambda: silent, 0.1)
    assert requests.asking([2]) == []
    hears.set()


def test_where_no_store_can_be_nobody_joins_and_nothing_is_lost(environment: Any) -> None:
    taken = host(environment)
    assert "no rank can come again into this run" in JoinRequests(environment).host()
    del taken
    through_a_file = JoinRequests(RankEnvironment(0, 2))
    through_a_file.announce()
    assert "no rank can come again into this run" in through_a_file.host()
    assert through_a_file.asking([1]) == []
    through_a_file.close([0, 1])


# ---- what a joining rank resumes from -------------------------------------------------------------------------------


class OneMissing(Members):
    """Rank 0, to which rank 1 wants to come."""

    def __init__(self) -> None:
        super().__init__(0, 2)
        self.alive = (0,)


class Asked:
    def asking(self, ranks: Any) -> list[int]:
        return list(ranks)


def test_a_joining_ranks_checkpoint_that_cannot_be_saved_does_not_end_the_members(tmp_path: Path) -> None:
    """A full disk, or none: they train on, and try again after the next epoch."""
    (tmp_path / "file").touch()
    trainer = quiet_trainer(devices=1, max_epochs=2, default_root_dir=tmp_path / "file" / "folder")
    meetings: Any = SimpleNamespace(changed=[], place=SimpleNamespace(address="anywhere"))
    requests: Any = Asked()
    admission = Admission(trainer, meetings, OneMissing(), requests, store=RunStore(None, b""))
    admission.expect()
    with pytest.warns(RuntimeWarning, match="rank 1 wants to join, and the checkpoint .* cannot be saved: .*Error"):
        trainer.fit(Toy(), DataLoader(regression(8), batch_size=4))
    assert trainer.current_epoch == 2 and trainer.global_step == 4
    assert admission._asking == [] and admission._checkpoint == ""
    admission.admit()  # nobody is invited

    trainer = quiet_trainer(devices=1, max_epochs=1, default_root_dir=tmp_path)
    admission = Admission(trainer, meetings, OneMissing(), requests, store=RunStore(None, b""))
    admission.expect()
    trainer.fit(Toy(), DataLoader(regression(8), batch_size=4))
    assert admission._asking == [1]
    (saved,) = tmp_path.glob(".joining-*.ckpt")
    admission._remove_checkpoint()
    assert not saved.exists()
