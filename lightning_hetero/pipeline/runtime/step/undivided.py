"""A module whose layers are not known: the whole of it is the one layer, and groups are single devices (layer T)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import nn

from lightning_hetero.pipeline.runtime.step.backbone import Backbone, find_backbone

_NAMED = 3  # lists of layers that a message names at most


@dataclass(frozen=True, kw_only=True, slots=True)
class Undivided(Backbone):
    """The whole module as the only layer.

    Attributes:
        reason: why it cannot be divided, and what to name.
    """

    reason: str


def find_layers(module: nn.Module, backbone: str | Sequence[str] | None, *, needed: bool = False) -> Backbone:
    """Returns the layers as `find_backbone` does; or the whole module, if no layers are found.

    Args:
        module: the LightningModule.
        backbone: see `find_backbone`.
        needed: whether the user has said how the layers are to be divided.

    Raises:
        TypeError, ValueError: as `find_backbone`, where layers are needed, where ``backbone`` names what is not there,
            and where ``pipeline_layers()`` returns no layers.
    """
    try:
        return find_backbone(module, backbone)
    except (TypeError, ValueError) as error:
        named = [backbone] if isinstance(backbone, str) else backbone
        if needed or not _are_modules(module, named):
            raise
        return undivided(module, str(error))


def undivided(module: nn.Module, reason: str) -> Undivided:
    """Returns the whole module as the one layer; to the reason is added what could be named instead."""
    if found := layer_lists(module):
        reason += f". Lists of layers in {type(module).__name__}: {'; '.join(found)}"
    return Undivided(names=(type(module).__name__,), layers=(module,), cut_modules=(), starts=(), reason=reason)


def _are_modules(module: nn.Module, paths: Sequence[str] | None) -> bool:
    """Whether all paths lead to modules, none of which says what its layers are."""
    places: list[Any] = [module]
    for path in paths or ():
        try:
            places.append(attrgetter(path)(module))
        except (AttributeError, TypeError):
            return False
    return all(isinstance(p, nn.Module) and not hasattr(p, "pipeline_layers") for p in places)


def layer_lists(module: nn.Module) -> list[str]:
    """Returns, in words, the lists of modules that hold most of the parameters: what `backbone=` may name.

    >>> model = nn.Module()
    >>> model.embed, model.blocks = nn.Linear(2, 2), nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    >>> layer_lists(model)
    ["backbone='blocks' (2 modules, 80 % of the parameters)"]
    """
    total = sum(p.numel() for p in module.parameters()) or 1
    found: list[tuple[int, str, int]] = []
    inside: set[int] = set()
    for path, part in module.named_modules():
        if path and id(part) not in inside and isinstance(part, nn.ModuleList | nn.Sequential) and len(part) > 1:
            found.append((sum(p.numel() for p in part.parameters()), path, len(part)))
            inside |= {id(inner) for inner in part.modules()}
    return [
        f"backbone={path!r} ({count} modules, {100 * size // total} % of the parameters)"
        for size, path, count in sorted(found, key=lambda entry: -entry[0])[:_NAMED]
        if size
    ]
