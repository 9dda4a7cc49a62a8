"""The documented path of what a user passes to `FederatedStrategy`; they live in ``decide/`` and ``runtime/``."""

from lightning_hetero.federated.decide.policy import AdaptiveSteps, FedAvg, LbBsp, RoundPolicy, ScaledLr
from lightning_hetero.federated.runtime.server import ServerOptimizer

__all__ = ["AdaptiveSteps", "FedAvg", "LbBsp", "RoundPolicy", "ScaledLr", "ServerOptimizer"]
