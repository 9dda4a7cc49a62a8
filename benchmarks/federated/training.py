"""Real training of federated clients in one process, on the clock of emulated devices.

Policies, own data and averages are the engine's own code; so are the times of the emulated devices, which no process
waits for. A round takes as long as the slowest client's local steps, and `EXCHANGE_S`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset

from lightning_hetero.data import partition_by_labels
from lightning_hetero.data.loader import inspect_loader
from lightning_hetero.demo import DigitsCNN, DigitsData
from lightning_hetero.emulate.scenario import Scenario, SpeedChange
from lightning_hetero.federated.decide.policy import AdaptiveSteps, FedAvg, LbBsp, RoundPolicy, ScaledLr
from lightning_hetero.federated.decide.rounds import Client
from lightning_hetero.federated.runtime.own import DataPlace, OwnBatches, OwnOrder

SPEEDS = (1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.125)
CLIENTS, BATCH, LOCAL_STEPS, ALPHA, LR = len(SPEEDS), 16, 10, 0.3, 0.1
SAMPLE_S, STEP_S, JITTER, EXCHANGE_S = 0.003, 0.004, 0.05, 0.02
DRIFT, SLOWEST, FASTEST = 0.1, 0.05, 2.0  # standard deviation of the logarithm of a speed, per round; bounds
_SLOTS = 8 * LOCAL_STEPS  # steps of the scenario per round: more than any client makes
OWNED = "lb-bsp, weight_by owned"
POLICIES: Mapping[str, Callable[[], RoundPolicy]] = {
    "fedavg": lambda: FedAvg(again=True),
    "lb-bsp": LbBsp,
    OWNED: LbBsp,
    "adaptive_steps": AdaptiveSteps,
    "scaled_lr": ScaledLr,
}


@dataclass
class Course:
    """What came of one run, after each round.

    Attributes:
        accuracy: of the average, on the held-out images.
        time_s: emulated time so far [s].
        waiting: part of the clients' time that they waited, of that round.
        samples: trained on so far, by all clients.
    """

    accuracy: list[float] = field(default_factory=list)
    time_s: list[float] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)

    def smooth(self) -> list[float]:
        """Accuracy as the mean of three rounds."""
        return [float(np.mean(self.accuracy[max(0, i - 2) : i + 1])) for i in range(len(self.accuracy))]

    def time_to(self, target: float) -> float | None:
        """Returns the emulated time after which the smoothed accuracy has reached ``target``; None: never."""
        return next((t for t, a in zip(self.time_s, self.smooth(), strict=True) if a >= target), None)

    def final(self) -> float:
        """Accuracy as the mean of the last ten rounds."""
        return float(np.mean(self.accuracy[-10:]))

    def after(self, rounds: int) -> float:
        """Accuracy as the mean of the ten rounds up to that one."""
        return float(np.mean(self.accuracy[max(0, rounds - 10) : rounds]))

    def plain(self) -> dict[str, list[float]]:
        return {name: [float(f"{value:.5g}") for value in values] for name, values in vars(self).items()}


def scenario_of(name: str, rounds: int, seed: int) -> Scenario:
    """Returns the emulated devices: ``steady``, or ``drifting``: each speed's logarithm walks at random."""
    scenario = Scenario(speeds=SPEEDS, sample_s=SAMPLE_S, step_s=STEP_S, jitter=JITTER, seed=seed)
    if name == "steady":
        return scenario
    generator, speeds, changes = np.random.default_rng([seed, 77]), np.array(SPEEDS), []
    for number in range(1, rounds):
        speeds = np.clip(speeds * np.exp(DRIFT * generator.standard_normal(CLIENTS)), SLOWEST, FASTEST)
        changes.append(SpeedChange(step=number * _SLOTS, speeds=speeds.tolist()))
    return Scenario(
        speeds=SPEEDS, sample_s=SAMPLE_S, step_s=STEP_S, jitter=JITTER, seed=seed, changes=changes
    )


def weighted_mean(copies: Sequence[Sequence[Tensor]], weights: Sequence[float]) -> list[Tensor]:
    """Returns what an average would make of the ranks' tensors, all in this process.

    Args:
        copies: by rank, tensors of the same shapes.
        weights: by rank, >= 0, not all 0.
    """
    parts = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    return [
        torch.tensordot(parts, torch.stack([t.double() for t in tensors]), 1).to(tensors[0].dtype)
        for tensors in zip(*copies, strict=True)
    ]


def train(
    policy: RoundPolicy, scenario: Scenario, *, rounds: int, seed: int, most_s: float = math.inf, owned: bool = False
) -> Course:
    """Trains; partition, first weights and orders follow from the seed, whatever the policy.

    Args:
        policy: of the rounds.
        scenario: of the devices.
        rounds: at most so many.
        seed: of the run.
        most_s: ends with the first round behind this emulated time.
        owned: weigh clients by the samples that they own, not by those that they have trained on.
    """
    torch.manual_seed(seed)
    digits: Any = DigitsData()
    digits.setup("fit")
    images, labels = digits.val.tensors
    parts = partition_by_labels(digits.train.tensors[1], CLIENTS, alpha=ALPHA, least=BATCH, seed=seed)
    average = DigitsCNN(channels=8)
    places = [DataPlace()] * CLIENTS
    sizes = [BATCH] * CLIENTS
    orders = []
    for rank, part in enumerate(parts):
        loader = DataLoader(Subset(digits.train, part), batch_size=BATCH, shuffle=True)
        orders.append(OwnOrder(loader, inspect_loader(loader), seed=1000 * seed + rank))
    policy.start([Client(o.samples, BATCH, o.batches) for o in orders], local_steps=LOCAL_STEPS)
    course, time_s, samples = Course(), 0.0, 0
    for number in range(rounds):
        plan = policy.plan
        ends, used, measured = [], [], []
        for rank, order in enumerate(orders):
            sizes[rank] = plan.sizes[rank]
            batches = OwnBatches(order, size=lambda rank=rank: sizes[rank])
            issued = batches.begin(places[rank])
            model = copy.deepcopy(average)
            optimizer = torch.optim.SGD(model.parameters(), lr=LR * plan.lr_factors[rank])
            spent_s, here = 0.0, 0
            for step, indices in enumerate(islice(batches, plan.steps[rank])):
                x, y = digits.train[[parts[rank][i] for i in indices]]
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                spent_s += scenario.work_s(rank, number * _SLOTS + step, len(indices))
                here += len(indices)
            places[rank] = issued[plan.steps[rank] - 1].after
            ends.append([p.detach() for p in model.parameters()])
            used.append(float(here))
            measured.append((float(here), float(plan.steps[rank]), spent_s))
        weights = [float(order.samples) for order in orders] if owned else used
        for parameter, mean in zip(average.parameters(), weighted_mean(ends, weights), strict=True):
            parameter.data.copy_(mean)
        slowest_s = max(s for _, _, s in measured)
        time_s += slowest_s + EXCHANGE_S
        samples += int(sum(used))
        with torch.no_grad():
            right = (average(images).argmax(1) == labels).float().mean()
        course.accuracy.append(float(right))
        course.time_s.append(time_s)
        course.waiting.append(1.0 - sum(s for _, _, s in measured) / (CLIENTS * slowest_s))
        course.samples.append(samples)
        if time_s >= most_s:
            break
        policy.decide(measured)
    return course


def runs_of(devices: str, seed: int, rounds: int, most_rounds: int) -> dict[str, Course]:
    """Returns the course of every policy, on the same devices and clients."""
    torch.set_num_threads(1)
    scenario = scenario_of(devices, most_rounds, seed)
    found = {"fedavg": train(POLICIES["fedavg"](), scenario, rounds=rounds, seed=seed)}
    most_s = found["fedavg"].time_s[-1]
    for name, make in POLICIES.items():
        if name not in found:
            found[name] = train(
                make(), scenario, rounds=most_rounds, seed=seed, most_s=most_s, owned=name == OWNED
            )
    return found
