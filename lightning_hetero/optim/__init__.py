"""`UnevenZeroOptimizer`: an optimizer's state divided among the ranks by their memory (layer T)."""

from lightning_hetero.optim.zero import UnevenZeroOptimizer

__all__ = ["UnevenZeroOptimizer"]
