"""lightning-hetero: Lightning strategies for devices that are not all the same.

    Trainer(strategy="hetero_balanced")          # importing this package registers the names
    Trainer(strategy=LoadBalancedStrategy())     # the same, with arguments
"""

__version__ = "0.1.0"

import sys

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from lightning_hetero.balanced.checks import refuse_fabric, refuse_other_package
from lightning_hetero.balanced.policy import BalancePolicy
from lightning_hetero.balanced.strategy import LoadBalancedStrategy
from lightning_hetero.callbacks import BatchRebalancer, HeteroTrace, StragglerMonitor, ThrottleCallback
from lightning_hetero.emulate import Scenario

LoadBalancedStrategy.register_strategies(StrategyRegistry)
STRATEGY_REGISTRY.register("hetero_balanced", refuse_fabric, description="for the Trainer only")

if (_other := sys.modules.get("pytorch_lightning.strategies")) is not None:
    _other.StrategyRegistry.register("hetero_balanced", refuse_other_package, description="for lightning.pytorch only")

__all__ = [
    "BalancePolicy",
    "BatchRebalancer",
    "HeteroTrace",
    "LoadBalancedStrategy",
    "Scenario",
    "StragglerMonitor",
    "ThrottleCallback",
    "__version__",
]
