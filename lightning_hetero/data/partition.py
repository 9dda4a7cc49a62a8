"""One dataset divided among clients that differ, the same each time: for trials of federated learning (layer T).

    data = partition_by_labels(labels, clients=8, alpha=0.3, seed=0)
    mine = torch.utils.data.Subset(dataset, data[trainer.global_rank])

Each sample belongs to exactly one client. Sorted indices, so that a partition does not depend on an order of drawing.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from lightning_hetero.checked import real, whole

_TRIALS = 1000


def partition_by_labels(
    labels: Sequence[Hashable], clients: int, *, alpha: float = 0.3, least: int = 1, seed: int = 0
) -> list[list[int]]:
    """Returns each client's indices: of every label, parts that are drawn from a Dirichlet distribution.

    After Hsu, Qi and Brown (2019). Small ``alpha`` gives clients few labels each and different numbers of samples;
    large ones make all clients similar. Drawn again until every client has ``least`` samples.

    Args:
        labels: of each sample: a sequence of numbers or words, or a tensor of shape ``(N,)``.
        clients: number of clients, >= 1.
        alpha: concentration of the distribution, > 0.
        least: samples of a client, >= 0.
        seed: of the drawing.

    Raises:
        ValueError: an argument is out of range, or no drawing gave every client ``least`` samples.
    """
    values = _plain(labels)
    _check(len(values), clients, least)
    alpha = real("alpha", alpha, above=True)
    generator = np.random.default_rng(seed)
    kinds = sorted(set(values), key=repr)
    of_kind = [np.array([i for i, value in enumerate(values) if value == kind]) for kind in kinds]
    for _ in range(_TRIALS):
        parts: list[list[int]] = [[] for _ in range(clients)]
        for indices in of_kind:
            shuffled = generator.permutation(indices)
            borders = (np.cumsum(generator.dirichlet([alpha] * clients))[:-1] * len(shuffled)).round().astype(int)
            for part, cut in zip(parts, np.split(shuffled, borders), strict=True):
                part.extend(int(i) for i in cut)
        if min(map(len, parts)) >= least:
            return [sorted(part) for part in parts]
    raise ValueError(
        f"alpha={alpha!r}: in {_TRIALS} drawings some client always had fewer than least={least} of {len(values)}"
        f" samples among {clients} clients; raise alpha, or lower least or the number of clients"
    )


def partition_by_group(groups: Sequence[Hashable], clients: int, *, seed: int = 0) -> list[list[int]]:
    """Returns each client's indices: every group, e.g. a writer, a hospital or a device, goes to one client as a whole.

    Groups are shuffled and dealt out, the next to the client with the fewest samples so far.

    Args:
        groups: of each sample: a sequence of numbers or words, or a tensor of shape ``(N,)``.
        clients: number of clients, >= 1.
        seed: of the shuffling.

    Raises:
        ValueError: there are fewer groups than clients.
    """
    values = _plain(groups)
    _check(len(values), clients, 0)
    members: dict[Hashable, list[int]] = {}
    for index, value in enumerate(values):
        members.setdefault(value, []).append(index)
    if len(members) < clients:
        raise ValueError(f"clients={clients} must be at most the number of groups, which is {len(members)}")
    names = sorted(members, key=repr)
    order = np.random.default_rng(seed).permutation(len(names))
    parts: list[list[int]] = [[] for _ in range(clients)]
    for number in order:
        min(parts, key=len).extend(members[names[number]])
    return [sorted(part) for part in parts]


def _plain(values: Any) -> list[Hashable]:
    return list(values.tolist()) if hasattr(values, "tolist") else list(values)


def _check(samples: int, clients: int, least: int) -> None:
    whole("clients", clients, least=1)
    if whole("least", least) * clients > samples:
        raise ValueError(f"least={least} for each of {clients} clients is more than the {samples} samples there are")
