"""How many processes a scheduler puts on each node, from its notation (layer P)."""

from __future__ import annotations

import re

__all__ = ["tasks_per_node"]

_ENTRY = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def tasks_per_node(text: str) -> list[int]:
    """Returns the number of tasks of each node, by node, from SLURM's notation; empty if it is none.

    >>> tasks_per_node("6,1(x2)")
    [6, 1, 1]
    """
    counts: list[int] = []
    for entry in text.split(","):
        match = _ENTRY.fullmatch(entry.strip())
        if match is None:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
