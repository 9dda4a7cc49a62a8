"""Facts made up for the doctor's tests, by flat names."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from lightning_hetero.doctor.facts import Facts, GpuFacts, HostFacts, ModuleFacts, NetworkFacts

_GROUPS = {"host": HostFacts, "network": NetworkFacts, "gpus": GpuFacts, "module": ModuleFacts}
_NAMES = {"devices_problem": "problem"}


def changed(facts: Facts, **flat: Any) -> Facts:
    """Returns the facts with some changed, each put where it belongs."""
    for group, kind in _GROUPS.items():
        names = {field.name for field in fields(kind)}
        own = {_NAMES.get(name, name): value for name, value in flat.items() if _NAMES.get(name, name) in names}
        facts = replace(facts, **{group: replace(getattr(facts, group), **own)})
        flat = {name: value for name, value in flat.items() if _NAMES.get(name, name) not in names}
    return replace(facts, **flat)


def made_up(**flat: Any) -> Facts:
    return changed(Facts(), **flat)
