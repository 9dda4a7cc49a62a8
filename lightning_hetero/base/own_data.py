"""Whether ranks have their own train data, which no engine may move to another rank (layer L)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, IterableDataset

from lightning_hetero import lightning_compat as compat
from lightning_hetero.data.fingerprints import Print, differs, fingerprints
from lightning_hetero.data.order import Channel
from lightning_hetero.data.samplers import first_drawn

_Data = tuple[int, list[Any], list[Print]]  # samples of a dataset, and what some of them look like


def own_data_in(loaders: Sequence[Any], given: bool | None, trainer: Trainer, channel: Channel) -> str | None:
    """Returns why samples cannot be moved between ranks, the same on all; None: they can. A collective.

    Args:
        loaders: those that are trained on; of iterable datasets nothing is read.
        given: the strategy's argument ``own_data``.
        trainer: the running trainer.
        channel: of all ranks.
    """
    mine = [_data_of(loader) for loader in loaders] if given is None else []
    everyone: list[tuple[bool | None, list[_Data]]] = channel.all_gather_object((given, mine))
    told = [said for said, _ in everyone]
    if True in told and loaders:
        return "with own_data=True the train data of each rank stay there"
    if False in told:
        return None
    for loader, of_ranks in zip(loaders, zip(*(data for _, data in everyone), strict=False), strict=False):
        if found := _difference(loader, of_ranks, channel):
            return f"the train data differ between ranks: {found}, {_remedy(trainer)}"
    return None


def indexed(loaders: Sequence[DataLoader]) -> list[DataLoader]:
    """Returns the loaders of map-style datasets."""
    return [loader for loader in loaders if not isinstance(loader.dataset, IterableDataset)]


def check_own_batches(loader: DataLoader, why: str, trainer: Trainer, channel: Channel) -> None:
    """Compares the numbers of batches of the ranks' own data; a collective.

    Args:
        loader: as stock DDP reads it.
        why: data stay with their rank.
        trainer, channel: as above.

    Raises:
        ValueError: they differ, with which stock DDP waits without end.
    """
    limit = trainer.limit_train_batches
    mine = min(len(loader), limit) if isinstance(limit, int) else int(len(loader) * limit)
    batches = channel.all_gather_object(mine)
    if len(set(batches)) > 1:
        raise ValueError(
            f"{why}. These are {dict(enumerate(batches))} batches, and the rank with the fewest would end its epoch"
            f" alone: pass Trainer(limit_train_batches={min(batches)})"
        )


def _data_of(loader: DataLoader) -> _Data:
    if isinstance(loader.dataset, IterableDataset):
        return 0, [], []
    size = len(loader.dataset) if hasattr(loader.dataset, "__len__") else 0  # type: ignore[arg-type]
    indices: list[Any] = sorted({0, size // 2, size - 1}) if size else []
    prints = fingerprints(loader, indices)
    if not any(prints):  # perhaps it is no dataset of whole numbers
        indices = first_drawn(loader)
        prints = fingerprints(loader, indices)
    return size, indices, prints


def _difference(loader: DataLoader, of_ranks: Sequence[_Data], channel: Channel) -> str | None:
    sizes = [size for size, _, _ in of_ranks]
    if len(set(sizes)) > 1:
        return f"they have {dict(enumerate(sizes))} samples by rank"
    indices, prints = of_ranks[0][1], [p for _, _, p in of_ranks]
    if any(found != indices for _, found, _ in of_ranks):  # other keys on other ranks
        prints = channel.all_gather_object(fingerprints(loader, indices))
    if differs(prints) is None:
        return None
    other = differs(prints, channel.all_gather_object(fingerprints(loader, indices, again=True)))
    if other is None:
        return None
    rank, number, place = other
    return f"dataset[{indices[number]!r}] of rank {rank} is another sample than rank 0's ({place})"


def _remedy(trainer: Trainer) -> str:
    if not compat.uses_distributed_sampler(trainer):
        return "so they stay with their rank. If they are the same, own_data=False says so"
    return (
        "and the DistributedSampler deals out indices, so that some samples are trained twice and others never. Give"
        " every rank the same files in the same order (sort the listing); or pass"
        " Trainer(use_distributed_sampler=False) if each rank has its own data. If they are the same, own_data=False"
        " says so"
    )
