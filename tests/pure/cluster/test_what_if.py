"""What other ways to train would give, against values computed by hand."""

from __future__ import annotations

import pytest

from lightning_hetero.cluster.what_if import exchange_alone, what_if
from lightning_hetero.types import SpeedSample


def records(*rows: tuple[int, float, float]) -> list[SpeedSample]:
    """From samples, own work and waiting of each rank."""
    return [SpeedSample(rank=r, step=0, samples=n, compute_s=c, wait_s=w) for r, (n, c, w) in enumerate(rows)]


def test_the_exchange_is_what_the_last_rank_sees_of_it() -> None:
    turns = [0.1, 0.7, 0.1, 0.9, 0.1, 0.8]  # last in every second step of two ranks
    assert exchange_alone(turns, ranks=2) == 0.1
    assert exchange_alone([0.3, 0.1, 0.2, 0.4], ranks=1) == 0.3  # always last: the median
    assert exchange_alone([0.3], ranks=8) == 0.3 and exchange_alone([], ranks=8) == 0.0


def test_two_speeds() -> None:
    """Ranks of 10, 10, 10 and 5 samples/s with 10 samples each: a step is the last one's 2 s, and 0.1 s of exchange."""
    told = what_if(records((10, 1.0, 1.1), (10, 1.0, 1.1), (10, 1.0, 1.1), (10, 2.0, 0.1)), 0.1)
    assert told is not None and (told.ranks, told.slowest) == (4, 3)
    assert told.step_s == pytest.approx(2.1)
    assert told.waited_s == pytest.approx(3 * 1.0)  # three ranks waited a second each; the exchange is no waiting
    # 40 samples at 35 per second are 1.143 s: 11.4, 11.4, 11.4 and 5.7 samples. In whole ones 12, 11, 11 and 6.
    assert told.balanced_s == pytest.approx(1.2 + 0.1)
    assert told.stale_s == pytest.approx(40 / 35 + 0.1)
    assert told.without_s == pytest.approx(4 / 3 + 0.1)  # three ranks, 13.3 samples each


def test_steps_that_differ_stay_for_who_has_a_barrier() -> None:
    """Equal ranks that take turns to be late by 0.5 s: a step is 1.5 s, each rank works 1.25 s and waits 0.25 s."""
    told = what_if(records((8, 1.25, 0.25), (8, 1.25, 0.25)), 0.0)
    assert told is not None
    assert told.step_s == pytest.approx(1.5) and told.waited_s == pytest.approx(2 * 0.25)
    assert told.balanced_s == pytest.approx(1.5)  # nothing to shift
    assert told.stale_s == pytest.approx(1.25)  # 16 samples at 12.8 per second
    assert told.without_s == pytest.approx(0.25 + 2 * 1.25)


def test_waiting_that_no_host_sees_is_the_difference_in_work() -> None:
    """On a GPU the exchange is waited for on a stream: the host's clock shows nothing of it."""
    told = what_if(records((4, 1.0, 0.0), (4, 3.0, 0.0)), 0.0)
    assert told is not None
    assert (told.step_s, told.waited_s) == (3.0, 2.0)
    assert told.balanced_s == 1.5  # 6 and 2 samples


def test_the_engines_bounds_hold() -> None:
    """A quarter of the equal share, here 2 of 8, stays with a rank that is a hundred times slower."""
    told = what_if(records((8, 1.0, 99.0), (8, 100.0, 0.0)), 0.0)
    assert told is not None
    assert told.balanced_s == pytest.approx(2 * 100.0 / 8)
    assert told.stale_s == pytest.approx(16 / (8 + 0.08))


def test_shares_that_are_not_equal() -> None:
    """Speeds are samples per second: 12 in 1 s and 4 in 1 s are already as good as it gets."""
    told = what_if(records((12, 1.0, 0.0), (4, 1.0, 0.0)), 0.0)
    assert told is not None
    assert told.balanced_s == told.stale_s == told.step_s == 1.0 and told.slowest == 0


@pytest.mark.parametrize(
    "rows", [(), ((4, 1.0, 0.0),), ((4, 1.0, 0.0), (0, 1.0, 0.0)), ((4, 1.0, 0.0), (4, 0.0, 0.0))]
)
def test_nothing_is_said_of_what_was_not_measured(rows: tuple[tuple[int, float, float], ...]) -> None:
    assert what_if(records(*rows), 0.0) is None


def test_the_lines_people_read() -> None:
    told = what_if(records((10, 1.0, 1.1), (10, 1.0, 1.1), (10, 1.0, 1.1), (10, 2.0, 0.1)), 0.1)
    assert told is not None
    assert told.text(steps=10) == (
        "StragglerMonitor: a step took 2100.0 ms; for slower ranks the 4 ranks waited 30.0 of 84.0 device-seconds"
        " (36 %).\n"
        "If work grows with samples, a step would take about 1300.0 ms (38 % less) with strategy='hetero_balanced',"
        " 1242.9 ms (41 % less) at best with 'hetero_stale', and 1433.3 ms (32 % less) with DDP without rank 3, the"
        " slowest."
    )
    worse = what_if(records((8, 1.25, 0.25), (8, 1.25, 0.25)), 0.0)
    assert worse is not None and "2750.0 ms (83 % more) with DDP without rank 0" in worse.text(steps=1)
