"""What is timed on a device that runs ahead: warmed once, and large enough not to be the launch alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lightning_hetero.measure import kinds, timer
from lightning_hetero.measure.device import HostDevice
from lightning_hetero.measure.timer import RestProbe, Timer

CPU = torch.device("cpu")


class Ahead(HostDevice):
    asynchronous = True
    waited = 0

    def synchronize(self) -> None:
        self.waited += 1


def test_a_device_that_runs_ahead_is_warmed_by_time_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead, now, runs = Ahead(CPU), [0.0], []
    monkeypatch.setattr(timer, "device_of", lambda _: ahead)
    monkeypatch.setattr(timer.time, "monotonic", lambda: now[0])

    def run() -> None:
        runs.append(now[0])
        now[0] += 0.1

    clock = Timer(CPU)
    clock.warm_up(run)
    assert len(runs) == ahead.waited == 3
    clock.warm_up(run)
    assert len(runs) == 3


def test_the_host_needs_no_warming_and_its_stamps_are_its_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 3.5])
    monkeypatch.setattr(kinds, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    clock = Timer(CPU)
    clock.warm_up(lambda: pytest.fail("it ran"))
    assert clock.seconds(clock.mark(), clock.mark()) == 2.5


@pytest.mark.parametrize(("flat", "size"), [(1024, 1024), (10**9, 4096), (1, 256)])
def test_the_product_of_a_rank_at_rest_grows_until_it_takes_long(flat: int, size: int) -> None:
    """Its time is that of its launch, up to matrices of a size."""

    class Launches(RestProbe):
        def _begin(self, size: int) -> None:
            self._matrix = torch.empty(size, 0)

        def seconds(self) -> float:
            return 1e-5 if len(self._matrix) < flat else 1e-3

        def _multiply(self) -> None: ...

    assert len(Launches(CPU)._matrix) == size


def test_a_rank_at_rest_tells_a_time() -> None:
    assert RestProbe(CPU).seconds() > 0.0
