"""lightning-hetero: Lightning strategies for devices that are not all the same.

    Trainer(strategy="hetero_balanced")          # importing this package registers the names
    Trainer(strategy=LoadBalancedStrategy())     # the same, with arguments
    Trainer(strategy="hetero_stale")             # or BoundedStalenessStrategy()
    Trainer(strategy="hetero_pipeline")          # or HeteroPipelineStrategy(backbone="model")
    Trainer(strategy="hetero_auto")              # the one of these that fits; or AutoStrategy()
    Trainer(strategy="hetero_federated")         # or FederatedStrategy(local_steps=10)
"""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_hetero._version import __version__
from lightning_hetero.auto.strategy import AutoStrategy
from lightning_hetero.balanced.strategy import LoadBalancedStrategy
from lightning_hetero.base.setup import refuse_elsewhere
from lightning_hetero.callbacks import BatchRebalancer, HeteroTrace, StragglerMonitor, ThrottleCallback
from lightning_hetero.controller.lyapunov import LyapunovController
from lightning_hetero.emulate import Scenario
from lightning_hetero.federated.strategy import FederatedStrategy
from lightning_hetero.pipeline.strategy import HeteroPipelineStrategy
from lightning_hetero.shares.policy import BalancePolicy
from lightning_hetero.stale.strategy import BoundedStalenessStrategy

_STRATEGIES = LoadBalancedStrategy, BoundedStalenessStrategy, HeteroPipelineStrategy, FederatedStrategy, AutoStrategy
for _strategy in _STRATEGIES:
    _strategy.register_strategies(StrategyRegistry)
    refuse_elsewhere(f"hetero_{_strategy.engine}")

__all__ = [
    "AutoStrategy",
    "BalancePolicy",
    "BatchRebalancer",
    "BoundedStalenessStrategy",
    "FederatedStrategy",
    "HeteroPipelineStrategy",
    "HeteroTrace",
    "LoadBalancedStrategy",
    "LyapunovController",
    "Scenario",
    "StragglerMonitor",
    "ThrottleCallback",
    "__version__",
]
