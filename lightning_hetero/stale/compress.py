"""Where codecs of pushed gradients were; ``compression="bf16"`` and ``"fp16"`` need no import."""

from __future__ import annotations

from typing import NoReturn


def __getattr__(name: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(name)
    raise ImportError(
        f"lightning_hetero.stale.compress has no {name} any more: no benchmark showed that sending the largest entries"
        " pays. BoundedStalenessStrategy(compression=...) takes None, 'bf16' or 'fp16'"
    )
