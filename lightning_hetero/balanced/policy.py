"""The policy's documented path; it lives in ``decide/``."""

from lightning_hetero.balanced.decide.policy import BalancePolicy, ShareBounds

__all__ = ["BalancePolicy", "ShareBounds"]
