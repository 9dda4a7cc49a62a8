"""The policies by their documented path, e.g. ``lightning_hetero.stale.policy.Asp``; see ``decide/policy``."""

from lightning_hetero.stale.decide.policy import *  # noqa: F403
from lightning_hetero.stale.decide.policy import __all__ as __all__
