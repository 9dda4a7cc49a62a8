"""`ControlledPolicy`: who rests and who gets how much, on made-up devices, prices and budgets."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lightning_hetero import LyapunovController
from lightning_hetero.balanced.decide.controlled import ControlledPolicy
from lightning_hetero.balanced.decide.controller import ExchangeClock
from lightning_hetero.controller.messages import Decision, Observation
from lightning_hetero.shares.bounds import ShareBounds
from lightning_hetero.solvers.plans import replicas
from lightning_hetero.types import AffineCost, SpeedSample
from tests.pure.balanced.kit import Mail, Rank
from tests.pure.controller.kit import cluster_of, model_of

TOTAL = 32
EXCHANGE_S = 0.01
Costs = Callable[[int], Sequence[AffineCost]]  # by batch, one per rank
History = list[tuple[tuple[int, ...], float]]  # shares and time of each batch


def cost(slow: float = 1.0, *, fixed_s: float = 0.01) -> AffineCost:
    return AffineCost(fixed_s=slow * fixed_s, per_sample_s=slow * 0.01)


def started(controller: LyapunovController, world: int, *, quantum: int = 1, **bounds: object) -> ControlledPolicy:
    policy = ControlledPolicy(controller)
    policy.planned_batches = 400
    policy.start(world_size=world, total=TOTAL, bounds=ShareBounds(**bounds), quantum=quantum)  # type: ignore[arg-type]
    return policy


def trained(
    policy: ControlledPolicy, costs: Costs, batches: int, *, lag: int = 0, dummy: Callable[[float], float] = lambda s: s
) -> History:
    """Trains batches whose shares were drawn ``lag`` batches early; a rank without samples computes one."""
    history: History = []
    drawn = [(policy.shares, policy.generation)] * (lag + 1)
    for batch in range(batches):
        shares, generation = drawn.pop(0)
        own_s = [c.seconds(n) if n else dummy(c.seconds(1)) for c, n in zip(costs(batch), shares, strict=True)]
        batch_s = max(own_s) + EXCHANGE_S
        records = [
            SpeedSample(rank=r, step=batch, samples=n or 1, compute_s=s, wait_s=batch_s - s)
            for r, (n, s) in enumerate(zip(shares, own_s, strict=True))
        ]
        policy.take(records, generation=generation, batches=1)
        drawn.append((policy.shares, policy.generation))
        history.append((shares, batch_s))
        assert sum(policy.shares) == TOTAL
    return history


def money(history: History, prices: Sequence[float]) -> float:
    """Per sample, ranks at rest cost nothing."""
    spent = [s * sum(p for p, n in zip(prices, shares, strict=True) if n) / 3600.0 for shares, s in history]
    return sum(spent) / (TOTAL * len(history))


def resting(shares: Sequence[int]) -> list[int]:
    return [rank for rank, n in enumerate(shares) if not n]


# ---- without a budget -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 3])
def test_shares_are_those_of_unequal_speeds(lag: int) -> None:
    history = trained(started(LyapunovController(), 3), lambda _: [cost(), cost(), cost(4.0)], 60, lag=lag)
    shares, batch_s = history[-1]
    assert not resting(shares)
    assert batch_s == pytest.approx(0.01 + 0.15 + EXCHANGE_S, rel=0.08)  # 15 + 14 + 3 at best


def wandered(told: bool) -> int:
    """How often shares change on equal devices whose samples are of skewed lengths."""
    policy, rng = started(LyapunovController(), 4), np.random.default_rng(3)
    drawn: list[tuple[int, ...]] = []
    for batch in range(200):
        shares = policy.shares
        lengths = [float(rng.lognormal(0.0, 0.4)) for _ in shares]
        records = [
            SpeedSample(
                rank=r, step=batch, samples=n, compute_s=cost().seconds(n * u), work=n * (300.0 * u if told else 1.0)
            )
            for r, (n, u) in enumerate(zip(shares, lengths, strict=True))
        ]
        policy.take(records, generation=policy.generation, batches=1)
        drawn.append(shares)
    return sum(a != b for a, b in pairwise(drawn))


def test_long_samples_are_no_slow_device() -> None:
    """The controller knows of samples alone: it is told times as they would be of samples of mean work."""
    assert wandered(told=True) == 0 < wandered(told=False)


def test_without_a_budget_nobody_rests_as_a_dummy_takes_as_long_as_a_sample() -> None:
    policy = started(LyapunovController(), 4)
    history = trained(policy, lambda _: [cost(), cost(), cost(4.0), cost(fixed_s=0.5)], 100)
    assert not any(resting(shares) for shares, _ in history)
    assert history[-1][0][3] == 1


@pytest.mark.parametrize("rest_samples", [0.0, 1.0])
def test_of_ranks_that_do_nothing_at_rest_those_rest_that_are_slower_with_one_sample_than_others_with_all(
    rest_samples: float,
) -> None:
    """The controller itself, which other engines' ranks at rest do not hold up."""
    model, cluster = model_of([0.01], state_bytes=0.0, fixed_s=0.01), cluster_of([1.0, 1.0, 0.1, 0.02])
    options = {"micro_batch_size": TOTAL, "rest_samples": rest_samples}
    controller = LyapunovController(look_every=1).start(model, cluster, replicas(1, [8] * 4), **options)  # type: ignore
    work_s = {rank: 0.09 / device.speed for rank, device in enumerate(cluster.devices)}
    for batch in range(3):
        controller.step(Observation(batch=batch, generation=0, batch_s=max(work_s.values()), work_s=work_s))
    at_work = [rank for group in controller.plan.groups for rank in group.ranks]
    assert at_work == ([0, 1, 2, 3] if rest_samples else [0, 1])


def test_where_structure_stays_nobody_rests() -> None:
    settings = LyapunovController(structure=False, budget={"money_per_sample": 1e-9}, prices=(1.0, 9.0))
    policy = started(settings, 2)
    history = trained(policy, lambda _: [cost(), cost()], 100)
    assert not any(resting(shares) for shares, _ in history)
    assert policy.replans == []


# ---- under a budget -------------------------------------------------------------------------------------------

PRICES = (1.0, 1.0, 1.0, 8.0)
ALL_WORK = 11.0 * (0.01 + 0.08 + EXCHANGE_S) / 3600.0 / TOTAL  # money per sample
THREE_WORK = 3.0 * (0.01 + 0.11 + EXCHANGE_S) / 3600.0 / TOTAL


def test_a_device_that_costs_more_than_it_brings_rests_and_the_budget_is_kept() -> None:
    limit = 1.2 * THREE_WORK
    policy = started(LyapunovController(budget={"money_per_sample": limit}, prices=PRICES), 4)
    history = trained(policy, lambda _: [cost()] * 4, 400)
    assert not resting(history[0][0])
    rested = [resting(shares) == [3] for shares, _ in history]
    assert sum(rested) > 200
    assert money(history, PRICES) < 1.05 * limit < money(history[:8], PRICES)
    why = next(note.reason for note in policy.replans if note.kind == "plan")
    assert "queue of money_per_sample" in why


def test_all_work_where_the_budget_allows_it() -> None:
    policy = started(LyapunovController(budget={"money_per_sample": 1.1 * ALL_WORK}, prices=PRICES), 4)
    assert not any(resting(shares) for shares, _ in trained(policy, lambda _: [cost()] * 4, 200))


def by_turns(batch: int) -> list[AffineCost]:
    """Rank 1, the cheaper one, is four times slower for a while."""
    return [cost(), cost(4.0 if 30 <= batch < 100 else 1.0)]


def thrifty(**settings: object) -> ControlledPolicy:
    """Two devices, and nothing to spend: what costs least per sample works, alone."""
    budget, prices = {"money_per_sample": 1e-9}, (1.0, 0.8)
    return started(LyapunovController(budget=budget, prices=prices, **settings), 2)  # type: ignore[arg-type]


def test_a_device_that_was_slowed_down_rests_and_is_back_soon_after_it_has_recovered() -> None:
    policy = thrifty(recheck=None)
    rested = [resting(shares) for shares, _ in trained(policy, by_turns, 150)]
    assert all(one == [0] for one in rested[15:30])
    assert all(one == [1] for one in rested[36:100])
    assert all(one == [0] for one in rested[108:])


def test_a_device_whose_dummies_show_nothing_is_tried_again_after_a_while() -> None:
    """And is found to be slow still, the first time."""

    def rested(recheck: int | None) -> list[list[int]]:
        history = trained(thrifty(recheck=recheck), by_turns, 200, dummy=lambda _: 0.02)
        return [resting(shares) for shares, _ in history]

    again, never = rested(40), rested(None)
    assert all(one == [1] for one in never[36:])
    assert sum(one == [0] for one in again[36:100]) in range(1, 8)
    assert all(one == [0] for one in again[-20:])


def test_noise_of_dummies_wakes_nobody_and_predictions_are_those_of_full_shares() -> None:
    noise = np.random.default_rng(0)
    policy = thrifty(recheck=None)
    trained(policy, lambda _: [cost(), cost()], 150, dummy=lambda s: s * noise.uniform(0.6, 1.4))
    assert [note.kind for note in policy.replans] == ["plan"]
    assert policy.predict_s((16, 16)) == pytest.approx([0.17, 0.17], rel=0.05)


def test_a_device_whose_first_dummies_were_held_up_is_not_taken_for_a_faster_one() -> None:
    held_up = iter([0.2] * 15)
    policy = thrifty(recheck=None)
    trained(policy, lambda _: [cost(), cost()], 100, dummy=lambda s: next(held_up, s))
    assert [note.kind for note in policy.replans] == ["plan"]


def test_a_price_that_falls_wakes_a_device() -> None:
    """The same, of a controller that is told of prices."""
    settings = LyapunovController(budget={"money_per_sample": 1.2 * THREE_WORK}, prices=PRICES)
    model, cluster = model_of([0.01], state_bytes=0.0, fixed_s=0.01), cluster_of([1.0] * 4)
    controller = settings.start(
        model, cluster, replicas(1, [8] * 4), micro_batch_size=TOTAL, planned_batches=400, always=()
    )
    generation, at_work = 0, list[set[int]]()
    for batch in range(400):
        groups = controller.plan.groups
        at_work.append({group.ranks[0] for group in groups})
        work_s = {group.ranks[0]: 0.01 + 0.01 * group.samples for group in groups}
        prices = {3: 0.5} if batch == 300 else {}
        seen = Observation(
            batch=batch, generation=generation, batch_s=max(work_s.values()), work_s=work_s, prices=prices
        )
        decision = controller.step(seen)
        generation = decision.generation
    assert sum(3 not in ranks for ranks in at_work[:300]) > 150
    assert all(3 in ranks for ranks in at_work[310:])


@pytest.mark.parametrize("world", [4, 10])
def test_nothing_but_resting_and_waking_is_possible_with_one_layer(world: int) -> None:
    """10 ranks are too many for judging all structures: the search by neighbours is asked."""
    prices = [1.0 + rank for rank in range(world)]
    settings = LyapunovController(budget={"money_per_sample": 1e-6}, prices=prices, look_every=5)
    shares = [TOTAL // world + (rank < TOTAL % world) for rank in range(world)]
    controller = settings.start(
        model_of([0.01], state_bytes=0.0), cluster_of([1.0] * world), replicas(1, shares), micro_batch_size=TOTAL
    )
    generation, numbers = 0, set[int]()
    for batch in range(60):
        groups = controller.plan.groups
        assert all(len(group.ranks) == 1 and group.micro_batches == (group.samples,) for group in groups)
        numbers.add(len(groups))
        work_s = {group.ranks[0]: 0.01 * group.samples for group in groups}
        decision = controller.step(
            Observation(batch=batch, generation=generation, batch_s=max(work_s.values()), work_s=work_s)
        )
        assert decision.pause_s == 0.0, "nothing moves: all hold all parameters"
        generation = decision.generation
    assert 1 in numbers and controller.plan.groups[0].ranks == (0,)


def test_a_record_that_stands_for_many_batches_counts_as_many() -> None:
    queues = []
    for batches in (1, 7):
        settings = LyapunovController(budget={"money_per_sample": THREE_WORK}, prices=PRICES, bank=1e9)
        controller = settings.start(
            model_of([0.01], state_bytes=0.0), cluster_of([1.0] * 4), replicas(1, [8] * 4), micro_batch_size=TOTAL
        )
        work_s = dict.fromkeys(range(4), 0.09)
        controller.step(Observation(batch=7, generation=0, batch_s=0.1, work_s=work_s, batches=batches))
        queues.append(controller.queues["money_per_sample"].value)
    assert queues[1] == pytest.approx(7.0 * queues[0])


# ---- limits ---------------------------------------------------------------------------------------------------


def test_no_rank_gets_more_than_it_has_room_for() -> None:
    budget, prices = {"money_per_sample": 1e-9}, (1.0, 2.0, 3.0, 4.0)
    policy = started(LyapunovController(budget=budget, prices=prices), 4, upper=[9, 16, 16, 16])
    history = trained(policy, lambda _: [cost()] * 4, 60)
    assert all(shares[0] <= 9 and max(shares) <= 16 for shares, _ in history)
    assert resting(history[-1][0]) == [3], "32 samples fit on no fewer"


def test_shares_are_multiples_of_the_quantum_and_budgets_per_sample_stay_so() -> None:
    limit = 1.2 * THREE_WORK
    policy = started(LyapunovController(budget={"money_per_sample": limit}, prices=PRICES), 4, quantum=4)
    history = trained(policy, lambda _: [cost(1.0 + rank / 4) for rank in range(4)], 400)
    assert all(n % 4 == 0 for shares, _ in history for n in shares)
    assert sum(resting(shares) == [3] for shares, _ in history) > 100
    assert money(history[100:], PRICES) < money(history[:8], PRICES)


@pytest.mark.parametrize("least", [1, 2])
def test_rank_0_works_where_batch_norm_needs_its_statistics(least: int) -> None:
    prices = (8.0, 1.0, 1.0, 1.0)
    policy = started(LyapunovController(budget={"money_per_sample": THREE_WORK}, prices=prices), 4, least=least)
    history = trained(policy, lambda _: [cost()] * 4, 200)
    assert any(0 in resting(shares) for shares, _ in history) == (least == 1)


# ---- records and checkpoints ----------------------------------------------------------------------------------


def trained_text(policy: ControlledPolicy) -> str:
    trained(policy, by_turns, 30)
    (why,) = policy.at_rest.values()
    return why


def test_changes_are_recorded_with_what_they_brought() -> None:
    policy = thrifty()
    history = trained(policy, by_turns, 60)
    first, second = [note for note in policy.replans if note.kind == "plan"]
    for note, resting_rank in ((first, 0), (second, 1)):
        assert resting(history[note.step][0]) == [resting_rank] != resting(history[note.step - 1][0])
        assert note.realised_gain == pytest.approx(note.predicted_gain, abs=0.05)
    assert first.predicted_gain == pytest.approx(1.0 - 0.34 / 0.18, abs=0.05)
    assert "rank 1 takes 4" in second.reason
    assert "more time and" in trained_text(thrifty())
    policy.begin_fit()
    assert not policy.replans


def test_what_was_learned_goes_on_and_is_ignored_by_another_number_of_ranks() -> None:
    def settings(world: int) -> LyapunovController:
        return LyapunovController(budget={"money_per_sample": 1e-9}, prices=[1.0, 2.0, 3.0][:world])

    policy = started(settings(3), 3)
    trained(policy, lambda _: [cost(), cost(), cost()], 60)
    assert resting(policy.shares) == [1, 2]
    state = json.loads(json.dumps(policy.state_dict()))
    for world, total in ((3, TOTAL), (2, TOTAL), (3, TOTAL + 1)):
        resumed = ControlledPolicy(settings(world))
        resumed.load_state_dict(state)
        resumed.start(world_size=world, total=total, bounds=ShareBounds())
        same = (world, total) == (3, TOTAL)
        assert (resumed.shares == policy.shares) == same and bool(resumed.at_rest) == same
        if same:
            assert json.loads(json.dumps(resumed.state_dict())) == state
            assert resumed.at_rest == policy.at_rest
            assert resting(trained(resumed, lambda _: [cost(), cost(), cost()], 20)[-1][0]) == [1, 2]


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("every", [1, 3])
def test_all_ranks_come_to_the_same_decision(every: int, lag: int) -> None:
    """A disagreement would raise: the digest of the shares travels with the records."""
    mail = Mail(3)
    prices = (1.0, 1.0, 20.0)
    settings = LyapunovController(budget={"money_per_sample": 4e-7}, prices=prices)
    ranks = [
        Rank(r, mail, lag=lag, ahead=0, exchange=ExchangeClock(every=every), policy=ControlledPolicy(settings))
        for r in range(3)
    ]
    for epoch in range(3):
        for step in range(60):
            for rank in ranks:
                rank.draw(epoch, step, 60, (rank.rank + step) % (lag + 1))
            for rank in ranks:
                rank.train(epoch, step, 0.1 * (1 + rank.rank), noise=1.0 + 0.01 * (step % 3))
                if (rank.rank + step) % 2:
                    rank.controller.catch_up()
    for rank in ranks:
        rank.controller.drain()
    assert len({rank.controller.policy.shares for rank in ranks}) == 1
    rested = [0 in shares for shares in ranks[0].shares.values()]
    assert 10 < sum(rested) < len(rested) - 10
    for rank in ranks[1:]:
        assert rank.shares == ranks[0].shares
        assert rank.controller.policy.replans == ranks[0].controller.policy.replans  # type: ignore[attr-defined]


class Listening:
    """Hands on to a controller what it is told, and notes it."""

    def __init__(self, settings: LyapunovController) -> None:
        self.settings = settings
        self.seen: list[Observation] = []

    def start(self, *args: Any, **options: Any) -> Any:
        started = self.settings.start(*args, **options)

        def step(seen: Observation) -> Decision:
            self.seen.append(seen)
            return started.step(seen)

        return SimpleNamespace(step=step, state_dict=started.state_dict)


@pytest.mark.parametrize("lag", [0, 4])
@pytest.mark.parametrize("every", [1, 3])
def test_records_come_with_the_plan_they_ran_under_and_with_their_number(every: int, lag: int) -> None:
    mail = Mail(2)
    told = Listening(LyapunovController(budget={"money_per_sample": 8e-8}, prices=(1.0, 3.0), v=5.0))
    policy = ControlledPolicy(told)
    exchange = ExchangeClock(every=every)
    ranks = [
        Rank(0, mail, lag=lag, ahead=0, exchange=exchange, policy=policy),
        Rank(1, mail, lag=lag, ahead=0, exchange=exchange, policy=ControlledPolicy(told.settings)),
    ]
    for step in range(150):
        for rank in ranks:
            rank.draw(0, step, 150, lag)
        for rank in ranks:
            rank.train(0, step, 0.1)
    assert {seen.batches for seen in told.seen} == {every}
    at_work = [set(seen.work_s) for seen in told.seen]
    assert at_work == [{r for r, n in enumerate(ranks[0].shares[0, seen.batch]) if n} for seen in told.seen]
    assert {0} in at_work and {0, 1} in at_work
