"""Re-batched copies of a Trainer's loaders: where the Trainer stands says which parts come next (layer L)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torch.utils.data import DataLoader

from lightning_hetero import lightning_compat as compat
from lightning_hetero.data import Channel, GlobalBatchSampler, rebatched_loader, rebatched_stream
from lightning_hetero.data.batches import HandedParts
from lightning_hetero.data.stream import StreamMode

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["in_use", "loader_of_parts", "stream_of_parts"]


class _HasLoader(Protocol):
    loader: Any


Slot = TypeVar("Slot", bound=_HasLoader)


def loader_of_parts(
    trainer: Trainer, loader: DataLoader, sampler: GlobalBatchSampler, handed: HandedParts
) -> DataLoader:
    """Returns a copy of a map-style dataset's loader that reads what ``sampler`` says, and notes it in ``handed``."""
    # Agreed now, by all ranks: one of them alone may look at a batch before the epoch starts.
    sampler.set_epoch(compat.epoch_running(trainer))
    return rebatched_loader(
        loader, sampler, position=lambda: compat.upcoming_batch(trainer), on_fetch=handed.append
    )


def stream_of_parts(
    trainer: Trainer,
    loader: DataLoader,
    channel: Channel,
    *,
    mode: StreamMode,
    global_batch_size: int,
    split: Callable[[int, int, int], tuple[int, ...]],
    handed: HandedParts,
) -> DataLoader:
    """Returns a copy of a loader of an iterable dataset, see `rebatched_stream`; a resumed run goes on in its epoch."""

    def position() -> tuple[int, int]:
        done = 0 if compat.last_batch_done(trainer) else compat.batches_trained(trainer)
        return compat.epoch_running(trainer), done

    return rebatched_stream(
        loader,
        mode=mode,
        rank=channel.rank,
        world_size=channel.world_size,
        global_batch_size=global_batch_size,
        split=split,
        position=position,
        on_fetch=handed.append,
    )


def in_use(trainer: Trainer, slots: Sequence[Slot]) -> list[Slot]:
    """Returns those whose copy the Trainer reads; others were replaced by reloading. All, before it has any."""
    current = compat.train_loaders(trainer)
    return [slot for slot in slots if any(slot.loader is c for c in current)] or list(slots)
