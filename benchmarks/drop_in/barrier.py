"""The stale engine with a barrier: what then still differs from stock DDP is not for contributions that come late."""

from __future__ import annotations

from typing import Any

from lightning_hetero import BoundedStalenessStrategy


class StaleWithBarrier(BoundedStalenessStrategy):
    """``policy="bsp"`` unless another is given."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"policy": "bsp", **kwargs})
