"""Bits and words of the messages between workers and server (layer P)."""

from __future__ import annotations

from enum import IntFlag


class PushFlag(IntFlag):
    """Bits of `Request.flags` of a push; of a claim only the last one.

    FINAL: the last push of the batch; it is a claim for the same global step, too.
    OVERFLOW: gradients overflowed under mixed precision (AMP); the whole update is skipped, as under DDP.
    MEASURES: the answer that the batch is over is to bring what the server has counted.
    MORE: other optimizer steps of the same batch probably follow, whose gradients depend on this one.
    """

    FINAL = 1
    OVERFLOW = 2
    MEASURES = 4
    MORE = 8


class ReplyFlag(IntFlag):
    """Bits of `Reply.flags`.

    CHANGED: the sub-step was applied, so the published parameters differ although their version is the same.
    MEASURES: the text is what the server has counted, as the worker asked for with `PushFlag.MEASURES`.
    """

    CHANGED = 1
    MEASURES = 2


class Word:
    """What a global step did, in one integer: the number of optimizer steps, and whether an overflow skipped them.

    >>> word = Word.of(steps=2, overflow=True)
    >>> Word.steps(word), Word.overflowed(word)
    (2, True)
    """

    _OVERFLOW = 1 << 16

    @classmethod
    def of(cls, *, steps: int, overflow: bool) -> int:
        """Returns the word; ``steps`` counts skipped ones, too, as Lightning does."""
        return min(steps, cls._OVERFLOW - 1) | (cls._OVERFLOW if overflow else 0)

    @classmethod
    def steps(cls, word: int) -> int:
        """Returns how many optimizer steps the global step made."""
        return word & (cls._OVERFLOW - 1)

    @classmethod
    def overflowed(cls, word: int) -> bool:
        """Returns whether the steps were skipped because gradients overflowed."""
        return bool(word & cls._OVERFLOW)
