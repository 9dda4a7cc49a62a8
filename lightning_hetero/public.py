"""The public names, imported when the first of them is asked for (layer L)."""

from lightning_hetero.auto.strategy import AutoStrategy
from lightning_hetero.balanced.sharded_strategy import ShardedBalancedStrategy
from lightning_hetero.balanced.strategy import LoadBalancedStrategy
from lightning_hetero.callbacks import *
from lightning_hetero.controller.lyapunov import LyapunovController
from lightning_hetero.emulate import Scenario
from lightning_hetero.federated.strategy import FederatedStrategy
from lightning_hetero.pipeline.strategy import HeteroPipelineStrategy
from lightning_hetero.shares.policy import BalancePolicy
from lightning_hetero.stale.strategy import BoundedStalenessStrategy
