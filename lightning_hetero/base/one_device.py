"""A fit on one device: stock DDP's, except for a global batch that was set or that a checkpoint brings (layer L)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_hetero import lightning_compat as compat
from lightning_hetero.base.arguments import SharedSettings
from lightning_hetero.base.loaders import BoundLoader, PartBinder
from lightning_hetero.data.batches import HandedParts


class OneDeviceFit:
    """What a fit on one device has of an engine: nothing, as long as stock DDP's batches will do.

    They do not if the user asked for a ``global_batch_size``, or if a checkpoint of several devices is resumed: it
    goes on with the batches it has stopped in, in the same order.

    Args:
        trainer: the running trainer.
        shared: the strategy's arguments on batches.
        strategy_name: class of the strategy, for messages.
    """

    def __init__(self, trainer: Trainer, shared: SharedSettings, strategy_name: str) -> None:
        self._trainer, self._shared, self._strategy_name = trainer, shared, strategy_name
        self._binder: _WholeBatches | None = None
        self._batch_size: int | None = None
        self._undo: Callable[[], None] = lambda: None
        if shared.global_batch_size is not None:
            self._rebatch()

    def resume(self, state: Mapping[str, Any]) -> None:
        """Takes a checkpoint's state, of any engine, before the loaders are set up; empty: stock DDP's."""
        if state.get("world_size", 1) != 1 or (state.get("applied") or {}).get("tick"):
            self._rebatch()
        if self._binder is not None:
            self._binder.resume(state)

    def process(self, loader: object) -> object:
        """Returns the train loader itself, or its copy with other batches.

        Raises:
            TypeError, ValueError: a ``global_batch_size`` was asked for, and the loader's batches cannot be changed.
        """
        if isinstance(size := getattr(loader, "batch_size", None), int):
            self._batch_size = max(size, self._batch_size or 0)
        if self._binder is None:
            return loader
        try:
            return self._binder.process(loader)
        except TypeError:
            if self._shared.global_batch_size is not None:
                raise
            return loader

    @property
    def global_batch_size(self) -> int | None:
        """Samples per batch; None before they are known, or if the loader does not say."""
        known = None if self._binder is None else self._binder.global_batch_size
        return self._batch_size if known is None else known

    def state_dict(self) -> dict[str, Any]:
        """Returns what a run on several devices needs to keep the global batch; empty if nobody knows it."""
        if self._binder is not None and self._binder.primary is not None:
            return self._binder.state_dict()
        size = self._batch_size
        return {} if size is None else {"world_size": 1, "global_batch_size": size, "batch_size": size}

    def close(self) -> None:
        """Ends the fit."""
        self._undo()

    def _rebatch(self) -> None:
        if self._binder is None:
            self._binder = _WholeBatches(self._trainer, self._shared, self._strategy_name)
            self._undo = compat.keep_train_sampler(self._trainer)


class _Alone:
    """A `Channel` of one rank."""

    rank, world_size = 0, 1

    def all_gather_object(self, value: object) -> list:
        return [value]

    def all_gather_row(self, row: Sequence[float]) -> Callable[[], list[list[float]]]:
        return lambda: [list(row)]

    def broadcast_indices(self, indices: Sequence[int] | None) -> list[int]:
        return list(indices or ())

    def sum_async(self, value: float) -> Callable[[], float]:
        return lambda: value


class _WholeBatches(PartBinder[BoundLoader]):
    """Copies whose batches are whole global batches; no note is needed of which part each of them is."""

    def __init__(self, trainer: Trainer, shared: SharedSettings, strategy_name: str) -> None:
        super().__init__(trainer, _Alone(), strategy_name=strategy_name, shared=shared, stream="shared")

    def process(self, loader: object) -> DataLoader:
        loader, spec, _ = self._inspect(loader)
        if spec.kind == "stream":
            full = self.orders.batch_of_all(spec)
            bound = BoundLoader(spec=spec, full=full, order=None, handed=HandedParts(maxlen=0))
            return self._read_stream(bound, loader, "shared")
        order = self.orders.order(loader, spec, len(self._bound))
        if not self._bound:
            order = self.orders.continued(order)
        self.orders.check_position(order.global_batch_size)
        full = order.global_batch_size
        bound = BoundLoader(spec=spec, full=full, order=order, handed=HandedParts(maxlen=0))
        return self._read_parts(bound, loader)

    def bind(self) -> None:
        """Nothing depends on which loaders are in use."""

    def split(self, bound: BoundLoader, epoch: int, step: int, total: int) -> tuple[int, ...]:
        return (total,)
