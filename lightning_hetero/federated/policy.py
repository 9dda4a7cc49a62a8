"""The documented path of what a user passes to `FederatedStrategy`; they live in ``decide/``."""

from lightning_hetero.federated.decide.policy import AdaptiveSteps, FedAvg, LbBsp, RoundPolicy, ScaledLr

__all__ = ["AdaptiveSteps", "FedAvg", "LbBsp", "RoundPolicy", "ScaledLr"]
