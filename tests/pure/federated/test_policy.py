"""Policies of a round: what each adapts, what stays, and what a checkpoint keeps."""

from __future__ import annotations

import json

import pytest

from lightning_hetero.federated.decide.policy import AdaptiveSteps, FedAvg, LbBsp, RoundPolicy, ScaledLr, by_name
from lightning_hetero.federated.decide.rounds import Client

SPEEDS = (1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.125)
CLIENTS = [Client(400, 16, 25)] * len(SPEEDS)
FIXED_S, SAMPLE_S, STEPS = 0.002, 0.001, 10


def started(policy: RoundPolicy) -> RoundPolicy:
    policy.start(CLIENTS, local_steps=STEPS)
    return policy


def times(policy: RoundPolicy, speeds: tuple[float, ...] = SPEEDS) -> list[float]:
    """Own work of a round [s] by rank."""
    plan = policy.plan
    steps = zip(plan.sizes, plan.steps, speeds, strict=True)
    return [tau * (FIXED_S + SAMPLE_S * n) / speed for n, tau, speed in steps]


def run(policy: RoundPolicy, rounds: int, speeds: tuple[float, ...] = SPEEDS) -> None:
    for _ in range(rounds):
        plan = policy.plan
        policy.decide(
            [(float(n * tau), float(tau), s) for n, tau, s in
             zip(plan.sizes, plan.steps, times(policy, speeds), strict=True)]
        )  # fmt: skip


def test_the_first_round_is_equal_under_every_policy() -> None:
    for name in ("lb-bsp", "fedavg", "adaptive_steps", "scaled_lr"):
        plan = started(by_name(name)).plan
        assert (plan.sizes, plan.steps, plan.lr_factors) == ((16,) * 8, (STEPS,) * 8, (1.0,) * 8)


def test_lb_bsp_ends_the_round_together_on_the_same_number_of_samples() -> None:
    policy = started(LbBsp())
    equal_s = max(times(policy))
    run(policy, 4)
    plan, balanced = policy.plan, times(policy)
    assert sum(plan.sizes) == 128 and plan.steps == (STEPS,) * 8 and plan.lr_factors == (1.0,) * 8
    assert max(balanced) < 0.4 * equal_s
    assert policy.predict_s() == pytest.approx([t / STEPS for t in balanced], rel=0.05)


def test_adaptive_steps_gives_fast_devices_more_of_them() -> None:
    policy = started(AdaptiveSteps())
    equal_s = max(times(policy))
    run(policy, 4)
    plan = policy.plan
    assert plan.sizes == (16,) * 8 and sum(plan.steps) == 8 * STEPS and min(plan.steps) >= 1
    assert plan.steps[0] > STEPS > plan.steps[7]
    assert max(times(policy)) < 0.4 * equal_s
    assert policy.predict_s()[7] == pytest.approx((FIXED_S + SAMPLE_S * 16) * 8, rel=0.05)


def test_a_rank_that_took_no_part_is_as_fast_as_it_was() -> None:
    policy = started(LbBsp())
    plan = policy.plan
    whole = [(float(n * tau), float(tau), s) for n, tau, s in zip(plan.sizes, plan.steps, times(policy), strict=True)]
    nobody = (0.0, 0.0, 0.0)
    assert policy.decide([nobody, *whole[1:]]) is None  # rank 0 was never measured
    assert policy.decide([whole[0], nobody, *whole[2:]]) is not None
    assert policy.plan.sizes[7] < 16


@pytest.mark.parametrize("policy", [LbBsp, ScaledLr, AdaptiveSteps])
def test_a_checkpoint_brings_the_round_that_runs_and_what_was_learned(policy: type[RoundPolicy]) -> None:
    first, again = started(policy()), policy()
    run(first, 4)
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    started(again)
    assert again.plan == first.plan
    run(again, 1)
    assert max(times(again)) <= 1.1 * max(times(first))
    fewer = policy()
    fewer.load_state_dict(first.state_dict())
    fewer.start(CLIENTS[:4], local_steps=STEPS)
    assert fewer.plan.sizes == (16,) * 4 and fewer.plan.steps == (STEPS,) * 4


@pytest.mark.parametrize("policy", [LbBsp, ScaledLr, AdaptiveSteps])
def test_with_fewer_ranks_speeds_are_known_and_with_new_ones_all_begin_equal(policy: type[RoundPolicy]) -> None:
    left = [0, 1, 2, 3, 4, 6, 7]  # rank 5 is lost
    speeds = tuple(SPEEDS[i] for i in left)
    first = started(policy())
    run(first, 4)
    first.keep(left)
    first.start(CLIENTS[:7], local_steps=STEPS)
    fresh = policy()
    fresh.start(CLIENTS[:7], local_steps=STEPS)
    total = sum(fresh.plan.sizes) if policy is not AdaptiveSteps else sum(fresh.plan.steps)
    assert sum(first.plan.sizes if policy is not AdaptiveSteps else first.plan.steps) == total
    assert max(times(first, speeds)) < 0.6 * max(times(fresh, speeds))  # at once
    first.keep([0, 1, 2, 3, 4, None, 5, 6])
    started(first)
    assert first.plan == started(policy()).plan
    # as a rank that comes with what was saved before: all must plan alike
    again = policy()
    again.load_state_dict(json.loads(json.dumps(fresh.state_dict())))
    started(again)
    assert again.plan == first.plan
    for each in (first, again):
        run(each, 2)
    assert again.plan == first.plan


def test_names_and_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown policy 'fast': choose one of lb-bsp, fedavg"):
        by_name("fast")
    with pytest.raises(ValueError, match="again='no' must be one of"):
        FedAvg(again="no")  # type: ignore[arg-type]
