"""One rank, and a world of one over NCCL: every engine is stock DDP there, in every precision."""

from __future__ import annotations

import torch

from tests.gpu.check.found import detail, found
from tests.gpu.kit import PRECISIONS, Model, Trained, fit_engine, moved, oracle, weights
from tests.gpu.ranks import run_card_ranks

NAMES = ("ddp", "balanced", "stale", "federated", "pipeline 1x1", "auto")


def _fit(rank: int, world: int, name: str, precision: str, compiled: bool) -> Trained:
    torch.manual_seed(0)
    module = Model()
    if compiled:
        module.model.compile()
    return fit_engine(rank, world, name, precision, module=module, backend="nccl")


def _all(names: tuple[str, ...], precisions: tuple[str, ...], compiled: bool = False) -> None:
    expected, start = oracle(), weights(Model())
    apart: dict[str, float] = {}
    bad = []
    for precision in precisions:
        for name in names:
            (trained,) = run_card_ranks(1, _fit, name, precision, compiled)
            apart[f"{name}, {precision}"] = far = moved(trained.weights, expected, start)
            if far > PRECISIONS[precision] * (10 if compiled else 1):
                bad.append(f"{name}, {precision}: {far:.1e}")
    detail(apart=apart)
    for precision in precisions:
        found(**{precision: f"{max(far for key, far in apart.items() if key.endswith(f', {precision}')):.1e}"})
    if bad:
        raise SystemExit("; ".join(bad))


def engines() -> None:
    """Passes if the weights after ten steps are the CPU's."""
    _all(NAMES, ("32-true", "bf16-mixed", "16-mixed"))


def compiled() -> None:
    """The same with a compiled module."""
    _all(("ddp", "balanced", "stale"), ("32-true",), compiled=True)
