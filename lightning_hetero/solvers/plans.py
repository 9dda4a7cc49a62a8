"""Plans that need no search, and plans as plain values (layer P)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_hetero.checked import finite_or_none, is_list, mapping
from lightning_hetero.solvers.placement import micro_batches_of
from lightning_hetero.types import GroupPlan, PipelinePlan

_GROUP = ("ranks", "cuts", "samples", "micro_batches", "depths", "total_s")
_PLAN = ("groups", "total_s", "sync_s", "lower_bound_s")


def replicas(layers: int, samples: Sequence[int]) -> PipelinePlan:
    """Returns plain data parallelism: every rank is a group, with all layers; ranks without samples are idle.

    >>> [group.ranks for group in replicas(3, [4, 0, 2]).groups]
    [(0,), (2,)]
    """
    groups = tuple(
        GroupPlan(ranks=(rank,), cuts=(0, layers), samples=n, micro_batches=(n,), depths=(1,))
        for rank, n in enumerate(samples)
        if n
    )
    return PipelinePlan(groups=groups, total_s=math.nan)


def evened(sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns micro-batches of which the last has more than one sample, if the one before can spare some.

    BatchNorm refuses to train on a single sample, and its statistics of few are poor.

    >>> evened([4, 4, 1]), evened([4, 4]), evened([2, 1])
    ((4, 3, 2), (4, 4), (2, 1))
    """
    if len(sizes) < 2 or sizes[-1] != 1 or sizes[-2] < 3:
        return tuple(sizes)
    pair = sizes[-2] + 1
    return (*sizes[:-2], pair - pair // 2, pair // 2)


def plan_to_plain(plan: PipelinePlan) -> dict[str, Any]:
    """Returns JSON values which `plan_from_plain` reads back; times that are not finite become None."""

    def plain(value: tuple[int, ...] | float) -> list[int] | float | None:
        return list(value) if isinstance(value, tuple) else finite_or_none(value)

    groups = [{name: plain(getattr(group, name)) for name in _GROUP} for group in plan.groups]
    return {"groups": groups, **{name: finite_or_none(getattr(plan, name)) for name in _PLAN[1:]}}


def plan_from_plain(plain: Mapping[str, Any] | PipelinePlan) -> PipelinePlan:
    """Reads a plan written by hand, by `plan_to_plain`, or handed over by Hydra; a plan is returned unchanged.

    Args:
        plain: ``groups``: a list of mappings with

            - ``ranks``: leader first, and ``cuts``, see `GroupPlan`;
            - ``micro_batches``: their sizes; or ``samples``, the group's part of the global batch, and
              ``micro_samples``, the size that it is cut into (the last one may be smaller);
            - ``depths``: most micro-batches in flight by stage; left out: as many as there are.

            Times are optional.

    Raises:
        TypeError: a mapping or a list is expected and something else was given.
        ValueError: an unknown or missing key, or numbers that make no plan.

    >>> plan = plan_from_plain({"groups": [{"ranks": [1, 0], "cuts": [0, 2, 6], "samples": 10, "micro_samples": 4}]})
    >>> plan.groups[0].micro_batches, plan.groups[0].depths
    ((4, 4, 2), (3, 3))
    """
    if isinstance(plain, PipelinePlan):
        return plain
    given = mapping("plan", plain, _PLAN, needed=("groups",))
    groups: Any = given["groups"]
    if not is_list(groups) or not groups:
        raise ValueError(f"plan.groups={groups!r} must be a list of one or more groups")
    times = {name: float(given[name]) for name in _PLAN[1:] if given.get(name) is not None}
    return PipelinePlan(
        groups=tuple(_group(f"plan.groups[{i}]", group) for i, group in enumerate(groups)),
        total_s=times.get("total_s", math.nan), sync_s=times.get("sync_s", 0.0),
        lower_bound_s=times.get("lower_bound_s", 0.0),
    )  # fmt: skip


def _group(at: str, plain: Any) -> GroupPlan:
    given = mapping(at, plain, (*_GROUP, "micro_samples"), needed=("ranks", "cuts"))
    ranks, cuts = (tuple(int(n) for n in given[name]) for name in ("ranks", "cuts"))
    if given.get("micro_batches"):
        sizes = tuple(int(n) for n in given["micro_batches"])
    elif given.get("samples") is not None:
        samples = int(given["samples"])
        size = int(given.get("micro_samples") or samples)
        if samples < 1 or size < 1:
            raise ValueError(f"{at}: samples={samples} and micro_samples={size} must be >= 1")
        sizes = micro_batches_of(samples, size)
    else:
        raise ValueError(f"{at} lacks micro_batches, or samples and micro_samples")
    depths = given.get("depths") or (len(sizes) if len(ranks) > 1 else 1,) * len(ranks)
    total_s = given.get("total_s")
    return GroupPlan(
        ranks=ranks, cuts=cuts, samples=sum(sizes), micro_batches=sizes, depths=tuple(int(n) for n in depths),
        total_s=math.nan if total_s is None else float(total_s),
    )  # fmt: skip
