"""What one rank finds goes to all: how batches are cut, and a plan whose memory all ranks get (layer L)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_hetero.cluster.spec import override_cluster
from lightning_hetero.cluster.units import bytes_text
from lightning_hetero.data.layouts import Layout, first_samples, learn_layout
from lightning_hetero.measure.device import device_of, is_out_of_memory
from lightning_hetero.pipeline.decide.plans import beside_bytes, held_bytes, with_room
from lightning_hetero.pipeline.fit.leader_step import add_hint
from lightning_hetero.pipeline.fit.plan.rehearsal import nobody_notices
from lightning_hetero.transport.side_channel import SideChannel
from lightning_hetero.types import Cluster, ModelCost, PipelinePlan

_SAMPLES = 4  # that a layout is learned from
_TRIES, _LESS = 3, 0.8  # further plans, with so much of the memory that could not be had

Found = TypeVar("Found")


def first_finds(channel: SideChannel, find: Callable[[], Found], *, rank: int = 0) -> Found:
    """Returns what one rank finds, rank 0 if no other is named; raises on all ranks if it fails. Collective."""
    answer: tuple[str, Found | None] = ("", None)
    error: Exception | None = None
    if channel.rank == rank:
        try:
            answer = ("", find())
        except Exception as caught:  # told to all ranks, or they would wait
            add_hint(caught)
            error, answer = caught, (f"{type(caught).__name__}: {caught}", None)
    told: list[tuple[str, Any]] = [answer]
    dist.broadcast_object_list(told, src=rank, group=channel.group)
    if error is not None:
        raise error
    reason, found = told[0]
    if reason:
        raise RuntimeError(f"rank {rank} could not plan the pipeline: {reason}")
    return found


def plan_with_room(
    plan_for: Callable[[Cluster], PipelinePlan],
    model: ModelCost,
    cluster: Cluster,
    *,
    device: torch.device,
    channel: SideChannel,
) -> tuple[PipelinePlan, Cluster]:
    """Returns rank 0's plan, and the cluster that it was made for; on accelerators one whose memory all ranks have got.

    Collective.

    Args:
        plan_for: makes a plan, or raises.
        model: costs by layer.
        cluster: with the memory that ranks may use.
        device: of this rank.
        channel: of all ranks.

    Raises:
        ValueError: no plan is possible.
        RuntimeError: the same, on ranks other than 0; or a rank does not get the memory of any plan, on all ranks.
    """
    on = device_of(device)
    if not on.asynchronous:
        return first_finds(channel, lambda: plan_for(cluster)), cluster
    budget, ranks, lacking = cluster, len(cluster.devices), ""

    def found() -> tuple[PipelinePlan, Cluster]:
        try:
            return with_room(plan_for, model, budget)
        except ValueError as error:
            raise ValueError(f"{error}{lacking and f'; with less memory than was free, because {lacking}'}") from error

    for _ in range(1 + _TRIES):
        plan, cluster = first_finds(channel, found)
        parts = zip(held_bytes(plan, model, ranks), beside_bytes(plan, model, ranks), strict=True)
        peaks = [held + beside for held, beside in parts]
        held, problem = _allocated(device, peaks[channel.rank])
        said: list[str] = channel.all_gather_object(problem)  # all hold theirs now: some may share a device
        del held
        on.empty_cache()
        short = [rank for rank in range(ranks) if said[rank]]
        if not short:
            return plan, cluster
        memory = [one.mem_bytes for one in budget.devices]
        for rank in short:
            memory[rank] = min(memory[rank], _LESS * peaks[rank])
        budget, name = override_cluster(budget, mem_bytes=memory), cluster.devices[short[0]].name
        lacking = f"rank {short[0]} ({name}) did not get {bytes_text(peaks[short[0]])} for its part: {said[short[0]]}"
    raise RuntimeError(
        f"no plan fits these devices, of {1 + _TRIES} that took less and less: {lacking}. Is something else on the"
        " device? Give memory in cluster=, or a smaller micro_batch_size=, or use strategy='hetero_balanced'"
    )


def _allocated(device: torch.device, size_bytes: float) -> tuple[Tensor | None, str]:
    """Returns so much of the device's memory; or why it cannot be had."""
    try:
        return torch.empty(int(size_bytes), dtype=torch.uint8, device=device), ""
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None, str(error)


def agree_layout(
    loader: DataLoader,
    module: LightningModule,
    *,
    channel: SideChannel,
    leader: int,
    device: torch.device,
    to_device: Callable[[Any], Any],
    needed: bool,
) -> Layout | None:
    """Returns how the batches of a loader are cut, the same on all ranks; None: it is not known. Collective.

    Args:
        loader: the user's.
        module: whose hooks see a batch on its way to the device.
        channel: over all ranks.
        leader: the rank that reads a few samples; it holds what is outside of the layers.
        device: of this rank.
        to_device: moves a batch, with all hooks of the user.
        needed: a plan cuts them, or another one may.

    Raises:
        TypeError: they cannot be cut, but must be; on all ranks, with the way out.
    """
    causes: list[Exception] = []

    def learned() -> Layout | str:
        try:
            with nobody_notices(module, loader, device, leave=(Tensor,)):
                samples = first_samples(loader, _SAMPLES)
                return learn_layout(lambda part: to_device(loader.collate_fn(part)), samples)
        except Exception as error:
            causes.append(error)
            return f"{'' if isinstance(error, TypeError) else type(error).__name__ + ': '}{error}"

    layout = first_finds(channel, learned, rank=leader)
    if not isinstance(layout, str):
        return layout
    if not needed:
        return None
    raise TypeError(
        f"the batches of the train loader cannot be cut into micro-batches: {layout}. Or use"
        " strategy='hetero_balanced', which gives training_step the batch of a rank as it is"
    ) from (causes[0] if causes else None)
