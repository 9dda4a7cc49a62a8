"""Options that this release no longer has: whoever still sets one is told why, and what to do instead."""

from __future__ import annotations

from typing import Any

__all__ = ["REMOVED_OPTIONS", "refuse_removed"]

# {strategy's class: {option: why it went, and the way out}}; an entry stays for one release
REMOVED_OPTIONS: dict[str, dict[str, str]] = {
    "LoadBalancedStrategy": {},
    "FederatedStrategy": {},
    "BoundedStalenessStrategy": {},
    "HeteroPipelineStrategy": {
        "overlap": "transfers always run beside computation, which was the default and never slower. Leave it out",
        "seed": "dropout and whatever else is drawn follow seed_everything, or 0. Call seed_everything(seed)",
        "cache_folder": "a trace keeps what was measured. Pass its path as cluster=, or a ModelCost as profile=",
        "carrier": "training steps are suspended as greenlets, which are installed with the package: leave it out",
    },
    "AutoStrategy": {},
}


def refuse_removed(strategy: type, options: dict[str, Any]) -> None:
    """Raises an error for the first of ``options`` that ``strategy``, or a class it is based on, had in the last release.

    Raises:
        TypeError: naming the option, the reason and what to do.
    """
    for base in strategy.__mro__:
        for name, reason in REMOVED_OPTIONS.get(base.__name__, {}).items():
            if name in options:
                raise TypeError(f"{base.__name__} no longer has {name}=: {reason}")
