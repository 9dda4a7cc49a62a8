"""From the user's train loader to the order of an epoch, the same on all ranks and free of shares (layer L).

Whether ranks have their own train data, which no engine may move to another rank.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence, Sized
from typing import Any, Literal

from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_hetero import lightning_compat as compat
from lightning_hetero.data.fingerprints import Print, differs, fingerprints
from lightning_hetero.data.loader import IndivisibleError, LoaderSpec, base_sampler, batch_source, inspect_loader
from lightning_hetero.data.order import Channel, ContinuedOrder, EpochOrder, SamplerOrder, ShuffledOrder
from lightning_hetero.data.pooled import PooledBatches, PooledRanks
from lightning_hetero.data.samplers import first_drawn, splits_by_rank
from lightning_hetero.data.stream import StreamMode


class OrderFinder:
    """Compares the ranks' train loaders and finds the order of each one's epochs: stock DDP's wherever it has one.

    Args:
        trainer: the running trainer.
        channel: blocking exchanges at set-up and epoch starts.
        strategy_name: class of the strategy, for messages.
        global_batch_size: samples of all ranks per batch; ``None``: the loader's ``batch_size`` x devices.
        batch_sampler: what to do with a custom batch sampler.
        stream: what an `IterableDataset` is; ``None``: the strategy takes none, or was not told.

    Attributes:
        resume: the checkpoint's state of a previous run; set before the loaders are processed, else empty.
    """

    def __init__(
        self, trainer: Trainer, channel: Channel, *, strategy_name: str, global_batch_size: int | None,
        batch_sampler: Literal["refuse", "pool"], stream: StreamMode | None,
    ) -> None:  # fmt: skip
        self.resume: Mapping[str, Any] = {}
        self._trainer, self._channel, self._strategy_name = trainer, channel, strategy_name
        self._global_batch_size, self._batch_sampler, self._stream = global_batch_size, batch_sampler, stream

    def inspect(self, loader: object) -> LoaderSpec:
        """Returns what a train loader is. Whether the engine takes streams is not asked here.

        Raises:
            IndivisibleError: its batches cannot be divided by speed.
        """
        if compat.uses_dataloader_iter(self._trainer):
            raise IndivisibleError(
                "training_step(dataloader_iter) fetches its own batches, so they cannot be divided by speed: take"
                " `batch` instead"
            )
        spec = inspect_loader(loader)
        assert isinstance(loader, DataLoader)
        if spec.kind == "batch_sampler" and self._batch_sampler == "refuse":
            raise IndivisibleError(
                f"the train loader has a custom batch sampler ({type(batch_source(loader)).__name__}), and dividing"
                " its batches by speed could break what it promises about a batch (equal lengths, class balance). If it"
                f" promises nothing that matters, pass {self._strategy_name}(batch_sampler='pool'): one batch per"
                " device is drawn, the pool is divided"
            )
        drawn = batch_source(loader) if spec.kind == "batch_sampler" else base_sampler(loader)
        if spec.kind != "stream" and not isinstance(drawn, Sized):
            raise IndivisibleError(
                f"the sampler {type(drawn).__name__} of the train loader has no length, so its epochs cannot be divided"
                " by speed: give it a __len__"
            )
        return spec

    def agree(self, spec: LoaderSpec) -> int:
        """Compares the ranks' loaders; returns the furthest read-ahead.

        Raises:
            ValueError: the ranks' loaders differ; names in what, and each rank's value.
        """
        specs: list[LoaderSpec] = self._channel.all_gather_object(spec)
        names = ["kind", "samples", "batch_size", "drop_last"]
        if spec.kind == "stream" and self._stream == "shared":
            names.append("workers")
        for name in names:
            values = {rank: getattr(s, name) for rank, s in enumerate(specs)}
            if len(set(values.values())) > 1:
                raise ValueError(
                    f"the train loaders differ between ranks in {name}: {values}. Give every rank the same loader;"
                    " the strategy divides each global batch by measured speed itself"
                )
        return max(s.read_ahead for s in specs)

    def settle(self, global_batch_size: int) -> None:
        """Fixes the size of global batches, as if it had been asked for."""
        self._global_batch_size = global_batch_size

    def batch_of_all(self, spec: LoaderSpec) -> int:
        """Samples of a full global batch: as asked, as in the checkpoint of another world size, or as DDP's."""
        world = self._channel.world_size
        if (asked := self._global_batch_size) is not None:
            if spec.samples is not None and asked > spec.samples:
                rank_zero_warn(
                    f"global_batch_size={asked} is more than the {spec.samples} samples of the train loader: an epoch"
                    " is one step"
                )
            return asked
        assert spec.batch_size is not None
        stored = self.resume.get("global_batch_size")
        if stored and self.resume.get("world_size") != world and self.resume.get("batch_size") == spec.batch_size:
            if stored != spec.batch_size * world:
                rank_zero_info(
                    f"keeping the checkpoint's global batch of {stored} samples on {world} devices instead of"
                    f" {spec.batch_size} x {world}; pass global_batch_size={spec.batch_size * world} to change it"
                )
            return int(stored)
        return spec.batch_size * world

    def order(self, loader: DataLoader, spec: LoaderSpec, index: int) -> EpochOrder:
        """Returns the order of a map-style loader's epochs.

        Args:
            loader: the user's loader.
            spec: what it is; its ``kind`` is not ``stream``.
            index: number of the loader among the train loaders, for its state in a checkpoint.

        Raises:
            ValueError: a ``global_batch_size`` where the user's samplers decide it.
        """
        trainer, channel = self._trainer, self._channel
        seed = int(os.environ.get("PL_GLOBAL_SEED", 0))  # what Lightning seeds its DistributedSampler with
        if spec.kind == "batch_sampler":
            return self._pooled_batches(loader, seed)
        sampler = base_sampler(loader)
        assert spec.batch_size is not None
        sizes: dict[str, Any] = {"global_batch_size": self.batch_of_all(spec), "drop_last": spec.drop_last}
        if spec.kind == "distributed" and (sampler.num_replicas, sampler.rank) == (channel.world_size, channel.rank):
            drops = sampler.drop_last and len(sampler.dataset) % channel.world_size
            if not drops:  # which samples it drops is its choice
                return ShuffledOrder(sampler, **sizes)
        if spec.kind.startswith("distributed") or not compat.uses_distributed_sampler(trainer):
            if self._global_batch_size not in (None, spec.batch_size * channel.world_size):
                raise ValueError(
                    f"global_batch_size={self._global_batch_size} cannot be combined with samplers that divide"
                    " the data themselves (use_distributed_sampler=False); set the loader's batch_size instead"
                )
            return PooledRanks(
                sampler, batch_size=spec.batch_size, drop_last=spec.drop_last, seed=seed, channel=channel
            )
        if spec.kind == "plain":
            # Like stock DDP, which shuffles every train loader except when overfitting.
            alike: dict[str, Any] = {"num_replicas": channel.world_size, "rank": channel.rank, "seed": seed}
            sampler = DistributedSampler(loader.dataset, shuffle=not compat.overfits(trainer), **alike)
            return ShuffledOrder(sampler, **sizes)
        order = SamplerOrder(sampler, seed=seed, channel=channel, **sizes)
        states = self.resume.get("orders", [])
        if len(states) > index:
            order.load_state_dict(states[index])
        return order

    def continued(self, order: EpochOrder) -> EpochOrder:
        """Returns the order with the rest of an epoch that another engine has begun in another sequence, if any."""
        applied = self.resume.get("applied") or {}
        spans = [tuple(span) for span in applied.get("spans", [])]
        if not applied.get("tick") or (len(spans) == 1 and spans[0][0] == 0 and self._at_an_end(order, applied)):
            return order
        return ContinuedOrder(order, epoch=applied["epoch"], step=applied["tick"], spans=spans)

    def applied(self, order: EpochOrder | None) -> dict[str, Any]:
        """Returns what was trained of an epoch that another engine had begun; empty if the order is as always."""
        epoch, step = compat.epoch_running(self._trainer), compat.batches_trained(self._trainer)
        if not isinstance(order, ContinuedOrder) or order.epoch != epoch or not order.step <= step < len(order):
            return {}
        return {"epoch": epoch, "tick": step, "spans": [list(span) for span in order.trained(step)]}

    @staticmethod
    def _at_an_end(order: EpochOrder, applied: Mapping[str, Any]) -> bool:
        """Whether exactly the first ``tick`` global batches were applied, so that the order is as always."""
        samples = order.num_samples
        if samples is None:
            return False
        return applied["spans"][0][1] == min(applied["tick"] * order.global_batch_size, samples)

    def _pooled_batches(self, loader: DataLoader, seed: int) -> EpochOrder:
        source = batch_source(loader)
        if self._global_batch_size is not None:
            raise ValueError(
                f"global_batch_size={self._global_batch_size} cannot be combined with a batch sampler, which"
                " decides the size itself"
            )
        assert source is not None
        by_rank = splits_by_rank(source, self._channel.world_size)
        if by_rank or not compat.uses_distributed_sampler(self._trainer):
            return PooledRanks(source, batch_size=None, drop_last=False, seed=seed, channel=self._channel)
        return PooledBatches(source, seed=seed, channel=self._channel)

    def check_position(self, total: int) -> None:
        """Checks that global batches of ``total`` samples can go on where the checkpoint stopped.

        Raises:
            ValueError: it stopped in the middle of an epoch of batches of another size.
        """
        stored = self.resume.get("global_batch_size")
        done = compat.batches_trained(self._trainer)
        if stored and stored != total and done and not compat.last_batch_done(self._trainer):
            raise ValueError(
                f"the checkpoint stopped after {done} batches of {stored} samples in the middle of an epoch and cannot"
                f" be continued with batches of {total}; pass global_batch_size={stored}, or resume from a checkpoint"
                " made at the end of an epoch"
            )


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
