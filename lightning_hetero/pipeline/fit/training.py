"""One training batch through the pipelines, between Lightning's hooks (layer L).

    the leader of a group                                   its members             idle ranks
    ──────────────────────────────────────────────────────────────────────────────────────────────
    fetch its part of the global batch [loaders]            a dummy                 a dummy
    cut it into micro-batches [data.micro_batches]
    training_step, suspended and resumed [runtime]   <--->  stages [runtime]
    gradients of the same layers in other groups [gradients], while the last backward passes run
    what was logged: once, the mean over everything [logs]  the same                the same
    zero_grad, backward (puts the gradients in place), clip, step: Lightning's, on what a rank holds
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_hetero import lightning_compat as compat
from lightning_hetero.callbacks.reporting import RequeueTogether
from lightning_hetero.data.batches import Part
from lightning_hetero.data.micro_batches import join_outputs, split_batch
from lightning_hetero.pipeline.decide.replanning import BatchReport, reporting_group
from lightning_hetero.pipeline.fit.gradients import GradientsAside
from lightning_hetero.pipeline.fit.leader_step import KeptBySteps, MemberOutputs, acting_as, same_settings
from lightning_hetero.pipeline.fit.place import RankInPlan
from lightning_hetero.pipeline.fit.planning import declared_calls
from lightning_hetero.pipeline.fit.replans import Replans
from lightning_hetero.pipeline.runtime.execute.stage_runner import MicroBatch
from lightning_hetero.pipeline.runtime.step.tensor_trees import loss_of
from lightning_hetero.types import SpeedSample, StepReport


class TrainBatches:
    """Runs the training batches of one run on one rank.

    Args:
        place: of this rank in the plan.
        replans: other plans, while the run goes on.
        requeue: what SLURM asks for, in a fit; told to all with each batch.

    Attributes:
        gradients: of this rank, between the hooks.
        part: this rank's part of the batch that runs, or ran last.
        sigterm: whether rank 0 has said with a batch that it has received SIGTERM.
        in_step: a batch is on its way through the pipelines.
    """

    def __init__(self, place: RankInPlan, replans: Replans, requeue: RequeueTogether | None) -> None:
        self._place, self._run, self.replans, self._requeue = place, place.run, replans, requeue
        self._trainer, self._module, self._binder = self._run.trainer, self._run.module, self._run.binder
        self._kept = KeptBySteps(self._module, self._run.channel.rank, self._run.backbone.layers)
        self.gradients = GradientsAside(place)
        self.part: Part | None = None
        self.sigterm = self.in_step = False
        self._last: tuple[Part, BatchReport] | None = None  # of all ranks' last step
        self._is_checked = False  # layers have been looked at for what they keep
        self._exchange_s = 0.0  # of the last batch: from the message to all ranks on

    @property
    def report(self) -> StepReport | None:
        """On the last batch, the same on all ranks; None before the first one."""
        if self._last is None:
            return None
        part, told = self._last
        records = tuple(
            SpeedSample(rank=r, step=part.step, samples=n, compute_s=compute_s, wait_s=wait_s)
            for r, (n, compute_s, wait_s) in enumerate(told.work)
        )
        return StepReport(epoch=part.epoch, step=part.step, records=records, predicted_s=self._place.predicted_s)

    def look(self) -> None:
        """Looks whether the user's code has changed the module, see `RankInPlan.look`; collective."""
        if self._place.look():
            self._kept.follow(self._run.backbone.layers)
            self._run.watch_layers(self._run.backbone)

    def open(self) -> None:
        """The next train batch is on the device: which part of the global batch is it, and does another plan begin."""
        self.part = self._binder.open(compat.upcoming_batch(self._trainer))
        if self._kept.epoch_begins:
            self.look()
            self._kept.note()  # hooks before the epoch, which all ranks run, may have changed something
            planned, calls = self._place.planned, declared_calls(self._module)
            if calls is not None and calls != planned.calls:
                self._place.follow(replace(planned, calls=calls))
        self.replans.begin(self.part, gradients=self.gradients.may_be_kept)

    def train(self, batch: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs one training batch through all pipelines; returns what ``training_step`` returned, joined.

        Args:
            batch: this rank's part, or a dummy.
            args, kwargs: further arguments of ``training_step``.
        """
        if self._last is not None and self._last[0] is self.part:
            raise TypeError(
                "optimizer_step, or the optimizer, calls its closure a second time, but in a pipeline a batch goes"
                " through the layers once per optimizer step. Use an optimizer with one pass, or"
                " strategy='hetero_balanced'"
            )
        self.in_step, self._place.held.in_between = True, False
        try:
            return self._train(batch, args, kwargs)
        except RuntimeError:
            self._place.refuse_kept()  # whose graphs end somewhere else
            raise
        finally:
            self.in_step = False

    def _train(self, batch: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        place, part = self._place, self.part
        assert part is not None
        accumulates = compat.accumulates_now(self._trainer)  # gradients stay here, a later batch synchronises them
        started_s = time.perf_counter()
        step = compat.batches_of_all_epochs(self._trainer)
        sizes, first = self._binder.micro_batches(part, place.group_index)
        batches = self._cut(batch, sizes, part.samples) if place.leads and sizes else []
        weights = self._weights(batches, sizes, part)
        place.time_layers(place.group_index == reporting_group(step, place.planned.plan.groups))
        place.busy.begin(step)
        self.gradients.begin()
        # An emulated device's sleep comes after the real backward pass: sums begun in that would be over before the
        # gradients exist on the device, and wait for no other rank.
        arm = None if accumulates or self._run.scenario is not None else place.held.sync.arm
        self._kept.watch(self.replans.generation, leads=place.leads)
        outputs: list[Any] = []
        if place.runner is not None and sizes:
            numbers = range(first, first + len(sizes))
            if place.leads:
                micro_batches = [
                    MicroBatch(body=self._body(batch, size, args, kwargs), samples=size, weight=weight, number=number)
                    for batch, size, weight, number in zip(batches, sizes, weights, numbers, strict=True)
                ]
                with same_settings(self._trainer):
                    outputs = place.runner.train(
                        step, micro_batches, scale=self.gradients.scale, before_last_backward=arm
                    )
            else:
                place.runner.serve(step, sizes, before_last_backward=arm)
        self._kept.check(part.samples, len(sizes))
        place.busy.end()
        if not accumulates:
            place.held.sync.launch()
        losses = place.logs.read([loss_of(output) for output in outputs])
        busy_s, sent_s = place.busy.busy_s, time.perf_counter()
        told = self._told(step, sum(sizes), busy_s, sent_s - started_s - busy_s)
        receive = self._send(losses, weights, told)
        self.replans.rank_zero.catch_up()
        if not accumulates:
            self.gradients.sum()
        self.gradients.put_aside()
        told, loss, paused_s, news = self._received(receive, told)
        ended_s = time.perf_counter()
        self._exchange_s, self._last = ended_s - sent_s, (part, told)
        data = {"samples": part.samples, "compute_s": busy_s, "wait_s": ended_s - started_s - busy_s}
        self._run.events.note("step", part.epoch, part.step, data)
        self.replans.observe(step, part, told, paused_s, news=news)
        if not outputs:
            return {"loss": loss}
        joined = join_outputs(outputs, sizes)
        return {**joined, "loss": loss} if isinstance(joined, dict) else loss

    def backward_done(self) -> None:
        """Lightning's ``backward`` hook is due: the gradients are there."""
        self.gradients.put_back()
        if not self._is_checked:
            self._is_checked = True
            self._place.refuse_kept()

    def epoch_ended(self) -> None:
        """All batches of an epoch have been trained, and its hooks come; collective."""
        self.look()
        group = self._place.evaluation
        self._kept.share_out(group.leader, group.others, group.send, group.receive)

    def outputs(self, outputs: Any) -> Any:
        """Returns what hooks are given of a batch."""
        place = self._place
        if place.leads or place.group is None or not isinstance(outputs, dict):
            return outputs
        return MemberOutputs(outputs, rank=self._run.channel.rank, leader=place.group.ranks[0])

    # ---- a leader's micro-batches ------------------------------------------------------------------------------

    def _cut(self, batch: Any, sizes: Sequence[int], samples: int) -> list[Any]:
        try:
            return split_batch(batch, sizes, self._binder.layout, samples=samples, owner=self._module)
        except TypeError as error:
            raise TypeError(f"{error}; or use strategy='hetero_balanced', which cuts no batch") from error

    def _body(self, batch: Any, samples: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], Any]:
        def body() -> Any:
            acts, logs = acting_as(self._place.group_index or 0, "training_step"), self._place.logs.collecting(samples)
            with acts, logs, self._kept.step():
                output = self._module.training_step(batch, *args, **kwargs)
            if output is None:
                raise RuntimeError(
                    f"training_step returned None on rank {self._run.channel.rank}: to skip a batch so is not"
                    " supported in a pipeline (nor by stock DDP), because the other ranks would wait for its gradients."
                    " Return a loss that is zero, e.g. 0.0 * output.sum(), or leave such samples out of the dataset"
                )
            return output

        return body

    def _weights(self, batches: Sequence[Any], sizes: Sequence[int], part: Part) -> list[float]:
        """Returns each micro-batch's weight in the gradient; with token weights collective."""
        place, each = self._place, 1.0 / self._trainer.accumulate_grad_batches
        if self._run.settings.shared.loss_reduction == "sum":
            return [each / self._run.channel.world_size] * len(sizes)
        weigh = self._run.settings.shared.weight_in(self._module)
        if weigh is None:
            return [each * size / sum(part.shares) for size in sizes]
        own = place.logs.read([w if isinstance(w, Tensor) else float(w) for w in map(weigh, batches)])
        total = self._run.channel.sum_async(sum(own))()
        return [each * weight / total if total > 0 else 0.0 for weight in own] or [0.0] * len(sizes)

    # ---- what all ranks tell one another of a batch ------------------------------------------------------------

    def _told(self, batch: int, samples: int, busy_s: float, wait_s: float) -> BatchReport:
        """Returns what this rank tells the others of a batch, in which it has waited for ``wait_s`` by now."""
        place = self._place
        rank, links, layer_s = self._run.channel.rank, *place.measured()
        return BatchReport.of_rank(
            rank, self._run.channel.world_size, place.planned.plan.groups[0].cuts[-1],
            (float(samples), busy_s, wait_s, self._exchange_s), rest_s=place.rest_s(batch), links=links,
            first_layer=0 if place.group is None else place.group.cuts[place.group.ranks.index(rank)],
            layer_s=layer_s,
        )  # fmt: skip

    def _send(self, losses: Sequence[float], weights: Sequence[float], told: BatchReport) -> Callable[[], list[float]]:
        """Starts to sum over all ranks what each has to tell of the batch, with what has been logged."""
        own = sum(loss * weight for loss, weight in zip(losses, weights, strict=True)) if losses else 0.0
        numbers = (
            own * self._trainer.accumulate_grad_batches, self.replans.paused_s, self._trainer.should_stop,
            0 if self._requeue is None else self._requeue.take(),
            self._run.channel.rank == 0 and getattr(self._trainer, "received_sigterm", False),
            bool(self.replans.rank_zero.unsaid), self._kept.counts_batches,
        )  # fmt: skip
        return self._place.logs.send([*map(float, numbers), *told.numbers])

    def _received(
        self, receive: Callable[[], list[float]], told: BatchReport
    ) -> tuple[BatchReport, Tensor, float, bool]:
        """Waits for the sums; returns what all have told, the loss of the global batch, the same on all ranks, how long
        the ranks stood still before it, in the mean [s], and whether rank 0 has decided something."""
        loss, paused_s, stops, signal, sigterm, news, holds, *sums = receive()
        self.sigterm = self.sigterm or bool(sigterm)
        if self._requeue is not None:
            self._requeue.hear(signal)
        if stops:  # `training_step` may have said so, which not all ranks run
            self._trainer.should_stop = True
        if holds:
            self.replans.hold()
        of_all = torch.full((), loss, device=self._run.settings.device, dtype=torch.float32)
        return replace(told, numbers=sums), of_all, paused_s / self._run.channel.world_size, bool(news)
