"""What the ranks do in a round: on how many samples, in how many steps, at what learning rate (layer P).

| name | batch size B | local steps tau | learning rate |
|---|---|---|---|
| ``lb-bsp`` | by speed, the sum stays | tau for all | unchanged |
| ``fedavg`` | the loader's | tau for all | unchanged |
| ``adaptive_steps`` | the loader's | by speed, the sum stays | unchanged |
| ``scaled_lr`` | by speed, the sum stays | tau for all | times B over the loader's |

The four are those that LB-BSP compares (Chen et al., IEEE TCC 2021; the federated algorithm itself is not public).
Ours: that batches, or steps, are decided by the same `BalancePolicy` as the balanced engine's shares, one record per
round; that the first round is equal; rule and bounds of the learning rate.

Every rank holds the same policy and feeds it the same records, so every rank decides the same.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, TypeAlias

from lightning_hetero.federated.decide.rounds import Client, RoundPlan
from lightning_hetero.shares.bounds import Bound, ShareBounds, per_rank
from lightning_hetero.shares.policy import BalancePolicy, ShareDecision
from lightning_hetero.types import SpeedSample

RoundPolicyName: TypeAlias = Literal["lb-bsp", "fedavg", "adaptive_steps", "scaled_lr"]
Measured: TypeAlias = tuple[float, float, float]
"""Samples, local steps and seconds of own work of one rank, since the decision before."""


class RoundPolicy(ABC):
    """Decides what the ranks do between two averages.

    Attributes:
        resizes: whether batches get other sizes than the loaders give them.
        again: whether a rank whose data are through before the epoch ends begins them again; else it is idle.
    """

    resizes: ClassVar[bool] = False
    again: bool = True

    def start(self, clients: Sequence[Client], *, local_steps: int, **sizes: Any) -> None:
        """Opens a run.

        Args:
            clients: what each rank trains on.
            local_steps: of a round.
            sizes: ``lower``, ``upper``, ``total`` and ``least`` of batches, see `client_bounds`.

        Raises:
            ValueError: the bounds admit no batches.
        """
        del sizes  # for policies that re-size batches
        self._own = tuple(client.batch_size for client in clients)
        self._local_steps = local_steps

    def keep(self, ranks: Sequence[int | None]) -> None:
        """Before another `start` within a run, because ranks were lost or have come: goes on with what was learned.

        Args:
            ranks: for each rank from now on, its place before; None: it was not there.
        """

    @property
    def plan(self) -> RoundPlan:
        """The plan of the next round."""
        number = len(self._own)
        return RoundPlan(sizes=self._own, steps=(self._local_steps,) * number, lr_factors=(1.0,) * number)

    @abstractmethod
    def decide(self, measured: Sequence[Measured]) -> ShareDecision | None:
        """Takes in what was measured of each rank and decides on the next round; None: there is nothing to decide."""

    def predict_s(self) -> tuple[float, ...]:
        """Returns the predicted own work of a local step [s] per rank; empty where nothing is predicted."""
        return ()

    def settings(self) -> dict[str, str]:
        """Returns what decides besides the records, in words: ranks where it differs would part ways."""
        return {"policy": type(self).__name__, "again": str(self.again)}

    def state_dict(self) -> dict[str, Any]:
        """Returns plain types."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over, at the next `start`, what another run has learned."""


class FedAvg(RoundPolicy):
    """Standard federated averaging (McMahan et al., AISTATS 2017): equal batches, as many steps on every rank.

    Args:
        again: ``False``: an epoch is one pass over each rank's own data, and a rank that is through rests with weight 0
            until the others are; ``True``: it begins its data again, so that all make as many steps.
    """

    def __init__(self, *, again: bool = False) -> None:
        if again not in (True, False):
            raise ValueError(f"again={again!r} must be one of (True, False)")
        self.again = again

    def decide(self, measured: Sequence[Measured]) -> None:
        del measured


class _BySpeed(RoundPolicy):
    """Divides something among the ranks by their speeds, as the balanced engine divides a global batch.

    Args:
        balance: of what is divided; None: the balanced engine's default.
    """

    def __init__(self, *, balance: BalancePolicy | None = None) -> None:
        # A record is a round, so none is thrown away; single steps that say nothing are left out of it.
        self.balance = balance or BalancePolicy(warmup=0)
        self._resumed: tuple[int, ...] | None = None
        self._known: list[Measured] = []  # the last of each rank that was measured

    def _divide(self, world_size: int, total: int, bounds: ShareBounds) -> None:
        self.balance.start(world_size=world_size, total=total, bounds=bounds)
        self._known = [(0.0, 0.0, 0.0)] * world_size
        low, up = bounds.resolve(world_size, total)
        resumed = self._resumed or ()
        fits = len(resumed) == world_size and all(a <= n <= b for a, n, b in zip(low, resumed, up, strict=True))
        if not fits or sum(resumed) != total:
            self._resumed = None

    def keep(self, ranks: Sequence[int | None]) -> None:
        """Keeps the speeds of the ranks that are left. With a new rank all begin equal, as in the first round."""
        self._resumed = None
        state = self.balance.state_dict()
        left = [state["predictors"][i] for i in ranks if i is not None]
        new = self.balance.prototype.fresh().state_dict()
        predictors = left if len(left) == len(ranks) else [new] * len(ranks)
        self.balance.load_state_dict({**state, "predictors": predictors, "most_samples": (), "guard": {}})

    @property
    def divided(self) -> tuple[int, ...]:
        """What each rank gets; after a resume what it had, up to the next decision."""
        return self.balance.shares if self._resumed is None else self._resumed

    @abstractmethod
    def _record(self, rank: int, measured: Measured) -> SpeedSample:
        """Returns what the policy gets to know of a rank that was measured."""

    def decide(self, measured: Sequence[Measured]) -> ShareDecision | None:
        # A rank that took no part in the round is as fast as it was.
        self._known = [new if new[1] > 0 else old for new, old in zip(measured, self._known, strict=True)]
        if not all(steps > 0 and seconds > 0 for _, steps, seconds in self._known):
            return None
        before = self.divided
        records = [self._record(rank, one) for rank, one in enumerate(self._known)]
        decision = self.balance.take(records, batches=1)
        self._resumed = None
        if decision.changed or decision.shares == before:
            return decision
        return ShareDecision(shares=decision.shares, changed=True, reason="resumed", predicted_s=decision.predicted_s)

    def settings(self) -> dict[str, str]:
        return {**self.balance.settings(), **super().settings()}

    def state_dict(self) -> dict[str, Any]:
        return {"divided": list(self.divided), **self.balance.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.balance.load_state_dict(state)
        self._resumed = tuple(int(n) for n in state.get("divided", ())) or None


class LbBsp(_BySpeed):
    """Batches sized to the devices, so that all ranks make their local steps in the same time; the sum stays.

    Args:
        balance: see `BalancePolicy`.
    """

    resizes = True

    def start(self, clients: Sequence[Client], *, local_steps: int, **sizes: Any) -> None:
        super().start(clients, local_steps=local_steps)
        bounds, wanted = client_bounds(clients, **sizes)
        self._divide(len(clients), wanted, bounds)

    @property
    def plan(self) -> RoundPlan:
        return replace(super().plan, sizes=self.divided)

    def _record(self, rank: int, measured: Measured) -> SpeedSample:
        samples, steps, seconds = measured
        return SpeedSample(rank=rank, step=0, samples=max(1, round(samples / steps)), compute_s=seconds / steps)

    def predict_s(self) -> tuple[float, ...]:
        return tuple(self.balance.predict_s(self.divided))


class ScaledLr(LbBsp):
    """As `LbBsp`, and each rank's learning rate in proportion to its batch, over the batch size of its loader.

    The linear rule is that of Goyal et al. (2017). The factor holds in local steps only: schedulers, loggers and
    checkpoints see the unchanged learning rate.

    Args:
        balance: see `BalancePolicy`.
    """

    @property
    def plan(self) -> RoundPlan:
        plan = super().plan
        return replace(plan, lr_factors=tuple(n / own for n, own in zip(plan.sizes, self._own, strict=True)))


class AdaptiveSteps(_BySpeed):
    """More local steps on fast devices, so that all ranks are through in the same time; their sum stays.

    Args:
        balance: see `BalancePolicy`; what is divided are steps.
    """

    def start(self, clients: Sequence[Client], *, local_steps: int, **sizes: Any) -> None:
        super().start(clients, local_steps=local_steps)
        self._divide(len(clients), local_steps * len(clients), ShareBounds(lower=1, upper=4 * local_steps))

    @property
    def plan(self) -> RoundPlan:
        return replace(super().plan, steps=self.divided)

    def _record(self, rank: int, measured: Measured) -> SpeedSample:
        _, steps, seconds = measured
        return SpeedSample(rank=rank, step=0, samples=round(steps), compute_s=seconds)

    def predict_s(self) -> tuple[float, ...]:
        predicted = self.balance.predict_s(self.divided)
        return tuple(seconds / max(1, steps) for seconds, steps in zip(predicted, self.divided, strict=True))


_KNOWN: dict[str, Callable[..., RoundPolicy]] = {
    "lb-bsp": LbBsp, "fedavg": FedAvg, "adaptive_steps": AdaptiveSteps, "scaled_lr": ScaledLr
}  # fmt: skip


def by_name(name: str) -> RoundPolicy:
    """Returns a new policy: ``"lb-bsp"``, ``"fedavg"``, ``"adaptive_steps"`` or ``"scaled_lr"``.

    Raises:
        ValueError: the name is unknown.
    """
    if name not in _KNOWN:
        raise ValueError(f"unknown policy {name!r}: choose one of {', '.join(_KNOWN)}, or pass a RoundPolicy")
    return _KNOWN[name]()


# ---- bounds ----------------------------------------------------------------------------------------------------


def client_bounds(
    clients: Sequence[Client], *, lower: Bound = None, upper: Bound = None, total: int | None = None, least: int = 1
) -> tuple[ShareBounds, int]:
    """Returns bounds of the ranks' batches, and what these sum up to.

    No batch is larger than the data of its rank, and none is empty. By default a rank has a quarter of the equal share
    at least, and four times as much at most, but may keep the batch size that its loader has.

    Args:
        clients: what the ranks train on; each has samples.
        lower, upper: samples per rank as the user gives them: a number, or one per rank.
        total: samples of all ranks per local step; None: what the loaders' batch sizes sum up to.
        least: of any batch; 2 where BatchNorm cannot do with one.

    Raises:
        ValueError: the bounds have the wrong length, or admit no split of ``total``.

    >>> bounds, total = client_bounds([Client(100, 16, 7), Client(5, 5, 1)])
    >>> bounds.lower, bounds.upper, total
    ([2, 2], [44, 5], 21)
    """
    world_size = len(clients)
    wanted = sum(client.batch_size for client in clients) if total is None else total
    equal = wanted / world_size
    low = per_rank("min_samples", lower, world_size, max(1, math.floor(equal / 4)))
    up = per_rank("max_samples", upper, world_size, 4 * math.ceil(equal))
    if upper is None:
        up = [max(most, client.batch_size) for most, client in zip(up, clients, strict=True)]
    up = [max(1, min(most, client.samples)) for most, client in zip(up, clients, strict=True)]
    low = [min(max(a, least), b) if lower is None else min(max(a, 1), c.samples) for a, b, c in
           zip(low, up, clients, strict=True)]  # fmt: skip
    bounds = ShareBounds(lower=low, upper=up)
    bounds.resolve(world_size, wanted)
    return bounds, wanted
