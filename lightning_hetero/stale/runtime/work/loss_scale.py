"""One loss scale for all ranks, as under DDP, where an overflow anywhere skips the step everywhere (layer T)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class AgreedScale:
    """Keeps a rank's `torch.amp.GradScaler` a function of the updates made, whichever rank computed them.

    A scaler left to itself reacts to the gradients of its own rank. Here every rank applies the same rule (that of
    ``GradScaler.update``) once per update, from what the server tells: did any contribution overflow?

    Args:
        scaler: the precision plugin's; None without mixed fp16, then nothing is ever done.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None) -> None:
        self._scaler = scaler
        self._agreed: dict[str, Any] = {} if scaler is None else scaler.state_dict()

    def after_step(self, *, overflow: bool) -> None:
        """Advances the scale by one update."""
        state = self._agreed
        if not state:
            return
        if overflow:
            state["scale"] *= state["backoff_factor"]
            state["_growth_tracker"] = 0
        else:
            state["_growth_tracker"] += 1
            if state["_growth_tracker"] == state["growth_interval"]:
                state["scale"] *= state["growth_factor"]
                state["_growth_tracker"] = 0
        self.restore()

    def restore(self) -> None:
        """Puts the agreed scale back after the scaler has followed its own rank's gradients."""
        if self._agreed:
            assert self._scaler is not None
            self._scaler.load_state_dict(self._agreed)

    def unscale(self, gradients: Sequence[Tensor | None]) -> bool:
        """Divides gradients of a backward that no optimizer step follows; returns whether all are finite."""
        if not self._agreed:
            return True
        present = [g for g in gradients if g is not None]
        if not present:
            return True
        torch._foreach_mul_(present, 1.0 / self._agreed["scale"])
        return bool(torch.stack([g.sum() for g in present]).isfinite().all())
