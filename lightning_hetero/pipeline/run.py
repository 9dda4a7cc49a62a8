"""State of one run of the pipeline engine: everything that exists only between set-up and teardown (layer L)."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn

from lightning_hetero import lightning_compat as compat
from lightning_hetero.cluster.spec import cluster_to_plain
from lightning_hetero.data import Part
from lightning_hetero.emulate.scenario import Scenario
from lightning_hetero.glue.checks import check_same_settings
from lightning_hetero.glue.setup import own_memory
from lightning_hetero.pipeline.averages import Averages
from lightning_hetero.pipeline.backbone import Backbone, find_backbone
from lightning_hetero.pipeline.buckets import wait_checking
from lightning_hetero.pipeline.cut import BackboneCut
from lightning_hetero.pipeline.failures import FailureBoard
from lightning_hetero.pipeline.gradients import GradientSync
from lightning_hetero.pipeline.loaders import PipelineBinder
from lightning_hetero.pipeline.logs import StepLogs
from lightning_hetero.pipeline.ownership import Ownership
from lightning_hetero.pipeline.pace import BusyTime, ScenarioPace, parts_of
from lightning_hetero.pipeline.plan_times import called, times_of
from lightning_hetero.pipeline.planning import Planned
from lightning_hetero.pipeline.plans import plan_to_plain, unit_costs
from lightning_hetero.pipeline.pruning import prune, restore, to_device
from lightning_hetero.pipeline.record import model_to_plain
from lightning_hetero.pipeline.rescue import Rescue
from lightning_hetero.pipeline.runtime import PipelineRuntime
from lightning_hetero.pipeline.schedule import PipelineTimes, Policy
from lightning_hetero.pipeline.sharing import OwnerGroups, share_buffers, share_initial
from lightning_hetero.pipeline.training import TrainBatches, loss_of
from lightning_hetero.pipeline.whole import WholeState
from lightning_hetero.transport.side_channel import SideChannel
from lightning_hetero.types import Event, GroupPlan

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_hetero.pipeline.strategy import HeteroPipelineStrategy

__all__ = ["PipelineRun"]


class PipelineRun:
    """One fit, validation, test or prediction on one rank.

    Args:
        strategy: gives settings, device and timeout; its process group exists.
        trainer: the running trainer.
    """

    def __init__(self, strategy: HeteroPipelineStrategy, trainer: Trainer) -> None:
        self.trainer, self.strategy = trainer, strategy
        self.fitting = trainer.state.fn == TrainerFn.FITTING
        self.module = trainer.lightning_module
        self.failed = False
        if strategy.world_size > 1:
            own_memory(self.module)
        group = dist.new_group(backend="gloo", timeout=strategy.timeout)
        assert isinstance(group, dist.ProcessGroup)
        self.channel = SideChannel(group)
        check_same_settings(self.channel.all_gather_object(strategy.fingerprint()))
        self.failures = FailureBoard(self._store(), self.channel.rank)
        self.binder = PipelineBinder(
            trainer,
            self.channel,
            global_batch_size=strategy.settings_global_batch_size,
            batch_sampler=strategy.batch_sampler,
            stream=strategy.stream,
        )
        self.planned: Planned | None = None
        self._installed = False
        self.group_index: int | None = None
        self.runtime: PipelineRuntime | None = None
        self.scenario: Scenario | None = None  # set where a `ThrottleCallback` emulates: stages sleep for their part
        self.busy = BusyTime()
        self.batches: TrainBatches | None = None
        self._events: deque[Event] = deque(maxlen=4096)
        self._opened_s = time.perf_counter()
        self._evaluations = 0
        self._undo: list[Callable[[], None]] = [compat.keep_train_sampler(trainer)] if self.fitting else []
        if self.fitting and self.channel.world_size > 1:
            self._undo.append(compat.replace_sigterm_broadcast(trainer, self._any_told))

    def _any_told(self, told: bool) -> bool:
        """Whether rank 0 has received SIGTERM; a rank that has failed is noticed while this waits for it."""
        flag = torch.tensor([told], dtype=torch.uint8)
        work = dist.broadcast(flag, src=0, group=self.channel.group, async_op=True)
        wait_checking(work, self.failures.check)
        return bool(flag.item())

    def _store(self) -> dist.Store:
        """A store of our own, hosted by rank 0, where a failing rank leaves the cause."""
        if self.channel.world_size == 1:
            return dist.HashStore()
        environment = self.strategy.cluster_environment
        assert environment is not None
        host, first = environment.main_address, self.channel.rank == 0
        options: dict[str, Any] = {"wait_for_workers": False}
        if self.strategy.timeout is not None:
            options["timeout"] = self.strategy.timeout
        store = dist.TCPStore(host, 0, is_master=True, **options) if first else None
        port = self.channel.all_gather_object(store.port if store is not None else None)[0]
        return store or dist.TCPStore(host, port, is_master=False, **options)

    # ---- set-up -----------------------------------------------------------------------------------------------

    def find(self) -> Backbone:
        """Finds the layers; the module is whole."""
        self.backbone = find_backbone(self.module, self.strategy.backbone)
        return self.backbone

    def install(self, planned: Planned) -> None:
        """Takes this rank's place in the plan: others' layers leave its memory, links and groups are made."""
        strategy, module, rank = self.strategy, self.module, self.channel.rank
        plan = planned.plan
        self.planned = planned
        self.binder.settle(plan)
        self.ownership = Ownership(module, self.backbone.layers, plan, rank=rank)
        share_initial(module, self.ownership, self.channel.group)
        self.optimizers = strategy.optimizers if self.fitting else []  # else they are of a fit before
        prune(module, self.optimizers, self.ownership)
        self.averages = Averages(self.trainer, self.ownership, self.channel.group)
        self.averages.divide()
        to_device(module, self.optimizers, strategy.root_device)
        folder = self.trainer.default_root_dir
        self.whole = WholeState(
            module, self.ownership, group=self.channel.group, folder=folder if os.access(folder, os.W_OK) else None
        )
        index = next((i for i, group in enumerate(plan.groups) if rank in group.ranks), None)
        self.group_index, self.group = index, None if index is None else plan.groups[index]
        self.leads = self.group is not None and self.group.ranks[0] == rank
        backend, timeout = strategy.process_group_backend, strategy.timeout
        wire = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(wire, dist.ProcessGroup)
        self.wire = wire
        self.owner_groups = OwnerGroups(self.channel.group, backend=backend, timeout=timeout)
        self.sync = GradientSync(module, self.ownership, groups=self.owner_groups, check=self.failures.check)
        self.logs = StepLogs(module, self.channel, wait=partial(wait_checking, check=self.failures.check))
        self.runtime = self._runtime(planned, self.group) if self.group is not None else None
        self.predicted_s = self._predictions(planned)
        self.own = [p for p in module.parameters() if not p.is_meta]
        self._hide_example()
        if rank == 0 and self.fitting:
            self._events.append(self._plan_event(planned))
        self.rescue = Rescue(self)
        self.batches = TrainBatches(self)
        self._installed = True

    @staticmethod
    def _plan_event(planned: Planned) -> Event:
        data = {
            "plan": plan_to_plain(planned.plan),
            "cluster": cluster_to_plain(planned.cluster),
            "profile": None if planned.model is None else model_to_plain(planned.model),
            "seconds": planned.seconds,
        }
        return Event(kind="plan", rank=0, epoch=0, step=0, t_s=0.0, data=data)

    def _runtime(self, planned: Planned, group: GroupPlan) -> PipelineRuntime:
        strategy, rank = self.strategy, self.channel.rank
        model = planned.model or unit_costs(self.backbone.names)
        calls = planned.calls

        def times(samples: tuple[int, ...], calls: int) -> PipelineTimes:
            part = replace(group, samples=sum(samples), micro_batches=samples)
            return called(times_of(model, planned.cluster, part), calls)

        def policy(times: PipelineTimes) -> Policy:
            depths = group.depths * (times.stages // len(group.ranks))
            return Policy(depths=depths, priority="HFB")

        if self.scenario is not None and self.fitting:
            self.busy.pace = ScenarioPace(
                self.scenario,
                rank,
                parts=parts_of(model, group, rank, max(group.micro_batches)),
                stages=len(group.ranks),
                calls=calls,
            )
        links = planned.cluster.links
        emulated = {(a, b): links[a][b] for a in group.ranks for b in group.ranks if a != b}
        timeout = strategy.timeout
        return PipelineRuntime(
            self.backbone.layers,
            group=group,
            rank=rank,
            cut=BackboneCut(*self.backbone.cut_modules) if self.leads else None,
            wire=self.wire,
            failures=self.failures,
            times=times,
            seed=strategy.seed,
            calls=calls,
            loss_of=loss_of,
            carrier=strategy.carrier,
            checkpoint_layers=strategy.plan_settings.checkpoint_layers,
            policy=policy,
            overlap=strategy.plan_settings.overlap,
            pace=self.busy,
            emulated_links=emulated if strategy.emulate_links else None,
            timeout_s=1800.0 if timeout is None else timeout.total_seconds(),
            device=strategy.root_device,
        )

    def _predictions(self, planned: Planned) -> tuple[float, ...]:
        """Returns what each rank's own work for a full batch should take [s]; NaN where nothing was measured."""
        model, world = planned.model, self.channel.world_size
        if model is None:
            return (math.nan,) * world
        seconds = [0.0] * world
        for group in planned.plan.groups:
            times = times_of(model, planned.cluster, group)
            for stage, rank in enumerate(group.ranks):
                seconds[rank] = sum(times.forward_s[stage]) + sum(times.backward_s[stage])
            ends = (times.before_forward_s, times.before_backward_s, times.head_forward_s, times.head_backward_s)
            seconds[group.ranks[0]] += sum(map(sum, ends))
        return tuple(seconds)

    def _hide_example(self) -> None:
        """A forward pass of the whole module, as summaries and graphs make with this, has no layers to run on."""
        assert self.planned is not None
        example = getattr(self.module, "example_input_array", None)
        if example is not None and any(len(group.ranks) > 1 for group in self.planned.plan.groups):
            self.module.example_input_array = None
            self._undo.append(partial(setattr, self.module, "example_input_array", example))

    # ---- evaluation -------------------------------------------------------------------------------------------

    def evaluate(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Runs ``validation_step``, ``test_step`` or ``predict_step`` through the pipeline; None on members."""
        self._evaluations += 1
        output: Any = None
        step = -self._evaluations
        if self.runtime is not None:
            if self.leads:

                def body() -> Any:
                    with self.logs.collecting(None):
                        return getattr(self.module, name)(*args, **kwargs)

                output = self.runtime.evaluate(step, body, samples=1)
            else:
                self.runtime.serve_evaluation(step)
        if name != "predict_step":
            self.logs.publish()
        return output

    def share_buffers(self) -> None:
        """Before an evaluation: statistics such as BatchNorm's are those of the first group, as rank 0's under DDP."""
        share_buffers(self.module, self.ownership, self.owner_groups)

    # ---- checkpoints ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs, as plain types; the plan as a hint."""
        plan = plan_to_plain(self.planned.plan) if self.planned is not None else {}
        return {**self.binder.state_dict(), "plan": plan}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Takes over what a checkpoint brings, before the loaders are set up."""
        self.binder.orders.resume = state

    # ---- events -----------------------------------------------------------------------------------------------

    def note(self, kind: str, part: Part, data: dict[str, Any]) -> None:
        """Keeps an event of a batch for `take_events`."""
        t_s = time.perf_counter() - self._opened_s
        self._events.append(
            Event(kind=kind, rank=self.channel.rank, epoch=part.epoch, step=part.step, t_s=t_s, data=data)
        )

    def take_events(self) -> list[Event]:
        """Returns and forgets the noted events."""
        events = list(self._events)
        self._events.clear()
        return events

    # ---- end --------------------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Tells all ranks why this one stops."""
        if not self.failed:
            self.failed = True
            self.failures.report(error)

    def close(self) -> None:
        """Ends the run: the module is whole again on every rank, on the CPU; if it failed, only what needs no peer."""
        for undo in reversed(self._undo):
            undo()
        try:
            if self._installed:
                self._end_training()
        finally:
            if self.failed:
                self.failures.leave(self.channel.world_size, hosts=self.channel.rank == 0)
            self.channel.close(destroy=not self.failed)

    def _end_training(self) -> None:
        self.logs.close()
        self.sync.disarm()
        self.averages.release()
        try:
            if self.runtime is not None:
                self.runtime.close()
            if not self.failed:
                to_device(self.module, self.optimizers, torch.device("cpu"))
                restore(self.module, self.ownership, self.channel.group)
                self.averages.restore()
        except Exception as error:
            if not self.failed:  # else there is a cause already, which this would hide
                self.fail(error)
                raise
        finally:
            if not self.failed:
                self.owner_groups.close()
                dist.destroy_process_group(self.wire)
