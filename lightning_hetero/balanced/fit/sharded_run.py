"""One fit of a sharded model (layer L)."""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

from torch import nn

from lightning_hetero.balanced.fit.recovery import Recovery
from lightning_hetero.balanced.fit.run import BalancedRun
from lightning_hetero.balanced.fit.sharded_recovery import ShardedRecovery
from lightning_hetero.balanced.runtime.fsdp_passes import FSDPPasses

_AGREED = 50  # with so many divisions ranks have done the same: parts that differ in every step do not ask for ever


class ShardedRun(BalancedRun):
    """As `BalancedRun`, where each layer's parameters are gathered and its gradients scattered among the ranks."""

    engine = "sharded"

    def attach(self, model: nn.Module | None) -> None:
        self._passes = FSDPPasses(self.module)
        self._agreed = set[tuple[int, ...]]()  # shares with which all ranks have done the same
        self.undo.callback(self._passes.close)
        super().attach(model)

    def make_recovery(self, *args: Any, **kwargs: Any) -> Recovery:
        made = {"passes": self._passes, "channel": self.channel, "paused": self.probe.paused}
        return ShardedRecovery(*args, **kwargs, **made)

    def step_begins(self) -> None:
        """A training step begins: for the first time with these shares the ranks agree on each collective."""
        self.probe.start()  # the module itself may not be called, but what it shards
        if self.part is not None and self.part.shares not in self._agreed and len(self._agreed) < _AGREED:
            self._agreed.add(self.part.shares)
            self._passes.agree_with(self._agree)

    def _agree(self, number: int, size: int = 0) -> None:
        with self.probe.paused():
            rows = self.channel.all_gather_row([float(number), float(size)])()
        if any(row != rows[0] for row in rows):
            self._passes.agree_with(None)
            shares = "/".join(map(str, self.part.shares if self.part is not None else ()))
            raise RuntimeError(
                f"with parts of {shares} samples the ranks do not call the sharded modules equally often or in the same"
                " order in training_step, so each would wait for the others. Cut a batch into a fixed number of pieces,"
                " as x.chunk(4) does and x.split(4) does not; and let no rank decide from its own samples what is"
                " called"
            )

    def backward(self, *args: Any, **kwargs: Any) -> None:
        super().backward(*args, **kwargs)
        if self.automatic:
            self._passes.agree_with(None)

    def step_over(self) -> None:
        self._passes.agree(-2)
        if not self.automatic:
            self._passes.agree_with(None)
        super().step_over()

    def void(self) -> list[Callable[[], object]]:
        self._passes.void = math.inf
        return [partial(setattr, self._passes, "void", 0.0)]

    @cached_property
    def _met(self) -> bool:
        """Whether the ranks that have an exception save; not from within a step, where parameters are gathered."""
        error = sys.exc_info()[1]
        frames = {frame.f_code.co_name for frame, _ in traceback.walk_tb(error and error.__traceback__)}
        inside = not frames.isdisjoint(("training_step", "validation_step", "backward", "optimizer_step"))
        return self.meet_interrupted(10.0, f", in a step of rank {self.channel.rank}" if inside else "")

    def saves(self) -> bool:
        """Whether all ranks come to save; a collective after an exception."""
        return not self.interrupted or self._met

    def exchanges_gradients(self) -> bool:
        return True
