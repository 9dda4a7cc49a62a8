"""Asynchronous updates damped by their age."""

from __future__ import annotations

from lightning_hetero.stale.policy import Asynchronous


class DynSgd(Asynchronous):
    """DynSGD (Jiang et al., SIGMOD 2017, as in dist-keras): a contribution tau versions old counts 1/(tau + 1)."""

    name = "dynsgd"

    def scale(self, staleness: int, workers: int) -> float:
        return 1.0 / (1.0 + staleness)


class DelayAdaptive(Asynchronous):
    """Mishchenko et al. 2022: a contribution tau versions old, of N workers, counts N/max(N, tau)."""

    name = "delay_adaptive"

    def scale(self, staleness: int, workers: int) -> float:
        return workers / max(workers, staleness, 1)
