"""What a training step cannot do because only the first rank of each group runs it (layer L)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import is_
from typing import TYPE_CHECKING, Any

from torch import nn

from lightning_hetero.pipeline.fit.hints import NO_GRAPH, add_hint

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_hetero.pipeline.fit.place import Place
    from lightning_hetero.pipeline.fit.plan.planning import PlanResult

__all__ = ["Elsewhere", "within_limits"]


@contextmanager
def within_limits(trainer: Trainer) -> Iterator[None]:
    """Refuses, in the body of a training step, what would happen on this rank only, or cannot happen.

    Raises:
        RuntimeError: the step has changed settings of an optimizer, which others have, too; or it differentiates
            through the backbone.
    """
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    before = [group.copy() for group in groups]
    try:
        yield
    except RuntimeError as error:
        if NO_GRAPH in str(error):
            add_hint(error)
        raise
    for index, (was, now) in enumerate(zip(before, groups, strict=True)):
        if was != now:  # what is the same object is not compared
            name = next(name for name, value in now.items() if name not in was or value != was[name])
            raise RuntimeError(
                f"training_step on rank {trainer.global_rank} has changed {name!r} of parameter group {index} from"
                f" {was.get(name)} to {now[name]}: in a pipeline only the first rank of each group runs it, and the"
                " optimizers of the others keep theirs. Change it in on_train_batch_start or by a scheduler that"
                " Lightning steps, or use strategy='hetero_balanced'"
            )


class Elsewhere:
    """The layers that a leader's group runs on other ranks; notices what a training step changes of them.

    Args:
        place: of this rank.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._planned: PlanResult | None = None
        self._modules: list[tuple[str, dict[str, Any]]] = []
        self._parameters: list[nn.Parameter] = []

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Inside are the training steps of a batch.

        Raises:
            RuntimeError: a step has changed attributes of such a layer, or what of it is trained.
        """
        if self._planned is not self._place.planned:
            self._planned, layers = self._place.planned, self._place.elsewhere()
            self._modules = [
                (f"{name}.{inner}".rstrip("."), vars(m)) for name, layer in layers for inner, m in layer.named_modules()
            ]
            self._parameters = [p for _, layer in layers for p in layer.parameters()]
        before = [held.copy() for _, held in self._modules]
        trained = [p.requires_grad for p in self._parameters]
        yield
        for (name, now), was in zip(self._modules, before, strict=True):
            if len(now) != len(was) or not all(map(is_, now.values(), was.values())):
                changed = next((key for key in {**was, **now} if not _same(was.get(key), now.get(key))), None)
                if changed is not None:
                    self._refuse(f"{name}.{changed}")
        if trained != [p.requires_grad for p in self._parameters]:
            self._refuse("requires_grad of a parameter")

    def _refuse(self, what: str) -> None:
        raise RuntimeError(
            f"training_step on rank {self._place.channel.rank} has changed {what}, of a layer that another rank runs:"
            " in a pipeline only the first rank of each group runs training_step. Change it in on_train_batch_start,"
            " which all ranks run, or use strategy='hetero_balanced'"
        )


def _same(was: Any, now: Any) -> bool:
    try:
        return was is now or bool(was == now)
    except (RuntimeError, ValueError):  # arrays of several numbers
        return False
