"""The policies' documented path; they live in ``decide/``."""

from lightning_hetero.shares.bounds import ShareBounds
from lightning_hetero.shares.policy import BalancePolicy

__all__ = ["BalancePolicy", "ShareBounds"]
