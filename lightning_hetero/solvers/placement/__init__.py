"""Who works with whom: groups, order and shares of all devices (layer P)."""

from lightning_hetero.solvers.placement.place import evaluate_plan, micro_batches_of, place

__all__ = ["evaluate_plan", "micro_batches_of", "place"]
