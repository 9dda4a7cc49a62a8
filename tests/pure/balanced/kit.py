"""Simulated ranks around `ShareController`: a main loop that draws and trains, and what the ranks send each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_hetero.balanced.decide.controller import ExchangeClock, Row, ShareController, Tag
from lightning_hetero.shares.bounds import ShareBounds
from lightning_hetero.shares.policy import BalancePolicy, ShareDecision
from lightning_hetero.types import SpeedSample

FIXED_S, PER_SAMPLE_S = 0.009, 0.003


class Noting(BalancePolicy):
    """Notes which records were taken in; moves at every record, and each is urgent."""

    def __init__(self) -> None:
        super().__init__(warmup=0)
        self.taken: list[int] = []

    @property
    def urgent_always(self) -> bool:
        return type(self) is Noting

    def urgent(self, samples: Sequence[int], compute_s: Sequence[float]) -> bool:
        return True

    def observe(self, records: Sequence[SpeedSample]) -> ShareDecision:
        decision = super().observe(records)
        self.taken.append(records[0].step)
        turn = 1 + len(self.taken) % 3
        rest = self.limits.total - turn * (len(records) - 1)
        self.shares = (*[turn] * (len(records) - 1), rest)
        return ShareDecision(shares=self.shares, changed=True, reason=decision.reason)


@dataclass
class Mail:
    """What all ranks sent, by tag. Reading an exchange that a rank has not sent yet would be a deadlock."""

    world: int
    rows: dict[Tag, dict[int, Row]] = field(default_factory=dict)

    def send(self, rank: int, tag: Tag, row: Row) -> None:
        self.rows.setdefault(tag, {})[rank] = row

    def read(self, tag: Tag) -> list[Row]:
        assert len(self.rows[tag]) == self.world, f"{tag}: waits for a rank that has not sent"
        return [self.rows[tag][r] for r in range(self.world)]


class Rank:
    """One rank's main loop: its loader draws up to ``ahead`` batches early, then the step is trained."""

    def __init__(
        self, rank: int, mail: Mail, *, lag: int, ahead: int, exchange: ExchangeClock, policy: BalancePolicy
    ):
        self.rank, self.mail, self.ahead = rank, mail, ahead
        policy.start(world_size=mail.world, total=64, bounds=ShareBounds(lower=1))
        self.controller = ShareController(policy, rank=rank, world_size=mail.world, lag=lag, exchange=exchange)
        self.shares: dict[Tag, tuple[int, ...]] = {}
        self.taken_before: dict[Tag, int] = {}

    def draw(self, epoch: int, step: int, steps: int, own_ahead: int) -> None:
        """Draws every batch up to ``step + own_ahead``, as a loader with that much read-ahead has by now."""
        policy = self.controller.policy
        for t in range(min(steps, step + own_ahead + 1)):
            if (epoch, t) not in self.shares:
                self.shares[epoch, t] = self.controller.full_shares(epoch, t)
                if isinstance(policy, Noting):
                    self.taken_before[epoch, t] = len(policy.taken)

    def train(self, epoch: int, step: int, slow: float, noise: float = 1.0) -> float:
        samples = self.shares[epoch, step][self.rank]
        compute_s = slow * (FIXED_S + PER_SAMPLE_S * samples) * noise
        self.controller.measured(samples, compute_s, 0.0)
        if self.controller.wants_exchange(epoch, step):
            tag = (epoch, step)
            self.mail.send(self.rank, tag, self.controller.row(epoch, step))
            self.controller.sent(epoch, step, lambda: self.mail.read(tag))
        return compute_s
