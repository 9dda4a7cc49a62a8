"""Mathematics: averages are those of FedAvg by hand, and with one local step those of the balanced engine."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero.federated.policy import FedAvg
from tests.ranks.federated.kit import EXACT, SAMPLES, Plain, by_hand, chunks, data, federated, fit, own
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Toy, Weights, balanced, rank_trainer, regression, weights

BATCH = 4


class Momentum(Toy):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def both_engines(rank: int, world: int) -> tuple[Weights, Weights]:
    """The same global batches: the balanced engine divides them, here each rank has its part from the start."""
    whole = regression(SAMPLES)
    module = Momentum()
    rank_trainer(rank, world, balanced(policy=None, rebalance=False), max_epochs=1).fit(
        module, DataLoader(whole, batch_size=BATCH)
    )
    full = BATCH * world
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(0)).tolist()
    mine = [i for start in range(rank * BATCH, SAMPLES, full) for i in order[start : start + BATCH]]
    x, y = whole.tensors
    alone = Momentum()
    rank_trainer(rank, world, federated(local_steps=1), max_epochs=1).fit(
        alone, DataLoader(TensorDataset(x[mine], y[mine]), batch_size=BATCH)
    )
    return weights(module), weights(alone)


def test_one_local_step_on_equal_data_is_the_balanced_engine() -> None:
    """Under SGD with momentum, which is linear: the mean of parameters and states is the step of the mean gradient."""
    for balanced_weights, federated_weights in run_ranks(2, both_engines):
        assert federated_weights.distance(balanced_weights) <= EXACT
        assert federated_weights.distance(weights(Momentum())) > 1e-2


# ---- by hand -----------------------------------------------------------------------------------------------

UNEVEN = (range(0, 30), range(30, 40), range(40, 64))  # 8, 3 and 6 batches; the last are of 2, 2 and 4


def uneven(rank: int, world: int, again: bool, tau: int) -> tuple[Weights, list[list[int]], int]:
    policy = FedAvg(again=again)
    module, trainer = fit(rank, world, federated(local_steps=tau, policy=policy), own(UNEVEN[rank], BATCH))
    return weights(module), module.batches, trainer.global_step


@pytest.mark.parametrize("tau", [1, 3])
def test_uneven_clients_are_weighted_by_samples_and_one_that_is_through_rests(tau: int) -> None:
    """With 3 steps a round the second client has nothing for the last two rounds: its weight is 0 there."""
    results = run_ranks(3, uneven, False, tau)
    expected = by_hand([chunks(client, BATCH) for client in UNEVEN], tau)
    for (trained, batches, steps), client in zip(results, UNEVEN, strict=True):
        assert trained.distance(expected) <= EXACT
        assert batches == chunks(client, BATCH)  # its own loader as it is, each sample once
        assert steps == 8
    assert expected.distance(weights(Plain())) > 1e-2


def test_a_client_that_begins_its_data_again_makes_all_steps() -> None:
    results = run_ranks(3, uneven, True, 3)
    clients = [(chunks(client, BATCH) * 8)[:8] for client in UNEVEN]
    expected = by_hand(clients, 3)
    for (trained, batches, steps), client in zip(results, clients, strict=True):
        assert batches == client and steps == 8
        assert trained.distance(expected) <= EXACT


class ByTokens(Plain):
    def batch_weight(self, batch: Any) -> float:
        return float(10 if 0 in batch[0] else 1)


def weighed(rank: int, world: int) -> Weights:
    module, _ = fit(rank, world, federated(local_steps=1), own(range(rank * 4, rank * 4 + 4), 4), module=ByTokens())
    return weights(module)


def test_batch_weight_counts_in_the_place_of_samples() -> None:
    alone = [by_hand([[list(range(r * 4, r * 4 + 4))]], 1) for r in range(2)]
    expected = Weights({k: (10 * alone[0][k] + alone[1][k]) / 11 for k in alone[0]})
    for trained in run_ranks(2, weighed):
        assert trained.distance(expected) <= EXACT


# ---- optimizer states, server, FedProx ---------------------------------------------------------------------

PARTS = (range(0, 16), range(16, 32))


def with_states(rank: int, world: int) -> Weights:
    return weights(fit(rank, world, federated(), own(PARTS[rank], BATCH), module=Plain(momentum=0.9))[0])


def averaged_states(modules: list[Any], optimizers: list[Any]) -> None:
    for parameters in zip(*(module.parameters() for module in modules), strict=True):
        held = [o.state[p] for o, p in zip(optimizers, parameters, strict=True)]
        mean = sum(state["momentum_buffer"] for state in held) / len(held)
        for state in held:
            state["momentum_buffer"] = mean.clone()


def test_optimizer_states_are_averaged() -> None:
    clients = [chunks(part, BATCH) for part in PARTS]
    expected, other = (
        by_hand(clients, 2, make=lambda: Plain(momentum=0.9), rounds=rounds) for rounds in (averaged_states, None)
    )
    for trained in run_ranks(2, with_states):
        assert trained.distance(expected) <= EXACT and trained.distance(other) > 1e-6


class Halves(Plain):
    """Rank 1 uses one layer fewer, so its Adam keeps nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.more = torch.nn.Linear(1, 1).double()
        with torch.no_grad():
            self.more.weight.fill_(1.0), self.more.bias.fill_(0.5)

    def loss(self, batch: Any) -> Any:
        x, y = batch
        out = self.net(x)
        if self.trainer.global_rank == 0:
            out = self.more(out)
        return torch.nn.functional.mse_loss(out, y)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def with_adam(rank: int, world: int) -> tuple[Weights, list[float]]:
    module, trainer = fit(rank, world, federated(), own(PARTS[rank], BATCH), module=Halves())
    state = trainer.optimizers[0].state[module.more.weight]
    return weights(module), [float(state["exp_avg"]), float(state["step"])]


def test_states_that_only_some_ranks_have_are_averaged_too() -> None:
    (first, kept), (second, also) = run_ranks(2, with_adam)
    assert first.distance(second) == 0.0 and kept == also
    assert kept[0] != 0.0 and kept[1] >= 2.0


class Pulled(Plain):
    """FedProx's term in the loss, against weights that the test sets."""

    anchor: ClassVar[list[Any]] = []

    def loss(self, batch: Any) -> Any:
        pulled = sum(((p - a) ** 2).sum() for p, a in zip(self.parameters(), self.anchor, strict=True))
        return super().loss(batch) + 0.5 * 0.8 * pulled


def anchored() -> Pulled:
    module = Pulled()
    Pulled.anchor = [p.detach().clone() for p in module.parameters()]
    return module


def pulled(rank: int, world: int) -> Weights:
    return weights(fit(rank, world, federated(proximal=0.8, local_steps=4), own(PARTS[rank], BATCH))[0])


def test_fedprox_pulls_local_steps_towards_the_last_average() -> None:
    expected = by_hand([chunks(part, BATCH) for part in PARTS], 4, make=anchored)
    plain = by_hand([chunks(part, BATCH) for part in PARTS], 4)
    for trained in run_ranks(2, pulled):
        assert trained.distance(expected) <= EXACT < 1e-4 < trained.distance(plain)


class Normed(Plain):
    """BatchNorm: running statistics are buffers, its count of batches a whole number."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(6, dtype=torch.float64)

    def loss(self, batch: Any) -> Any:
        return super().loss((self.norm(batch[0]), batch[1]))


def normed(rank: int, world: int) -> tuple[Weights, Weights]:
    module, _ = fit(rank, world, federated(local_steps=4), own(PARTS[rank], BATCH), module=Normed())
    alone, batches = Normed().norm, chunks(PARTS[rank], BATCH)
    for indices in batches:
        alone(data()[indices][1])
    return weights(module.norm), weights(alone)


def test_statistics_of_batch_norm_are_averaged() -> None:
    (first, alone), (second, other) = run_ranks(2, normed)
    assert first.distance(second) == 0.0
    mean = (alone["running_mean"] + other["running_mean"]) / 2
    assert torch.allclose(first["running_mean"], mean, atol=1e-12) and int(first["num_batches_tracked"]) == 4
