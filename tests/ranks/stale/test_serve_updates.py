"""Whatever the timing: what the coordinator decided is what the parameter server computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.stale.policies import DynSgd, Quorum
from lightning_hetero.stale.decide.policy import Asp, Bsp, Claim, Flexible, Grant, Hold, Policy, Saps
from lightning_hetero.transport.base import Reply
from lightning_hetero.transport.flags import Word
from tests.ranks.stale.kit import Script, Setting, Trainee, automatic
from tests.ranks.stale.reference import (
    ENDS,
    EPOCHS,
    SAMPLES,
    data,
    differ,
    epochs,
    equal_speed,
    groups,
    mlp,
    mse,
    plain,
    replay,
    replay_completing,
    replay_joining,
    sgd,
    unequal,
)

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize(
    "policy",
    [Flexible(), Flexible(grace=0.0), Asp(), DynSgd(), Saps(), Quorum()],
    ids=str,
)
def test_uneven_speeds_compute_what_was_decided(policy: Policy) -> None:
    x, y = data(5)
    setting = Setting(mlp(), sgd, policy, 3)
    script = Script(setting, automatic(x, y, mse), epochs, workers=3, work_s=unequal).run()
    assert differ(replay(setting, script, x, y), setting.model) <= 1e-12
    assert sum(u.ends_step for u in setting.coordinator.updates) == EPOCHS * len(ENDS)
    assert sum(u.samples for u in setting.coordinator.updates) == EPOCHS * SAMPLES
    assert setting.server.counts.staleness.keys() - {0}, "the script was to make something late"
    counts = setting.server.counts
    assert counts.updates == len(setting.coordinator.updates)
    assert sum(counts.staleness.values()) == sum(counts.samples.values())
    assert all(t.words == [1] * (EPOCHS * len(ENDS)) for t in script.trainees)


class Scribbling(Script):
    """As soon as a worker is answered its slot is written again; nothing may be read out of it after that."""

    def reply(self, rank: int, reply: Reply) -> None:
        super().reply(rank, reply)
        self.links[rank].gradient.fill_(255)  # NaN


@pytest.mark.parametrize("policy", [Flexible(), Flexible(grace=0.0), Bsp(), Asp()], ids=str)
def test_slots_are_read_before_their_workers_are_answered(policy: Policy) -> None:
    x, y = data(5)
    setting = Setting(mlp(), sgd, policy, 3)
    script = Scribbling(setting, automatic(x, y, mse), epochs, workers=3, work_s=unequal).run()
    assert differ(replay(setting, script, x, y), setting.model) <= 1e-12


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("make", [sgd, lambda m: [torch.optim.AdamW(m.parameters(), lr=0.01)]])
def test_late_contributions_complete_the_update_they_missed(make: Any, shards: int) -> None:
    x, y = data(5)
    setting = Setting(mlp(), make, Flexible(grace=0.0), 3, shards=shards)
    kept: list[int] = []

    def counted(trainee: Trainee, grant: Reply, positions: list[int]) -> Reply:
        kept.append(len(setting.server._batch._means))
        return automatic(x, y, mse)(trainee, grant, positions)

    script = Script(setting, counted, epochs, workers=3, work_s=unequal).run()
    expected, late = replay_completing(setting, script, x, y)
    assert late > 3, "the script was to make something late"
    assert differ(expected, setting.model) <= 1e-12
    assert differ(replay_joining(setting, script, x, y), setting.model) > 1e-4
    assert sum(u.samples for u in setting.coordinator.updates) == EPOCHS * SAMPLES
    assert 1 <= max(kept) <= 2


def test_under_a_policy_of_a_user_they_join_the_next() -> None:
    class Joining(Flexible):
        completes = False

    x, y = data(5)
    setting = Setting(mlp(), sgd, Joining(grace=0.0), 3)
    script = Script(setting, automatic(x, y, mse), epochs, workers=3, work_s=unequal).run()
    assert differ(replay_joining(setting, script, x, y), setting.model) <= 1e-12
    assert differ(replay_completing(setting, script, x, y)[0], setting.model) > 1e-4


def test_asynchronous_policies_step_once_per_accumulation_window() -> None:
    x, y = data(5)
    setting = Setting(mlp(), lambda m: [torch.optim.SGD(m.parameters(), lr=0.1)], Asp(), 3)
    ticks: list[bool] = []
    script = Script(setting, automatic(x, y, mse, accumulate=2), epochs, workers=3, work_s=equal_speed)
    optimizer = setting.optimizers[0]
    optimizer.register_step_post_hook(lambda *_: ticks.append(True))
    script.run()
    assert len(ticks) == EPOCHS * (len(ENDS) // 2)
    assert [Word.steps(w) for w in script.trainees[0].words] == [0, 1, 0, 1, 0] * EPOCHS


class Chunks(Asp):
    """Assigns so many samples at a time."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def claim(self, claim: Claim) -> Grant | Hold:
        return Grant(samples=self.samples)


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_an_accumulated_batch_does_not_depend_on_its_number_of_updates(chunk: int) -> None:
    """Within a window no step is made, so contributions worth a part of a batch add up to the whole gradient."""
    x, y = data(5)
    model = mlp()
    setting = Setting(model, sgd, Chunks(chunk), 1)
    Script(setting, automatic(x, y, mse, accumulate=2, clip=0.2), epochs, workers=1, work_s=equal_speed).run()
    assert setting.coordinator.version > EPOCHS * len(ENDS)
    assert differ(plain(model, sgd, x, y, accumulate=2, clip=0.2), setting.model) <= 1e-12


@pytest.mark.parametrize("make", [sgd, groups, lambda m: [torch.optim.Adam(m.parameters(), lr=0.01)]])
def test_shards_change_nothing(make: Any) -> None:
    x, y = data(5)
    results = []
    for shards in (1, 3):
        setting = Setting(mlp(), make, Flexible(), 3, shards=shards)
        script = Script(setting, automatic(x, y, mse, clip=0.5), epochs, workers=3, work_s=unequal)
        assert len(setting.server._shards.parts) == shards
        script.run()
        results.append(setting)
    one, other = results
    assert differ(one.model, other.model) == 0.0
    for a, b in zip(one.optimizers, other.optimizers, strict=True):
        assert a.state_dict()["param_groups"] == b.state_dict()["param_groups"]
    for a, b in zip(one.server._updater.state_dicts(), other.server._updater.state_dicts(), strict=True):
        torch.testing.assert_close(a["state"], b["state"], rtol=0, atol=0)


def test_an_optimizer_nobody_knows_is_not_split() -> None:
    seen: list[int] = []

    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            seen.append(sum(len(g["params"]) for g in self.param_groups))
            super().step(closure)

    x, y = data(5)
    setting = Setting(mlp(), lambda m: [Own(m.parameters(), lr=0.1)], Bsp(), 1, shards=3)
    Script(setting, automatic(x, y, mse), epochs, workers=1, work_s=equal_speed).run()
    assert seen == [4] * (EPOCHS * len(ENDS))


def test_hyper_parameters_of_the_present_tick_count_not_those_of_late_pushes() -> None:
    x, y = data(5)
    seen: list[float] = []
    setting = Setting(mlp(), lambda m: [torch.optim.SGD(m.parameters(), lr=0.1)], Flexible(), 3)
    setting.optimizers[0].register_step_pre_hook(lambda o, *_: seen.append(o.param_groups[0]["lr"]))
    script = Script(setting, automatic(x, y, mse), epochs, workers=3, work_s=unequal)

    def before(trainee: Trainee, epoch: int, global_step: int) -> None:
        trainee.optimizers[0].param_groups[0]["lr"] = 0.1 / (1 + epoch * len(ENDS) + global_step)

    for trainee in script.trainees:
        trainee.before = before
    script.run()
    assert setting.server.counts.staleness.keys() - {0}
    assert seen == [0.1 / (1 + step) for step in range(EPOCHS * len(ENDS))]
