"""What others leave free: arithmetic on given counters, and the host's own."""

from __future__ import annotations

import math
import os
import time
from types import SimpleNamespace

import pytest

from lightning_hetero.measure import host_load
from lightning_hetero.measure.host_load import HostLoad, Reading, read_host

START = Reading(at_s=0.0, cpus=frozenset({0, 1}), idle_s=100.0, total_s=500.0, own_s=7.0, free_mem=0.5)


class Host:
    """Counters that move as told."""

    def __init__(self) -> None:
        self.now, self.reads = START, 0

    def read(self) -> Reading:
        self.reads += 1
        return self.now

    def pass_s(
        self, seconds: float, *, idle_s: float = 0.0, own_s: float = 0.0, counted_s: float | None = None
    ) -> None:
        counted_s = 2 * seconds if counted_s is None else counted_s
        self.now = self.now._replace(
            at_s=self.now.at_s + seconds,
            idle_s=self.now.idle_s + idle_s,
            own_s=self.now.own_s + own_s,
            total_s=self.now.total_s + counted_s,
        )


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    host = Host()
    monkeypatch.setattr(host_load, "time", SimpleNamespace(perf_counter=lambda: host.now.at_s))
    return host


@pytest.mark.parametrize(
    ("idle_s", "own_s", "free"),
    [
        (2.0, 0.0, 1.0),  # nobody computes
        (0.0, 2.0, 1.0),  # all of it is this process
        (1.0, 1.0, 1.0),
        (0.5, 0.5, 0.5),
        (0.0, 0.5, 0.25),
        (0.0, 0.0, 0.0),
        (2.0, 0.3, 1.0),  # counters in steps of 10 ms may say a little more than all
    ],
)
def test_free_is_what_is_idle_or_used_by_this_process(host: Host, idle_s: float, own_s: float, free: float) -> None:
    load = HostLoad(host.read)
    host.pass_s(1.0, idle_s=idle_s, own_s=own_s)
    assert load.free() == (free, 0.5)


def test_each_answer_is_of_the_time_since_the_one_before_unless_asked_again_at_once(host: Host) -> None:
    load = HostLoad(host.read)
    first = load.free()
    assert math.isnan(first[0]) and first[1] == 0.5 and host.reads == 1
    host.pass_s(1.0, idle_s=1.0)
    assert load.free() == (0.5, 0.5)
    host.pass_s(0.049)
    assert load.free() == (0.5, 0.5) and host.reads == 2
    host.pass_s(0.002)
    host.now = host.now._replace(free_mem=0.125)
    assert load.free() == (0.0, 0.125) and host.reads == 3


def test_other_processors_than_before_or_none_counted_are_not_known(host: Host) -> None:
    load = HostLoad(host.read)
    host.pass_s(1.0, idle_s=1.0)
    host.now = host.now._replace(cpus=frozenset({1}))
    assert math.isnan(load.free()[0])
    host.pass_s(1.0, idle_s=1.0)
    assert load.free()[0] == 0.5
    host.pass_s(1.0, counted_s=0.0)
    assert math.isnan(load.free()[0])


def test_the_hosts_counters_move_on_and_are_of_the_processors_that_may_be_used() -> None:
    before = read_host()
    while time.process_time() - before.own_s < 0.03:
        math.sqrt(2.0)
    after = read_host()
    assert after.cpus == frozenset(os.sched_getaffinity(0)) and 0.0 < after.free_mem < 1.0
    assert after.own_s >= before.own_s + 0.03 and after.at_s > before.at_s
    most_s = len(after.cpus) * (after.at_s - before.at_s + 0.1)
    assert 0.0 <= after.idle_s - before.idle_s <= most_s and 0.0 <= after.total_s - before.total_s <= most_s
