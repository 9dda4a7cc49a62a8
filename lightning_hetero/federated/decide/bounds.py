"""Least and most samples of a rank's local step: what the user allows, and what data it has (layer P)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_hetero.federated.decide.rounds import Client
from lightning_hetero.shares.bounds import ShareBounds

__all__ = ["check_bounds", "client_bounds"]

Bound = int | Sequence[int] | None


def check_bounds(lower: Bound, upper: Bound) -> None:
    """Checks the arguments ``min_samples`` and ``max_samples``.

    Raises:
        ValueError: one is no number of samples.
    """
    ShareBounds(lower=lower, upper=upper)


def client_bounds(
    clients: Sequence[Client], *, lower: Bound = None, upper: Bound = None, total: int | None = None, least: int = 1
) -> tuple[ShareBounds, int]:
    """Returns bounds of the ranks' batches, and what these sum up to.

    No batch is larger than the data of its rank, and none is empty. By default a rank has a quarter of the equal share
    at least, and four times as much at most, but may keep the batch size that its loader has.

    Args:
        clients: what the ranks train on; each has samples.
        lower, upper: samples per rank as the user gives them: a number, or one per rank.
        total: samples of all ranks per local step; None: what the loaders' batch sizes sum up to.
        least: of any batch; 2 where BatchNorm cannot do with one.

    Raises:
        ValueError: the bounds have the wrong length, or admit no split of ``total``.

    >>> bounds, total = client_bounds([Client(100, 16, 7), Client(5, 5, 1)])
    >>> bounds.lower, bounds.upper, total
    ([2, 2], [44, 5], 21)
    """
    world_size = len(clients)
    wanted = sum(client.batch_size for client in clients) if total is None else total
    equal = wanted / world_size
    low = _listed("min_samples", lower, world_size) or [max(1, math.floor(equal / 4))] * world_size
    up = _listed("max_samples", upper, world_size)
    if up is None:
        up = [max(4 * math.ceil(equal), client.batch_size) for client in clients]
    up = [max(1, min(most, client.samples)) for most, client in zip(up, clients, strict=True)]
    low = [min(max(a, least), b) if lower is None else min(max(a, 1), c.samples) for a, b, c in
           zip(low, up, clients, strict=True)]  # fmt: skip
    bounds = ShareBounds(lower=low, upper=up)
    bounds.resolve(world_size, wanted)
    return bounds, wanted


def _listed(name: str, given: Bound, world_size: int) -> list[int] | None:
    if given is None:
        return None
    listed = [given] * world_size if isinstance(given, int) else list(given)
    if len(listed) != world_size:
        raise ValueError(f"{name} lists {len(listed)} ranks, but there are {world_size}: give one number per rank")
    return listed
