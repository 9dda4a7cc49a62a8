"""A judgement on one thing, and what to do about it (layer P)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "fail"]
_ORDER: tuple[Level, ...] = ("ok", "warn", "fail")


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One finding.

    Attributes:
        check: what was looked at, e.g. ``"shared memory"``.
        level: ``"ok"``; ``"warn"``: something will be slower or missing; ``"fail"``: something will not train.
        text: what was found.
        advice: what to do; empty where nothing need be done.
    """

    check: str
    level: Level
    text: str
    advice: str = ""


def fine(check: str, text: str, advice: str = "") -> Finding:
    """Returns a finding of level ``ok``."""
    return Finding(check=check, level="ok", text=text, advice=advice)


def warning(check: str, text: str, advice: str) -> Finding:
    """Returns a finding of level ``warn``."""
    return Finding(check=check, level="warn", text=text, advice=advice)


def failing(check: str, text: str, advice: str) -> Finding:
    """Returns a finding of level ``fail``."""
    return Finding(check=check, level="fail", text=text, advice=advice)


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
