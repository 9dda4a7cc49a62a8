"""A judgement on one thing, and what to do about it (layer P)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

Level = Literal["ok", "warn", "fail"]
_ORDER: tuple[Level, ...] = ("ok", "warn", "fail")


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding.

    Attributes:
        level: ``"ok"``; ``"warn"``: something will be slower or missing; ``"fail"``: something will not train.
        check: what was looked at, e.g. ``"shared memory"``.
        text: what was found.
        advice: what to do; empty where nothing need be done.
    """

    level: Level
    check: str
    text: str
    advice: str = ""


fine, warning, failing = (partial(Finding, level) for level in _ORDER)
"""Make a finding of each level, of what was looked at, what was found, and advice."""


def worst(findings: Iterable[Finding]) -> Level:
    """Returns the gravest level of all; ``"ok"`` of none."""
    return _ORDER[max((_ORDER.index(finding.level) for finding in findings), default=0)]


def findings_text(findings: Sequence[Finding]) -> str:
    """Returns the findings as lines for people, in the order given.

    >>> print(findings_text([warning("fork", "not available", "use Linux")]))
    warn  fork: not available
          -> use Linux
    """
    lines: list[str] = []
    for finding in findings:
        lines.append(f"{finding.level:<4}  {finding.check}: {finding.text}")
        if finding.advice:
            lines.append(f"      -> {finding.advice}")
    return "\n".join(lines)
