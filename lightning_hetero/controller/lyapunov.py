"""What a user passes: `LyapunovController`, which starts a controller for a run (layer P)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_hetero.controller.controller import Controller
from lightning_hetero.controller.forms import Forms
from lightning_hetero.controller.settings import ControllerSettings
from lightning_hetero.controller.spending import Spending
from lightning_hetero.solvers.chain.chain import DepthRule
from lightning_hetero.solvers.tied_layers import Span
from lightning_hetero.types import Cluster, ModelCost, PipelinePlan


@dataclass(frozen=True, kw_only=True, slots=True)
class LyapunovController(ControllerSettings):
    """Settings of the online controller: pass it to a strategy as ``controller=LyapunovController(...)``.

    Args:
        v: V, weight of time against overspending [batches' budgets]: large is faster now and overspends longer. None:
            by the number of batches planned, so that the mean is within about 2% of the budget at the end.
        budget: long-term means to keep: ``money_per_sample``, ``money_per_hour``. One that is None is no limit, and
            with no limit at all time alone counts.
        bank: savings that are kept for later, at most [batches' budgets]; None: by the number of batches planned.
        prices: money per hour, of all ranks or by rank. 1.0: money is device hours.
        rest_cost: part of the price that is due for idle ranks, 0 to 1.
        structure: layers may move, and ranks may be idle; False: only samples per group are decided again.
        dead_band: least relative gain for which layers move or ranks rest, and least change of a time that is looked
            at.

    Raises:
        TypeError, ValueError: a value of a wrong type or out of its range; says which is allowed.

    >>> LyapunovController(budget={"money_per_sample": 1e-6}).budget
    {'money_per_sample': 1e-06}
    """

    def start(
        self, model: ModelCost, cluster: Cluster, plan: PipelinePlan, *, spans: Sequence[Span] = (),
        micro_batch_size: int | None = None, max_groups: int | None = None,
        depth: Literal["auto"] | DepthRule = "auto", planned_batches: int | None = None,
    ) -> Controller:  # fmt: skip
        """Returns a controller for a run that begins with ``plan``.

        Args:
            model, cluster: what the plan was made from.
            plan: in force, generation 0.
            spans, micro_batch_size, max_groups, depth: as in `best_plan`.
            planned_batches: of the whole run, if known.

        Raises:
            ValueError: numbers by rank of another length than the cluster, or a plan that does not fit it.
        """
        forms = Forms(
            model, cluster, plan, spans=spans, micro_batch_size=micro_batch_size, max_groups=max_groups,
            depth=depth,
        )  # fmt: skip
        spending = Spending(self, len(cluster.devices), forms.samples, planned_batches)
        return Controller(self, cluster, plan, forms=forms, spending=spending)
