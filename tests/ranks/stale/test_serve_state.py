"""The parameter server's state: sent, taken up again, resumed; and arguments that make no server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.stale.decide.policy import Bsp
from lightning_hetero.stale.fit.session import Session
from lightning_hetero.stale.runtime.messages import state_bytes, state_of
from tests.ranks.stale.kit import Pusher, Script, Setting, Trainee, automatic
from tests.ranks.stale.reference import ENDS, EPOCHS, SAMPLES, data, differ, epochs, equal_speed, groups, mlp, mse, sgd

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("make", [sgd, groups])
def test_a_fresh_server_goes_on_bit_by_bit_from_the_state(make: Any) -> None:
    x, y = data(5)
    states: list[Any] = []
    updates: list[int] = []

    def first(trainee: Trainee) -> None:
        epochs(trainee)
        states.append(trainee.worker.state())
        updates.append(trainee.worker.measures().counts.updates)
        trainee.epoch(2, ENDS)

    whole = Setting(mlp(), make, Bsp(), 1)
    Script(whole, automatic(x, y, mse), first, workers=1, work_s=equal_speed).run()
    (state,) = states
    assert state["version"] == EPOCHS * len(ENDS) == state["coordinator"]["version"]
    assert updates == [state["version"]]

    half = Setting(mlp(), make, Bsp(), 1)
    Script(half, automatic(x, y, mse), epochs, workers=1, work_s=equal_speed).run()
    rest = Setting(half.model, make, Bsp(), 1)
    for optimizer, held in zip(rest.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict({**held, "param_groups": optimizer.state_dict()["param_groups"]})
    rest.coordinator.load_state_dict(state["coordinator"])
    Script(rest, automatic(x, y, mse), lambda t: t.epoch(2, ENDS), workers=1, work_s=equal_speed).run()
    assert rest.coordinator.version == 3 * len(ENDS)
    assert differ(whole.model, rest.model) == 0.0
    one, other = whole.optimizers[0].state_dict(), rest.optimizers[0].state_dict()
    assert one["param_groups"] == other["param_groups"]
    torch.testing.assert_close(one["state"], other["state"], rtol=0, atol=0)


@pytest.mark.parametrize("substeps", [False, True])
def test_the_state_comes_with_its_parameters_while_others_train(substeps: bool) -> None:
    """Between the answer and the look at the published parameters there is always another update."""
    x, y = data(5)
    setting = Setting(mlp(), sgd, Bsp(), 1)
    fetched: list[dict[str, Any]] = []
    then: list[Tensor] = []

    def body(trainee: Trainee) -> None:
        worker, link = trainee.worker, script.links[0]
        trainee.epoch(0, ENDS)
        session: Any = Session(None, SimpleNamespace(members=None, timeout=None), None)  # type: ignore[arg-type]
        session.worker = worker
        worker.weights._substeps_used = substeps
        read, looks = link.read_state, iter(range(10))

        def read_while_others_train() -> bytes:
            assert next(looks, None) is not None, "it looks again and again"
            data, version = read(), setting.coordinator.version + 1
            then[:] = [p.detach().clone() for p in setting.model.parameters()]
            with torch.no_grad():
                for p in setting.model.parameters():
                    p.add_(1.0)
            setting.coordinator.version = version
            script.publish(version, setting.area)
            return data

        link.read_state = read_while_others_train  # type: ignore[method-assign]
        for _ in range(2):
            session.fetch_state()
            fetched.append(session.state)
            assert worker.weights.version == session.state["version"]
            assert all(torch.equal(p, q) for p, q in zip(trainee.model.parameters(), then, strict=True))
        assert worker.pull() == setting.coordinator.version

    script = Script(setting, automatic(x, y, mse), body, workers=1, work_s=equal_speed)
    script.run()
    assert [state["version"] for state in fetched] == [len(ENDS), len(ENDS) + 1]
    assert all(state.keys() == {"version", "optimizers", "coordinator"} for state in fetched)


def test_counts_come_with_the_answer_that_ends_a_batch() -> None:
    """If they were asked for; they are what a request just then would bring, and the next request forgets them."""
    x, y = data(5)
    seen: list[Any] = []

    def body(trainee: Trainee) -> None:
        worker = trainee.worker

        def ask_in_the_last_batch(_: Trainee, epoch: int, global_step: int) -> None:
            seen.append(worker.brought)
            if global_step == len(ENDS) - 1:
                worker.ask_measures()
                assert worker.awaits_measures

        trainee.before = ask_in_the_last_batch
        trainee.epoch(0, ENDS)
        brought = worker.brought
        assert brought is not None and not worker.awaits_measures
        now = worker.measures()
        assert worker.brought is None and trainee.texts == []  # no notice to people
        assert brought.counts.updates == now.counts.updates == len(ENDS)
        assert brought.counts.samples == now.counts.samples and brought.global_step == now.global_step

        worker.ask_measures()
        worker.meet(0)
        assert not worker.awaits_measures  # nobody asks for a batch that is over

    Script(Setting(mlp(), sgd, Bsp(), 1), automatic(x, y, mse), body, workers=1, work_s=equal_speed).run()
    assert seen == [None] * len(ENDS)


def test_an_epoch_is_resumed_in_the_middle() -> None:
    x, y = data(5)
    setting = Setting(mlp(), sgd, Bsp(), 2, ahead=1)
    replies: dict[int, tuple[int, ...]] = {}

    def body(trainee: Trainee) -> None:
        trainee.epoch(0, ENDS, global_step=2, applied=[(0, 12)])
        trainee.worker.meet(0)
        replies[trainee.rank] = tuple(trainee.worker.begin_epoch(1, ENDS, global_step=2, applied=[(0, 12)]).numbers)

    script = Script(setting, automatic(x, y, mse), body, workers=2, work_s=equal_speed).run()
    assert sorted(p for t in script.trainees for _, _, some in t.log for p in some) == list(
        range(12, SAMPLES)
    )
    assert setting.coordinator.version == len(ENDS) - 2
    assert script.trainees[0].words == [1] * (len(ENDS) - 2)
    assert {rank: numbers[:2] for rank, numbers in replies.items()} == {
        0: (12, 15),
        1: (15, 18),
    }  # worth fetching


class _Ours:
    """Neither plain nor a tensor."""


@pytest.mark.parametrize("bad", [_Ours(), {1: {2: _Ours()}}, [torch.nn.Linear]])
def test_a_state_of_anything_else_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"no state of a server: [\s\S]*(Ours|Linear)"):
        state_of(state_bytes({"state": bad}))


def test_a_damaged_state_is_refused() -> None:
    good = state_bytes({"a": torch.arange(20), "b": [1]})
    for bad in (good[:7], b"X" + good[1:], good[:-100], good[:20]):
        with pytest.raises(ValueError, match="no state of a server"):
            state_of(bad)


# ---- arguments --------------------------------------------------------------------------------------------------


def test_a_new_parameter_group_is_refused_at_the_worker() -> None:
    model = mlp()
    setting = Setting(model, sgd, Bsp(), 1)

    def body(trainee: Trainee) -> None:
        worker: Pusher = trainee.worker
        worker.begin_epoch(0, ENDS)
        worker.claim(0, 0)
        trainee.optimizers[0].add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        with pytest.raises(ValueError, match=r"param_group.*configure_optimizers"):
            worker.push(steps=1)

    x, y = data(5)
    Script(setting, automatic(x, y, mse), body, workers=1, work_s=equal_speed).run()
