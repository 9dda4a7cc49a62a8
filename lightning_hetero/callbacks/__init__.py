"""Lightning callbacks (layer L).

``BatchRebalancer``   holds the balanced engine's policy
``StragglerMonitor``  logs who is slow and who waits, under any strategy
``ThrottleCallback``  emulates unequal devices
``HeteroTrace``       writes one JSONL trace per rank
"""

from lightning_hetero.callbacks.rebalancer import BatchRebalancer
from lightning_hetero.callbacks.straggler import StragglerMonitor
from lightning_hetero.callbacks.throttle import ThrottleCallback
from lightning_hetero.callbacks.trace import HeteroTrace

__all__ = ["BatchRebalancer", "HeteroTrace", "StragglerMonitor", "ThrottleCallback"]
