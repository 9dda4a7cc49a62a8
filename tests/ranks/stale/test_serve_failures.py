"""The parameter server with overflows, NaN, dead, stopped and confused workers."""

from __future__ import annotations

import copy
import math
import threading
from typing import Any

import pytest

from lightning_hetero.stale.decide.policy import Asp, Bsp, Flexible, Policy
from lightning_hetero.stale.runtime.messages import Met
from lightning_hetero.stale.runtime.start import serve
from lightning_hetero.transport.base import Ask, RemoteFailureError, Reply, Request, ServerLostError
from lightning_hetero.transport.flags import PushFlag, Word
from tests.ranks.stale.kit import Script, Setting, Trainee, automatic, ends_of, spans
from tests.ranks.stale.reference import ENDS, EPOCHS, SAMPLES, data, differ, epochs, equal_speed, mlp, mse, replay, sgd
from tests.ranks.transport.in_process import InProcess

pytestmark = pytest.mark.usefixtures("float64")


def test_an_overflow_anywhere_skips_the_whole_update_and_everybody_knows() -> None:
    x, y = data(5)
    bad_step = 2

    def step(trainee: Trainee, grant: Reply, positions: list[int]) -> Reply:
        mse(trainee.model, x[positions], y[positions]).backward()
        overflow = trainee.rank == 1 and trainee.global_step == bad_step
        if overflow:
            for p in trainee.model.parameters():
                assert p.grad is not None
                p.grad.fill_(math.inf)
        flags = PushFlag.FINAL | (PushFlag.OVERFLOW if overflow else PushFlag(0))
        return trainee.worker.push(flags, steps=1, zeroes=1)

    model = mlp()
    setting = Setting(model, sgd, Bsp(), 3)
    script = Script(setting, step, epochs, workers=3, work_s=equal_speed).run()
    expected, (optimizer,) = (other := copy.deepcopy(model)), sgd(other)
    for _ in range(EPOCHS):
        for global_step, (a, b) in enumerate(zip([0, *ENDS], ENDS, strict=False)):
            optimizer.zero_grad()
            mse(expected, x[a:b], y[a:b]).backward()
            if global_step != bad_step:
                optimizer.step()
    assert differ(expected, setting.model) <= 1e-12
    assert setting.coordinator.version == EPOCHS * len(ENDS)
    assert setting.server.counts.overflows == EPOCHS
    word = Word.of(steps=1, overflow=True)
    for trainee in script.trainees:
        assert trainee.words == [word if t == bad_step else 1 for t in range(len(ENDS))] * EPOCHS


@pytest.mark.parametrize("policy", [Flexible(), Bsp(), Asp()], ids=str)
def test_the_others_finish_the_epoch_of_a_dead_worker(policy: Policy) -> None:
    x, y = data(5)
    setting = Setting(mlp(), sgd, policy, 3)
    met: list[Met] = []

    def body(trainee: Trainee) -> None:
        trainee.epoch(0, ENDS)
        met.append(trainee.worker.meet(0))

    script = Script(setting, automatic(x, y, mse), body, workers=3, work_s=equal_speed, kill={2: 4.0}).run()
    applied = [c.assignment for u in setting.coordinator.updates for c in u.contributions]
    positions = {assignment: some for t in script.trainees for assignment, _, some in t.log}
    assert sorted(p for assignment in applied for p in positions[assignment]) == list(range(SAMPLES))
    assert differ(replay(setting, script, x, y), setting.model) <= 1e-12
    assert [list(m.alive) for m in met] == [[0, 1]] * 2
    for trainee in script.trainees[:2]:
        told = "rank 2 died (killed); the others go on without, on 2 devices"
        assert sum(told in text for text in trainee.texts) == 1
    assert setting.server.counts.reissued["its worker is dead"] == 2


@pytest.mark.parametrize(("policy", "reason"), [(Flexible(), None), (Bsp(), "stalled")], ids=str)
def test_a_stopped_workers_late_push_is_refused_politely_and_it_goes_on(
    policy: Policy, reason: str | None
) -> None:
    """Worker 2 stands still from its second chunk on until the others have long ended the epoch."""
    x, y = data(5)
    setting = Setting(mlp(), sgd, policy, 3, liveness_s=2.0)
    stopped: list[float] = []

    def work_s(rank: int, samples: int, now_s: float) -> float:
        if rank == 2 and now_s > 2.0 and not stopped:
            stopped.append(now_s)
            return 400.0
        return 1.0 + samples

    def body(trainee: Trainee) -> None:
        for epoch in range(4):
            trainee.epoch(epoch, ENDS)
            trainee.worker.meet(epoch)

    script = Script(setting, automatic(x, y, mse), body, workers=3, work_s=work_s).run()
    assert len(stopped) == 1
    assert setting.server.counts.discarded["gone"] > 0
    assert (
        reason is None or setting.server.counts.reissued[reason] > 0
    )  # the default issues them a second time
    assert setting.coordinator.version == 4 * len(ENDS)
    assert sum(u.samples for u in setting.coordinator.updates) == 4 * SAMPLES
    assert script.trainees[2].words[: len(ENDS)] == [1] * len(ENDS)
    assert differ(replay(setting, script, x, y), setting.model) <= 1e-12


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("ends", ["worker 1", "worker 0", "disagree", "20 samples in 4 batches"]),
        ("layout", ["worker 1", "the server", "model"]),
        ("meeting", ["different reasons", "0: 'a'", "1: 'b'"]),
        ("future", ["worker 1", "batch 3", "the server in 0"]),
        ("optimizer", ["worker 1", "[4] of 1"]),
        ("weight", ["worker 1", "weight=nan"]),
        ("samples", ["worker 1", "samples=99"]),
        ("slot", ["PUSH of worker 1", "TornSlotError"]),
    ],
)
def test_confused_workers_end_the_run_with_a_reason(what: str, words: list[str]) -> None:
    x, y = data(5)
    setting = Setting(mlp(), sgd, Bsp(), 2)
    told: dict[int, str] = {}

    def wrong(trainee: Trainee) -> None:
        worker = trainee.worker
        odd = trainee.rank == 1
        if what == "layout" and odd:
            object.__setattr__(worker, "_layout", copy.copy(worker._layout))
            object.__setattr__(worker._layout, "digest", "another")
        worker.begin_epoch(0, ends_of(20, 5) if what == "ends" and odd else ENDS)
        if what == "meeting":
            worker.meet(7, "ab"[trainee.rank])
        reply = worker.claim(0, 3 if what == "future" and odd else 0)
        worker.pull()
        positions = spans(reply.numbers)
        mse(trainee.model, x[positions], y[positions]).backward()
        options: dict[str, Any] = {}
        if odd:
            cases = {"optimizer": {"steps": 16}, "weight": {"weight": math.nan}, "samples": {"samples": 99}}
            options = cases.get(what, {})
        if what == "slot" and odd:
            push = Request(kind=Ask.PUSH, assignment=reply.assignment, samples=len(positions), flags=1, slot=12345)
            worker._call(push)
        worker.push(**options)

    def body(trainee: Trainee) -> None:
        try:
            wrong(trainee)
            trainee.worker.meet(0)
        except RemoteFailureError as error:
            told[trainee.rank] = str(error)

    Script(setting, automatic(x, y, mse), body, workers=2, work_s=equal_speed).run()
    assert told.keys() == {0, 1}
    assert all(word in text for text in told.values() for word in words), told


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), ValueError("an odd optimizer")], ids=str)
def test_a_question_without_an_answer_is_the_askers_alone(fault: Exception) -> None:
    """The server's state cannot be shared or written: the others train on, and the asker too, if it goes on."""
    x, y = data(5)
    setting = Setting(mlp(), sgd, Bsp(), 2)
    caught: list[BaseException] = []

    def body(trainee: Trainee) -> None:
        trainee.epoch(0, ENDS)
        if trainee.rank == 0:
            try:
                trainee.worker.state()
            except type(fault) as error:
                caught.append(error)
        trainee.epoch(1, ENDS)
        trainee.worker.meet(0)

    script = Script(setting, automatic(x, y, mse), body, workers=2, work_s=equal_speed)

    def share_state(_: bytes) -> None:
        raise fault

    script.share_state = share_state  # type: ignore[method-assign]
    script.run()
    (error,) = caught
    assert str(error) == str(fault)
    assert isinstance(error.__cause__, RemoteFailureError) and "could not answer STATE" in str(error.__cause__)
    assert setting.coordinator.version == 2 * len(ENDS)


def test_a_message_that_cannot_be_handled_ends_the_run_but_not_the_server() -> None:
    """Everybody is told what it was and whose, and the state can still be saved."""
    setting = Setting(mlp(), sgd, Bsp(), 2)
    told: dict[int, str] = {}
    states: list[Any] = []

    def body(trainee: Trainee) -> None:
        worker = trainee.worker
        try:
            if trainee.rank == 1:
                worker._call(Request(kind=Ask.PUSH, epoch=-1, slot=7))  # a slot that nobody has written
            worker.meet(0)
        except RemoteFailureError as error:
            told[trainee.rank] = str(error)
        if trainee.rank == 0:
            states.append(worker.state())

    Script(setting, automatic(*data(5), mse), body, workers=2, work_s=equal_speed).run()
    assert told.keys() == {0, 1} and states[0]["version"] == 0
    assert all("PUSH of worker 1: TornSlotError" in text for text in told.values())


def test_a_server_that_fails_says_why_before_it_ends() -> None:
    setting = Setting(mlp(), sgd, Bsp(), 1)
    setting.optimizers[0].register_step_pre_hook(broken)
    transport = InProcess(1, setting.layout.slot_bytes, setting.layout.bytes)
    server = setting.serve_on(transport.listener)
    trainee = setting.trainee(0, transport.link(0), automatic(*data(5), mse))
    errors: list[BaseException] = []

    def run() -> None:
        try:
            serve(server, transport.listener, lambda: 0.0)
        except ArithmeticError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    with pytest.raises(RemoteFailureError, match=r"failed in the parameter server: ArithmeticError: no such norm"):
        trainee.epoch(0, [4])
    thread.join()
    assert len(errors) == 1
    transport.listener.close()
    with pytest.raises(ServerLostError):
        trainee.worker.claim(0, 0)


def broken(*_: Any) -> None:
    raise ArithmeticError("no such norm")
