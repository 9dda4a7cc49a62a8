"""Gradients between Lightning's hooks: put aside until wanted, clipped and measured as the whole model's (layer L).

They are computed within Lightning's ``training_step`` hook, and wanted in its ``backward`` hook.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from lightning_hetero import lightning_compat as compat
from lightning_hetero.lightning_compat.patches import patched
from lightning_hetero.pipeline.fit.place import RankInPlan
from lightning_hetero.pipeline.runtime.ownership.stand_ins import StandIn

PATIENCE_S = 60.0  # how long the other ranks may take until they ask for the same norm


class GradientsAside:
    """The gradients of this rank's parameters, from the pipelines' step to the optimizer's.

    Args:
        place: of this rank.

    Attributes:
        may_be_kept: the user's own ``optimizer_zero_grad`` might do something else than to clear them.
    """

    def __init__(self, place: RankInPlan) -> None:
        self._place, self._precision = place, place.run.trainer.precision_plugin
        self.may_be_kept = is_overridden("optimizer_zero_grad", place.run.module)
        self._before: dict[nn.Parameter, Tensor] = {}
        self._pending: dict[nn.Parameter, Tensor] = {}
        self._skips = False  # whether some rank's gradients overflowed, for a gradient scaler

    @property
    def scale(self) -> Callable[[Tensor], Tensor] | None:
        """Scales a loss, under mixed precision."""
        scaler = getattr(self._precision, "scaler", None)
        return None if scaler is None else scaler.scale

    def begin(self) -> None:
        """Clears the gradients that the loop is going to zero anyway, before new ones need their memory.

        It zeroes them between the hooks, on the first batch of a window. If a user's own ``optimizer_zero_grad``
        might do something else, they are kept aside meanwhile.
        """
        self._before = {}
        if compat.zeroes_now(self._place.run.trainer):
            self._place.here.gradients = False
            for p in self._place.held.own:
                if p.grad is not None and self.may_be_kept:
                    self._before[p] = p.grad
                p.grad = None

    def sum(self) -> None:
        """Ends the sums over the groups; all ranks agree whether a gradient scaler skips the step."""
        self._place.emulation.sums(self._place.held.sync)()
        if self.scale is not None:
            self._skips = self._place.held.sync.agree_nonfinite()

    def put_aside(self) -> None:
        """Takes away what the batch has left, until `put_back`."""
        self._pending = {p: p.grad for p in self._place.held.own if p.grad is not None}
        for p in self._place.held.own:
            p.grad = self._before.get(p)
        self._before = {}

    def put_back(self) -> None:
        """Puts the last batch's gradients where the optimizer looks for them."""
        pending, self._pending = self._pending, {}
        for p, grad in pending.items():
            p.grad = grad if p.grad is None else p.grad.add_(grad)
        self._place.here.gradients = True

    @contextmanager
    def clipping(self) -> Iterator[None]:
        """Inside, clipping takes what this rank holds, and by norm means by that of the whole model's gradients."""
        stock = self._precision.main_params

        def own(optimizer: Any) -> list[Any]:
            known = set(map(id, self._place.held.own))
            return [p for p in stock(optimizer) if id(p) in known]

        def clip(optimizer: Any, clip_val: float) -> None:
            self._place.held.sync.clip_by_norm(own(optimizer), clip_val)

        with patched(self._precision, "main_params", own), patched(self._precision, "clip_grad_by_norm", clip):
            yield

    @contextmanager
    def scaling(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
        """Inside, a gradient scaler finds a gradient on every rank, or it would fail without gradients.

        A rank that holds no parameters of the optimizer gets a stand-in, whose gradient is NaN where the ranks have
        agreed to skip the step.

        Yields:
            The closure to step with.
        """
        if self.scale is None:
            yield closure
            return
        params = optimizer.param_groups[0]["params"]
        stand_in = nn.Parameter(torch.zeros(1, device=self._place.run.settings.device))

        def close() -> Any:
            result = closure()
            if all(p.grad is None for group in optimizer.param_groups for p in group["params"]):
                stand_in.grad = torch.full_like(stand_in, math.nan if self._skips else 0.0)
                params.append(stand_in)
            return result

        try:
            yield close
        finally:
            params[:] = [p for p in params if p is not stand_in]
            optimizer.state.pop(stand_in, None)


class WholeNorms:
    """Answers ``clip_grad_norm_``, ``get_total_norm`` and ``grad_norm`` where the model is divided; on all ranks.

    Args:
        place: of this rank.
    """

    def __init__(self, place: RankInPlan) -> None:
        self._place = place
        self._asked = 0

    def total(self, gradients: Sequence[Tensor], norm_type: float) -> Tensor | None:
        """Returns the norm of gradients as if they were one vector; None: not all are the module's, or it is whole.

        Args:
            gradients: of this rank's parameters, and stand-ins.
            norm_type: see `torch.linalg.vector_norm`.
        """
        mine = {id(p.grad): p for p in self._place.held.own if p.grad is not None}
        by_name = {f"{p.held.name}.grad": p for p in self._place.run.module.parameters() if isinstance(p, StandIn)}
        found = [by_name.get(g.held.name) if isinstance(g, StandIn) else mine.get(id(g)) for g in gradients]
        parameters = [p for p in found if p is not None]
        norms = self.each(parameters, norm_type) if found and len(parameters) == len(found) else None
        if norms is None:
            return None
        known = torch.tensor([norm for norm in norms if norm is not None], dtype=torch.float64)
        return torch.linalg.vector_norm(known, norm_type).to(dtype=gradients[0].dtype, device=gradients[0].device)

    def each(self, parameters: Sequence[Tensor], norm_type: float) -> list[float | None] | None:
        """Returns each gradient's norm, None without a gradient; None: the model is whole, or has not all of them.

        Raises:
            RuntimeError: another rank has not asked for the same in time, or has failed.
        """
        place = self._place
        plan, world = place.planned.plan, place.run.channel.world_size
        module = set(map(id, place.run.module.parameters()))
        if len(plan.groups) == world or not all(id(p) in module for p in parameters):
            return None
        self._asked += 1
        name, before = f"norms/{self._asked}-", f"norms/{self._asked - 1}-"
        own = json.dumps(place.held.sync.own_norms(parameters, norm_type))
        notes = place.run.failures.meet(own, world, PATIENCE_S, place=name, heed=True)
        if late := [rank for rank, note in enumerate(notes) if not note]:
            raise RuntimeError(
                f"a norm of gradients in {place.here.hook()}: rank {place.run.channel.rank} asks for it, and rank(s)"
                f" {late} did not in {PATIENCE_S:g} s. Each rank in a pipeline has the gradients of its own layers: let"
                " all ranks call clip_grad_norm_, get_total_norm or grad_norm, also if only rank 0 uses the result; or"
                " use strategy='hetero_balanced'"
            )
        if self._asked > 1:
            place.run.failures.forget(before)
        found = zip(*map(json.loads, notes), strict=True)
        return [next((norm for norm in norms if norm is not None), None) for norms in found]
