"""Solvers: from modelled costs to whole-number decisions. Pure, exact, deterministic.

- `apportion`: shares in proportion to weights (largest remainder).
- `minimax`: the split whose slowest rank is fastest, for any non-decreasing cost per rank.
- `minimax_none_or_least`: the same where a rank gets none or at least so many samples.

An impossible problem is an `Allocation` with status INFEASIBLE and a reason. Numbers are checked where they are given.
"""

from lightning_hetero.solvers.apportion import apportion
from lightning_hetero.solvers.minimax import minimax, minimax_none_or_least

__all__ = ["apportion", "minimax", "minimax_none_or_least"]
