"""Lightning callbacks for any strategy (layer L).

``StragglerMonitor``  logs which rank is slow and which waits
``ThrottleCallback``  emulates unequal devices
``HeteroTrace``       writes one JSONL trace per rank
``BatchRebalancer``   the handle on the balanced engine's policy
``HeteroBatchSizeFinder``  finds how many samples fit each rank

What they ask of a strategy is declared in ``reporting``.
"""

from lightning_hetero.callbacks.balancing import BatchRebalancer, HeteroBatchSizeFinder
from lightning_hetero.callbacks.straggler import StragglerMonitor
from lightning_hetero.callbacks.throttle import ThrottleCallback
from lightning_hetero.callbacks.trace import HeteroTrace

__all__ = ["BatchRebalancer", "HeteroBatchSizeFinder", "HeteroTrace", "StragglerMonitor", "ThrottleCallback"]
