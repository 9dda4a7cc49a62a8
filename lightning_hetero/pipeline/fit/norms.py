"""Norms that hooks of the user ask for: of the whole model's gradients, of which each rank has a part (layer L)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_hetero.pipeline.runtime.ownership.stand_ins import StandIn

if TYPE_CHECKING:
    from lightning_hetero.pipeline.fit.place import Place

__all__ = ["WholeNorms"]

PATIENCE_S = 60.0  # how long the other ranks may take until they ask for the same


class WholeNorms:
    """Answers ``clip_grad_norm_``, ``get_total_norm`` and ``grad_norm`` where the model is divided; on all ranks.

    Args:
        place: of this rank.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._asked = 0

    def total(self, gradients: Sequence[Tensor], norm_type: float) -> Tensor | None:
        """Returns the norm of gradients as if they were one vector; None: not all are the module's, or it is whole.

        Args:
            gradients: of this rank's parameters, and stand-ins.
            norm_type: see `torch.linalg.vector_norm`.
        """
        mine = {id(p.grad): p for p in self._place.own if p.grad is not None}
        by_name = {f"{p.held.name}.grad": p for p in self._place.module.parameters() if isinstance(p, StandIn)}
        found = [by_name.get(g.held.name) if isinstance(g, StandIn) else mine.get(id(g)) for g in gradients]
        parameters = [p for p in found if p is not None]
        norms = self.each(parameters, norm_type) if found and len(parameters) == len(found) else None
        if norms is None:
            return None
        known = torch.tensor([norm for norm in norms if norm is not None], dtype=torch.float64)
        return torch.linalg.vector_norm(known, norm_type).to(dtype=gradients[0].dtype, device=gradients[0].device)

    def each(self, parameters: Sequence[Tensor], norm_type: float) -> list[float | None] | None:
        """Returns each gradient's norm, None where there is none; None: the model is whole, or has not all of them.

        Raises:
            RuntimeError: another rank has not asked for the same in time, or has failed.
        """
        place = self._place
        plan, world = place.planned.plan, place.channel.world_size
        module = set(map(id, place.module.parameters()))
        if len(plan.groups) == world or not all(id(p) in module for p in parameters):
            return None
        self._asked += 1
        name, before = f"norms/{self._asked}-", f"norms/{self._asked - 1}-"
        own = json.dumps(place.sync.own_norms(parameters, norm_type))
        notes = place.failures.meet(own, world, PATIENCE_S, place=name, heed=True)
        if late := [rank for rank, note in enumerate(notes) if not note]:
            raise RuntimeError(
                f"a norm of gradients in {place.here.hook()}: rank {place.channel.rank} asks for it, and rank(s) {late}"
                f" did not in {PATIENCE_S:g} s. Each rank in a pipeline has the gradients of its own layers: let all"
                " ranks call clip_grad_norm_, get_total_norm or grad_norm, also if only rank 0 uses the result; or use"
                " strategy='hetero_balanced'"
            )
        if self._asked > 1:
            place.failures.forget(before)
        found = zip(*map(json.loads, notes), strict=True)
        return [next((norm for norm in norms if norm is not None), None) for norms in found]
