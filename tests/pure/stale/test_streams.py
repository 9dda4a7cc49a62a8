"""Finite streams of the ranks' own, driven by simulated ranks: every sample once, ends known in time, resumed."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.stale.decide.coordinator import Coordinator
from lightning_hetero.stale.decide.effects import Accepted, Assigned, Effect, Passed, Refused
from lightning_hetero.stale.decide.policy import Asp, Bsp, Flexible, Policy, Saps, Ssp
from lightning_hetero.stale.decide.streams import UNLIMITED, Stream, Streams

POLICIES = [Bsp, Flexible, lambda: Flexible(bound=0), Asp, Ssp, lambda: Saps(threshold=1, bound=2)]


@dataclass
class Reader:
    """A rank with its stream: reads ahead, trains what it is assigned, trains again what was in vain."""

    rank: int
    length: int
    reserve: int
    read: int = 0
    through: bool = False
    used: int = 0
    taken: int = 0
    step: int = 0

    def read_ahead(self) -> None:
        wanted = self.reserve - (self.read - self.used - self.taken)
        if wanted > 0 and not self.through:
            self.through = wanted > self.length - self.read
            self.read = min(self.length, self.read + wanted)


@dataclass
class Epoch:
    """An epoch in which chunks take as long as the seed says; stalls are longer than the server is patient."""

    policy: Policy
    lengths: Sequence[int]
    batch: int
    seed: int = 0
    most: int = UNLIMITED
    drop_last: bool = False
    stall: float = 0.0
    used: Sequence[int] = ()
    first: int = 0
    stops_at: int = UNLIMITED
    updates: int = 0
    grants: list[tuple[int, int]] = field(default_factory=list)  # the server's step, and the total known with it

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        reserve = Streams.reserve(self.batch, drop_last=self.drop_last)
        used = self.used or [0] * len(self.lengths)
        self.ranks = [Reader(r, n, reserve, u, used=u, step=self.first)
                      for r, (n, u) in enumerate(zip(self.lengths, used, strict=True))]  # fmt: skip
        for rank in self.ranks:
            rank.read_ahead()
        streams = [Stream(r.rank, r.read, r.through, r.used) for r in self.ranks]
        numbers = Streams.numbers(self.batch, self.most, drop_last=self.drop_last, first=self.first, streams=streams)
        self.streams = Streams(numbers)
        self.it = Coordinator(self.policy, workers=range(len(self.ranks)), liveness_s=0.3)
        self.events: list[tuple[float, int, int, int]] = []  # time, number, rank, assignment to push; 0: claim
        self.number = itertools.count()
        if len(self.streams.ends) > self.first:
            applied = [(0, self.streams.used)] if self.streams.used else []
            self.it.begin(0, self.streams.ends, applied=applied, global_step=self.first, now=0.0, streams=self.streams)
            for rank in self.ranks:
                self.later(0.0, rank.rank, 0)

    def later(self, at_s: float, rank: int, assignment: int) -> None:
        heapq.heappush(self.events, (at_s, next(self.number), rank, assignment))

    def run(self) -> Epoch:
        now = 0.0
        while not (self.ended or self.it.global_step >= self.stops_at):
            assert self.events or self.it.wake_s() < float("inf"), "everybody waits"
            if not self.events or self.it.wake_s() <= self.events[0][0]:
                now = max(now, self.it.wake_s())
                self.take(self.it.wake(now), now)
                continue
            now, _, number, assignment = heapq.heappop(self.events)
            rank = self.ranks[number]
            self.it.told(number, rank.read, rank.through)
            if assignment:
                self.take(self.it.push(number, assignment, now, global_step=rank.step), now)
            self.take(self.it.claim(number, rank.step, now), now)
        return self

    @property
    def ended(self) -> bool:
        return not self.it.ends or (bool(self.streams.total) and self.it.global_step == len(self.it.ends))

    def take(self, effects: list[Effect], now: float) -> None:
        for effect in effects:
            rank = self.ranks[getattr(effect, "rank", 0)]
            if isinstance(effect, Assigned):
                if not effect.samples:
                    self.later(now + 0.001, rank.rank, 0)
                    continue
                assert effect.samples <= rank.read - rank.used  # no more than it has
                self.grants.append((effect.global_step, self.streams.total))
                rank.taken = effect.samples
                rank.read_ahead()
                takes_s = 0.01 + effect.samples * self.rng.choice([0.001, 0.003, 0.02])
                takes_s += 5.0 if self.rng.random() < self.stall else 0.0
                self.later(now + takes_s, rank.rank, effect.assignment)
            elif isinstance(effect, Passed):
                rank.step = effect.global_step
                self.later(now + 0.001, rank.rank, 0)
            elif isinstance(effect, Accepted):
                rank.used, rank.taken = rank.used + effect.samples, 0
            elif isinstance(effect, Refused):
                rank.taken = 0


LENGTHS = st.lists(st.integers(0, 60), min_size=2, max_size=4)


@given(lengths=LENGTHS, policy=st.sampled_from(POLICIES), batch=st.integers(4, 16), seed=st.integers(0, 999),
       stall=st.sampled_from([0.0, 0.1]))  # fmt: skip
def test_every_sample_is_trained_once_and_the_last_batch_is_known_when_it_begins(
    lengths: list[int], policy: type[Policy], batch: int, seed: int, stall: float
) -> None:
    epoch = Epoch(policy(), lengths, batch, seed, stall=stall).run()
    total = sum(lengths)
    assert [rank.used for rank in epoch.ranks] == lengths
    steps = -(-total // batch)
    assert epoch.it.global_step == steps == len(epoch.it.ends or ())
    for step, known in epoch.grants:
        assert known in (0, total)
        assert known == total or step < steps - 1


@given(lengths=LENGTHS, policy=st.sampled_from(POLICIES), most=st.integers(1, 6), seed=st.integers(0, 999))
def test_a_limit_of_batches_and_drop_last_end_with_a_whole_batch(
    lengths: list[int], policy: type[Policy], most: int, seed: int
) -> None:
    epoch = Epoch(policy(), lengths, 10, seed, most=most, drop_last=True).run()
    steps = min(most, sum(lengths) // 10)
    assert epoch.it.global_step == steps and sum(rank.used for rank in epoch.ranks) == 10 * steps
    assert all(known == 10 * steps or step < steps - 1 for step, known in epoch.grants)


@pytest.mark.parametrize("make", POLICIES)
@pytest.mark.parametrize("stops_at", [1, 3, 5])
def test_an_epoch_goes_on_where_each_stream_was(make: type[Policy], stops_at: int) -> None:
    before = Epoch(make(), (31, 0, 17), 8, seed=5, stops_at=stops_at).run()
    state = before.it.state_dict()
    used = [state["used"][rank] for rank in range(3)]
    assert sum(used) == sum(end - start for start, end in state["applied"])
    after = Epoch(make(), (31, 0, 17), 8, seed=6, used=used, first=stops_at).run()
    assert [rank.used for rank in after.ranks] == [31, 0, 17]
    assert after.it.global_step == stops_at + -(-(48 - sum(used)) // 8)


def test_a_rank_that_is_through_is_waited_for_by_nobody() -> None:
    """Behind a barrier the others take what it leaves of its part, chunk by chunk."""
    epoch = Epoch(Bsp(), (3, 40), 10).run()
    assert epoch.it.ends == [10, 20, 30, 40, 43]
    assert max(rank.taken for rank in epoch.ranks) <= 5


def test_a_batch_that_is_known_in_part_is_no_batch_yet() -> None:
    told = [Stream(0, 9, through=False), Stream(1, 4, through=True)]
    streams = Streams(Streams.numbers(8, UNLIMITED, drop_last=False, first=0, streams=told))
    assert (streams.ends, streams.total) == ([8], 0)
    streams.tell(0, 12, False)
    assert (streams.grow(), streams.total) == ([16], 0)
    streams.tell(0, 15, True)
    assert (streams.grow(), streams.total, streams.left(0)) == ([19], 19, 15)
