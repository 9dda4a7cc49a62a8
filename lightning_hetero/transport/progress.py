"""What the server's main thread does, as one word that others can read at any time (layer T).

The word changes whenever the thread goes on. So whoever sees the same word for long knows that it hangs, and in what.
"""

from __future__ import annotations

from collections.abc import Callable

from lightning_hetero.transport.base import Ask

Stamp = Callable[[int, int], object]
"""Called by the thread when another work begins, with its kind and its number, see `stamped`."""

WAITS, STEPS = 0, 255  # besides a number of `Ask`, which says that a request of this kind is served
"""Kinds of work: waiting for requests, the step of an optimizer."""


def stamped(before: int, kind: int, number: int) -> int:
    """Returns the next word.

    Args:
        before: the last one.
        kind: of the work that begins now.
        number: of the optimizer, or the rank whose request it is.
    """
    return ((before >> 32) + 1 & 0x7FFFFFFF) << 32 | kind << 24 | number & 0xFFFFFF


def work_of(word: int) -> str:
    """Returns what a word says, to stand behind "has been"."""
    kind, number = word >> 24 & 0xFF, word & 0xFFFFFF
    if kind == STEPS:
        return f"in the step of optimizer {number}"
    return f"serving {Ask(kind).name} of rank {number}" if kind else "waiting for requests"
