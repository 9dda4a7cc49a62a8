"""Bounds of a rank's batch: never more than its data, never none, whatever the user and the devices are like."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.federated.decide.policy import LbBsp, ScaledLr, client_bounds
from lightning_hetero.federated.decide.rounds import Client

CLIENTS = st.lists(
    st.tuples(st.integers(1, 300), st.integers(1, 64)).map(lambda c: Client(c[0], min(c), -(-c[0] // min(c)))),
    min_size=2,
    max_size=9,
)


@given(clients=CLIENTS, least=st.integers(1, 2))
def test_default_bounds_admit_what_the_loaders_ask_for_and_no_more_than_there_is(
    clients: list[Client], least: int
) -> None:
    if least * len(clients) > sum(client.batch_size for client in clients):
        return
    bounds, total = client_bounds(clients, least=least)
    low, up = bounds.resolve(len(clients), total)
    assert total == sum(client.batch_size for client in clients)
    assert sum(low) <= total <= sum(up)
    for a, b, client in zip(low, up, clients, strict=True):
        assert 1 <= a <= b <= client.samples
        assert a >= min(least, client.samples)


@given(clients=CLIENTS, seconds=st.lists(st.floats(1e-4, 1.0), min_size=9, max_size=9), rounds=st.integers(1, 8))
def test_whatever_the_speeds_no_batch_leaves_its_bounds_and_the_sum_stays(
    clients: list[Client], seconds: list[float], rounds: int
) -> None:
    policy = ScaledLr()
    policy.start(clients, local_steps=5)
    for number in range(rounds):
        plan = policy.plan
        assert sum(plan.sizes) == sum(client.batch_size for client in clients)
        assert all(1 <= size <= client.samples for size, client in zip(plan.sizes, clients, strict=True))
        assert plan.steps == (5,) * len(clients)
        own = [client.batch_size for client in clients]
        assert plan.lr_factors == pytest.approx([size / b for size, b in zip(plan.sizes, own, strict=True)])
        turned = seconds[number % 3 :] + seconds[: number % 3]
        policy.decide([(5.0 * n, 5.0, 5 * n * s) for n, s in zip(plan.sizes, turned, strict=False)])


def test_a_users_bounds_hold_and_yield_to_small_data() -> None:
    clients = [Client(100, 16, 7), Client(100, 16, 7), Client(3, 3, 1)]
    bounds, total = client_bounds(clients, lower=8, upper=[20, 20, 20])
    assert (bounds.lower, bounds.upper, total) == ([8, 8, 3], [20, 20, 3], 35)
    policy = LbBsp()
    policy.start(clients, local_steps=1, lower=8, upper=[20, 20, 20])
    assert policy.plan.sizes == (16, 16, 3)


def test_what_no_batches_can_be_made_of_is_refused() -> None:
    clients = [Client(100, 16, 7), Client(5, 5, 1)]
    with pytest.raises(ValueError, match="max_samples lists 3 ranks, but there are 2"):
        client_bounds(clients, upper=[8, 8, 8])
    with pytest.raises(ValueError, match="raise max_samples or lower the global batch"):
        client_bounds(clients, upper=4)
    with pytest.raises(ValueError, match=r"min_samples=\[64, 5\] asks for 69 samples on 2 ranks"):
        client_bounds(clients, lower=64)
