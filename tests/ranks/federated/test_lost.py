"""Clients that are lost: the others' averages leave them out, to the last bit; all of them, or none, take an average.

A rank is lost by ending its signs of life without a word. Real deaths, and clients that come again, are in
`tests/e2e/test_federated.py`.
"""

from __future__ import annotations

import gc
import os
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset

from lightning_hetero.federated.fit import averaging
from lightning_hetero.transport.base import ServerLostError
from lightning_hetero.transport.groups import leave_default_group
from tests.ranks.federated.kit import EXACT, Plain, by_hand, chunks, data, federated, fit, own
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Weights, weights

BATCH, TAU, LIVENESS_S = 4, 2, 2.0
PARTS = (range(0, 24), range(24, 46), range(46, 64))  # 6, 6 and 5 batches; the last ones are of 4, 2 and 2
LOST_AT = 2  # of 3 rounds, counted from 1: what rank 2 does in it is lost


class Stream(IterableDataset[Any]):
    def __init__(self, indices: range) -> None:
        self.indices = indices

    def __iter__(self) -> Any:
        return (data()[i] for i in self.indices)


class LostError(Exception):
    """This rank is gone."""


class Loses(Plain):
    """Rank ``who`` is lost in the batch, or in the average, of round `LOST_AT`.

    Args:
        who: the rank; None: nobody.
        where: ``"batch"``: it falls silent, its connections stay; ``"average"``: it is cut off in the middle;
            ``"states"``: parameters have been averaged, and it is cut off in the average of the optimizers' states.
    """

    def __init__(self, who: int | None, where: str, momentum: float = 0.0) -> None:
        super().__init__(momentum=momentum)
        self.who, self.where = who, where

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_rank == self.who and batch_idx == TAU * (LOST_AT - 1) + 1:
            if self.where == "error":
                raise ValueError("the cause")
            if self.where == "batch":
                self.vanish()
            else:
                setattr(averaging, "average_" if self.where == "average" else "average_states_", self.cut_off)
        return super().training_step(batch, batch_idx)

    def vanish(self) -> None:
        roll: Any = self.trainer.strategy._run.clients.roll  # type: ignore[attr-defined]
        roll._store.let_go()
        if self.trainer.global_rank:
            roll._left.set()
        else:  # the store goes with its process
            self.trainer.strategy.members.hosted = None  # type: ignore[attr-defined]
            gc.collect()
        raise LostError

    def cut_off(self, *args: Any) -> None:
        """In the place of this rank's part in the average, for which the others wait."""
        try:
            raise ConnectionError
        except ConnectionError:
            self.trainer.strategy._run.channel.leave()  # type: ignore[attr-defined]
            leave_default_group()
        self.vanish()


def losing(rank: int, world: int, who: int, where: str, strategy: dict[str, Any], momentum: float, val: bool) -> Any:
    average_, average_states_ = averaging.average_, averaging.average_states_
    module = Loses(who, where, momentum)
    made = federated(**{"local_steps": TAU, "min_clients": 2, "liveness_s": LIVENESS_S, **strategy})
    loaders: Any = own(PARTS[rank], BATCH)
    if "stream" in strategy:
        loaders = DataLoader(Stream(PARTS[rank]), batch_size=BATCH)
    if val:
        loaders = loaders, DataLoader(Subset(data(), range(9)), batch_size=2)
    said: list[str] = []
    error = ""
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(rank, world, made, loaders, module=module)
    except LostError:
        error = "lost"
    except (RuntimeError, ServerLostError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    finally:
        averaging.average_, averaging.average_states_ = average_, average_states_
        said = [str(one.message) for one in caught if "is left out" in str(one.message)]
    run = {"batches": module.batches, "said": said, "shares": made.shares, "validated": module.validated}
    return error, weights(module), run, os.getpid()


def without(clients: list[list[list[int]]], at: int) -> list[list[list[int]]]:
    """The last client's batches end before round ``at``."""
    return [*clients[:-1], clients[-1][: TAU * (at - 1)]]


def server(weights_now: list[Weights]) -> Any:
    """FedAvgM by hand, as `tests/ranks/federated/test_exact.py` has it."""
    state: dict[str, Any] = {"before": weights_now[0], "m": None}

    def step(modules: list[Any], optimizers: list[Any]) -> None:
        averaged, before, m = weights(modules[0]), state["before"], state["m"]
        d = {k: before[k] - averaged[k] for k in before}
        m = d if m is None else {k: 0.5 * m[k] + d[k] for k in d}
        state["m"], state["before"] = m, Weights({k: before[k] - 0.7 * m[k] for k in before})
        for module in modules:
            module.load_state_dict(state["before"])

    return step


@pytest.mark.parametrize(
    ("where", "val", "more"), [("batch", True, {}), ("average", False, {}), ("batch", False, {"stream": "finite"})]
)
def test_averages_are_those_without_the_client_that_is_lost_in_this_round(
    where: str, val: bool, more: dict[str, Any]
) -> None:
    """With the server's momentum, which every rank keeps for itself: alike, also where an average was begun twice."""
    strategy = {"server": partial(torch.optim.SGD, lr=0.7, momentum=0.5), **more}
    results = run_ranks(3, losing, 2, where, strategy, 0.0, val)
    clients = [chunks(part, BATCH) for part in PARTS]
    expected = by_hand(without(clients, LOST_AT), TAU, rounds=server([weights(Plain())]))
    with_it = by_hand(clients, TAU, rounds=server([weights(Plain())]))
    assert results[2][0] == "lost"
    for rank in (0, 1):
        error, trained, run, _ = results[rank]
        assert error == "" and trained.distance(expected) <= EXACT < 1e-4 < trained.distance(with_it)
        assert run["batches"] == clients[rank] and run["shares"] == (4, 4, 0)
        assert len(run["validated"]) == int(val)
    assert results[0][1].distance(results[1][1]) == 0.0
    (text,) = results[0][2]["said"]
    assert "rank 2 is left out (" in text and "2 ranks" in text
    assert results[1][2]["said"] == []


def averaged_states(survivors: int) -> Any:
    """Momentum averaged by the samples of the round, over those that are there: 8 of each up to the last round."""
    rounds = 0

    def average(modules: list[Any], optimizers: list[Any]) -> None:
        nonlocal rounds
        rounds += 1
        there = len(modules) if rounds < LOST_AT else survivors
        used = [8] * there if rounds < 3 else [8, 6]
        for parameters in zip(*(module.parameters() for module in modules), strict=True):
            held = [o.state[p] for o, p in zip(optimizers, parameters, strict=True)][:there]
            mean = sum(n * state["momentum_buffer"] for n, state in zip(used, held, strict=True)) / sum(used)
            for state in held:
                state["momentum_buffer"] = mean.clone()

    return average


def test_parameters_and_states_are_those_before_an_average_that_was_broken_off() -> None:
    """Half of it was in place: nobody keeps that half."""
    results = run_ranks(3, losing, 2, "states", {}, 0.9, False)
    clients = without([chunks(part, BATCH) for part in PARTS], LOST_AT)
    expected = by_hand(clients, TAU, make=lambda: Plain(momentum=0.9), rounds=averaged_states(2))
    for rank in (0, 1):
        assert results[rank][0] == "" and results[rank][1].distance(expected) <= EXACT


def test_batches_are_sized_again_for_those_that_are_left() -> None:
    """A global batch that the user has named stays."""
    strategy = {"policy": "lb-bsp", "global_batch_size": 12}
    results = run_ranks(3, losing, 2, "batch", strategy, 0.0, False)
    (error, mine, first, _), (also, others, second, _), _ = results
    assert error == also == "" and mine.distance(others) == 0.0
    assert sum(first["shares"]) == 12 and first["shares"][2] == 0
    sizes = [len(a) + len(b) for a, b in zip(first["batches"], second["batches"], strict=True)]
    assert sizes[-2:] == [12, 12]


@pytest.mark.parametrize(
    ("who", "where", "least", "text"),
    [
        (2, "batch", 3, "RemoteFailureError: 2 ranks are left, and min_clients=3 must be (rank 2: "),
        (0, "batch", 2, "ServerLostError: rank 0, without which the others cannot go on, has died"),
    ],
)
def test_the_run_ends_with_the_cause_on_all_ranks(who: int, where: str, least: int, text: str) -> None:
    results = run_ranks(3, losing, who, where, {"min_clients": least}, 0.0, False)
    assert [text in error for error, *_ in results] == [rank != who for rank in range(3)]
    assert results[who][0] == "lost"


def caught_error(rank: int, world: int) -> str:
    try:
        return losing(rank, world, 1, "error", {}, 0.0, False)[0]
    except ValueError as error:
        return f"own: {error}"


def test_an_error_on_one_rank_is_told_to_all() -> None:
    first, own_error, third = run_ranks(3, caught_error)
    assert own_error == "own: the cause"
    for error in (first, third):
        assert error == "RuntimeError: rank 1 failed: ValueError: the cause"
