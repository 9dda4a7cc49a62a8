"""Binds the user's train loader to the plan: the leader of each group reads the group's part (layer L).

    global batch t:   [ group 0          | group 1    ]     samples as planned, scaled where a batch is shorter
                      [ 0 | 1 | 2 | 3    | 4 | 5 | 6  ]     micro-batches, numbered across the groups

Ranks that lead no group read one sample, a dummy, so that Lightning's loop has a batch on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from lightning_hetero.base.arguments import SharedSettings
from lightning_hetero.base.loaders import BoundLoader, PartBinder
from lightning_hetero.data.batches import Part
from lightning_hetero.data.copies import users_own
from lightning_hetero.data.layouts import Layout
from lightning_hetero.data.order import Channel
from lightning_hetero.pipeline.decide.plans import micro_sizes, resized
from lightning_hetero.pipeline.decide.replanning import Position
from lightning_hetero.solvers.scale import scale_shares
from lightning_hetero.types import GroupPlan, PipelinePlan

_SEVERAL = (
    "A pipeline cuts one batch into micro-batches, and batches of several loaders have several sizes: pass one"
    " DataLoader. Combine the datasets (torch.utils.data.StackDataset or ConcatDataset), or use"
    " strategy='hetero_balanced'"
)


@dataclass(eq=False, kw_only=True, slots=True)
class CutLoader(BoundLoader):
    """One train loader, its copy, and how its batches are cut; None: they are not."""

    layout: Layout | None


class PipelineBinder(PartBinder[CutLoader]):
    """Replaces the train loader by a re-batched copy, and knows the parts of each batch on all ranks.

    Args:
        trainer: the running trainer.
        channel: blocking exchanges at set-up and epoch starts; over all ranks, those that rest too.
        shared: the strategy's arguments on batches.
        stream: ``"shared"``: all ranks read the same `IterableDataset`; None: one is refused.

    Attributes:
        lag: batches drawn before the one that is trained, at most, on any rank.
        plan: that the next batch is trained under, whatever it was drawn for; without groups before there is one.
    """

    def __init__(
        self, trainer: Trainer, channel: Channel, *, shared: SharedSettings,
        stream: Literal["shared"] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(trainer, channel, strategy_name="HeteroPipelineStrategy", shared=shared, stream=stream)
        self._stream_mode = stream
        self.plan = PipelinePlan(groups=())
        self._whole = False
        self._learn: Callable[[DataLoader], Layout | None] | None = None
        self._drawn_from: list[tuple[Position, PipelinePlan]] = []  # from which batch on which plan's shares
        self._begun = (0, 0)
        self.lag = 0

    # ---- set-up ----------------------------------------------------------------------------------------------------

    def global_batch_of(self, loader: DataLoader) -> int:
        """Returns the samples of a full global batch of the user's train loader, before it is processed; a collective.

        Raises:
            TypeError, ValueError: as `process`.
        """
        if isinstance(loader, Mapping | Sequence | CombinedLoader):
            raise TypeError(f"the train loader is a {type(loader).__name__} of loaders. {_SEVERAL}")
        spec = self.inspect(loader)
        self.orders.agree(spec)
        if spec.kind == "stream":
            self._require_stream()
        if spec.batch_size is not None:
            return self.orders.batch_of_all(spec)
        return self.orders.order(loader, spec, 0).global_batch_size

    def settle(
        self, plan: PipelinePlan, *, whole: bool = False, learn: Callable[[DataLoader], Layout | None] | None = None
    ) -> None:
        """Takes the plan that the run begins with; the same on all ranks.

        Args:
            plan: with one group or more.
            whole: what a plan leaves in one piece stays in one, even if it is larger than planned: batches may be of a
                class that cannot be cut.
            learn: finds out how a loader's batches are cut, on all ranks; None: no need to know.
        """
        self.plan, self._whole, self._learn = plan, whole, learn
        self._drawn_from = [((0, 0), plan)]
        for bound in self._bound:  # processed already, e.g. to count the steps
            bound.layout = None if learn is None else learn(users_own(bound.loader))

    def draw_for(self, plan: PipelinePlan, begin: Position) -> None:
        """Divides by another plan's shares the batches from ``begin`` on, of which none has been drawn yet."""
        self._drawn_from = [(at, old) for at, old in self._drawn_from if at < begin]
        self._drawn_from.append((begin, plan))

    def leaders_drawn_for(self, begin: Position, end: Position) -> set[int]:
        """Returns the leaders under the plans that batches from ``begin`` to ``end``, excluded, are drawn for."""
        ends = [at for at, _ in self._drawn_from[1:]] + [end]
        plans = [p for (at, p), until in zip(self._drawn_from, ends, strict=True) if at < end and begin < until]
        return {group.ranks[0] for plan in plans for group in plan.groups}

    def process(self, loader: object) -> DataLoader:
        loader, spec, self.lag = self._inspect(loader)
        self.refuse_own_data(loader)
        layout = None if self._learn is None else self._learn(loader)
        if spec.kind == "stream":
            self._require_stream()
            # Without a length Lightning fetches one batch ahead, to know which is the last.
            self.lag += not hasattr(loader.dataset, "__len__")
            bound = CutLoader(spec=spec, full=self.orders.batch_of_all(spec), order=None, layout=layout)
            return self._read_stream(bound, loader, "shared")
        order = self.orders.continued(self.orders.order(loader, spec, 0))
        self.orders.check_position(order.global_batch_size)
        return self._read_parts(CutLoader(spec=spec, full=order.global_batch_size, order=order, layout=layout), loader)

    def _require_stream(self) -> None:
        if self._stream_mode is None:
            raise TypeError(
                "the train dataset is an IterableDataset, and every rank of a pipeline would read its own stream."
                f" Say {self._strategy_name}(stream='shared') if all ranks read the same stream (each group keeps its"
                " part of every global batch); otherwise use a map-style dataset, or strategy='hetero_balanced'"
            )

    # ---- running ---------------------------------------------------------------------------------------------------

    def bind(self) -> None:
        """Checks that there is one train loader; a plan for batches of another size is scaled to those it has now.

        Raises:
            TypeError: there are several.
            ValueError: its batches have fewer samples than the plan has groups.
        """
        if len(self._bound) > 1:
            raise TypeError(f"several train loaders. {_SEVERAL}")
        full = self._bound[0].full
        if self.plan.groups and sum(group.samples for group in self.plan.groups) != full:
            self.plan = resized(self.plan, full)
            self._drawn_from = [((0, 0), self.plan)]

    def _begin(self) -> tuple[int, int]:
        begun = super()._begin()
        if begun < self._begun:  # a fit within the fit, e.g. a learning-rate finder's, has ended
            self._drawn_from = [((0, 0), self.plan)]
        self._begun = begun
        return begun

    @property
    def layout(self) -> Layout | None:
        """How the batches are cut that are handed out now."""
        return self._bound[0].layout

    def split(self, bound: CutLoader, epoch: int, step: int, total: int) -> tuple[int, ...]:
        groups = next(plan for at, plan in reversed(self._drawn_from) if at <= (epoch, step)).groups
        planned = [group.samples for group in groups]
        shares = [0] * self._channel.world_size
        # No group gets a single sample, of which BatchNorm can make no statistics, if that can be helped.
        for group, share in zip(groups, scale_shares(planned, total, lower=1, least=2), strict=True):
            shares[group.ranks[0]] = share
        return tuple(shares)

    def micro_batches(self, part: Part, group: int | None) -> tuple[tuple[int, ...], int]:
        """Returns the samples of each micro-batch of a group, and the number of the first in the global batch.

        Numbers follow the samples: the groups in the order of their leaders' ranks. The same on all ranks. A batch that
        was drawn for another plan is divided as its leaders have read it.

        Args:
            part: any rank's part of the batch.
            group: index of the group in the plan; None for an idle rank.
        """
        if group is None:
            return (), 0
        groups, sizes = self.plan.groups, self.all_micro_batches(part)
        before = [s for g, s in zip(groups, sizes, strict=True) if g.ranks[0] < groups[group].ranks[0]]
        return sizes[group], sum(map(len, before))

    def all_micro_batches(self, part: Part) -> list[tuple[int, ...]]:
        """Returns the samples of each micro-batch, by group."""
        return [self._cut(group, part.shares[group.ranks[0]]) for group in self.plan.groups]

    def _cut(self, group: GroupPlan, samples: int) -> tuple[int, ...]:
        if self._whole and len(group.micro_batches) == 1:
            return (samples,) if samples else ()
        return micro_sizes(group.micro_batches, samples)
