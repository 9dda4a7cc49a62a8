"""Times on the wire from stamps of two clocks: exact on one machine, changes seen between two whose clocks differ."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lightning_hetero.pipeline.decide.links import LinkClock


class Wire:
    """Two ranks that send to one another in turn.

    Args:
        ahead_s: of b's clock before a's.
        drift: of b's clock, per second.
    """

    def __init__(self, ahead_s: float = 0.0, drift: float = 0.0) -> None:
        self.ahead_s, self.drift, self.now_s = ahead_s, drift, 0.0
        self.at_a, self.at_b = LinkClock(), LinkClock()

    def clock_b(self, at_s: float) -> float:
        return at_s * (1.0 + self.drift) + self.ahead_s

    def batch(self, there_s: float, back_s: float, messages: int = 4, gap_s: float = 0.5) -> tuple[float, float]:
        """So many messages each way, each on an empty wire; returns what was measured per message."""
        for _ in range(messages):
            sent_s, self.now_s = self.now_s, self.now_s + there_s
            self.at_b.came(
                sent_s=sent_s, back_s=self.at_a.least_s, arrived_s=self.clock_b(self.now_s), size_bytes=1000
            )
            sent_s, self.now_s = self.now_s, self.now_s + back_s
            self.at_a.came(
                sent_s=self.clock_b(sent_s), back_s=self.at_b.least_s, arrived_s=self.now_s, size_bytes=1000
            )
            self.now_s += gap_s
        (m, m_bytes, m_s), (n, n_bytes, n_s) = self.at_b.take(), self.at_a.take()
        assert m_bytes == 1000.0 * m and n_bytes == 1000.0 * n and min(m, n) >= 1
        return m_s / m, n_s / n


def test_on_one_machine_each_direction_is_exact_however_slow_it_is() -> None:
    wire = Wire()
    for there_s, back_s in ((0.01, 0.01), (0.2, 0.01), (0.2, 0.2), (0.001, 0.3)):
        assert wire.batch(there_s, back_s) == (pytest.approx(there_s), pytest.approx(back_s))


@pytest.mark.parametrize("ahead_s", [-1234.5, 3e5])
@pytest.mark.parametrize("drift", [0.0, 5e-5, -5e-5])
def test_between_two_machines_a_direction_that_gets_slow_is_told_from_the_other(ahead_s: float, drift: float) -> None:
    wire = Wire(ahead_s, drift)
    for _ in range(20):
        found = wire.batch(0.01, 0.01)
    assert found == (pytest.approx(0.01, rel=0.1), pytest.approx(0.01, rel=0.1))
    there_s, back_s = wire.batch(0.1, 0.01)
    assert there_s == pytest.approx(0.1, rel=0.02) and back_s == pytest.approx(0.01, rel=0.1)
    for _ in range(2000):  # 90 minutes later nobody knows which way it is; the sum stays
        there_s, back_s = wire.batch(0.1, 0.01)
    assert there_s + back_s == pytest.approx(0.11, rel=0.02)
    found = wire.batch(0.01, 0.01)
    assert sum(found) == pytest.approx(0.02, rel=0.1)


def test_nothing_is_said_before_a_message_has_gone_each_way() -> None:
    clock = LinkClock()
    clock.came(sent_s=5.0, back_s=math.inf, arrived_s=5.1, size_bytes=10)
    assert clock.take() == (0, 0.0, 0.0)


def test_what_queues_is_left_out() -> None:
    """Three messages of 0.1 s at once, over a wire that takes one after the other."""
    clock = LinkClock()
    for i in range(3):
        clock.came(sent_s=1.0, back_s=0.1, arrived_s=1.1 + 0.1 * i, size_bytes=100)
    assert clock.take() == (1, 100.0, pytest.approx(0.1))
    clock.came(sent_s=1.25, back_s=0.1, arrived_s=1.4, size_bytes=100)  # the third was still under way
    assert clock.take()[0] == 0


def test_a_few_late_ones_do_not_count() -> None:
    rng, clock, now_s = np.random.default_rng(0), LinkClock(), 0.0
    for i in range(100):
        wire_s = 0.01 + (0.05 if i % 3 == 0 else 0.0) + 1e-4 * rng.random()
        clock.came(sent_s=now_s, back_s=0.01, arrived_s=now_s + wire_s, size_bytes=100)
        now_s += 1.0
    messages, _, seconds = clock.take()
    assert messages == 50 and seconds / messages == pytest.approx(0.01, rel=0.02)
    for i in range(10_000):
        clock.came(sent_s=now_s + i, back_s=0.01, arrived_s=now_s + i + 0.01, size_bytes=100)
    assert clock.take()[0] == 128, "what nobody asks for is not kept for ever"
