"""Runs ``training_step`` on pieces of a batch, halved until they fit this rank's memory (layer L).

What a step done in pieces logs: collected from its pieces, logged once as the whole batch would.

Once, because a value logged with ``sync_dist=True`` is exchanged with the peers, which log once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from lightning_hetero import lightning_compat as compat
from lightning_hetero.balanced.runtime.pieces import cut, free_memory, least_samples, save_buffers
from lightning_hetero.data.copies import users_own
from lightning_hetero.data.layouts import Layout, first_samples, learn_layout
from lightning_hetero.data.micro_batches import split_batch
from lightning_hetero.measure.device import HostDevice, is_out_of_memory, save_random_states
from lightning_hetero.shares.caps import MemoryCap

_Key = tuple[str, str, int]  # hook, name, and how often the same was logged in a piece before


@dataclass(slots=True)
class _Logged:
    """The values logged under one key, and what each counts in a mean."""

    log: Callable[..., None]
    options: dict[str, Any]
    values: list[Any] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)


class PieceLogs:
    """Stands between ``self.log`` in the pieces of one step and Lightning.

    Args:
        trainer: the running trainer.
        constant: see `compat.weigh_logs`.
    """

    def __init__(self, trainer: Trainer, constant: Callable[[int], bool]) -> None:
        self._trainer, self._constant = trainer, constant
        self._piece: dict[_Key, tuple[Any, Any, float, dict[str, Any]]] = {}
        self._step: dict[_Key, _Logged] = {}
        self._whole = False

    @contextmanager
    def collecting(self, piece: Any, samples: int | None) -> Iterator[None]:
        """Inside, what is logged is noted for this piece of so many samples; it counts from `keep` on.

        Args:
            piece: of the batch.
            samples: in it; None: it is the whole batch, and what is logged is not changed.
        """
        self._piece, self._whole = {}, samples is None
        if compat.results_of(self._trainer) is None:
            yield
            return
        undo = compat.divert_logs(self._trainer, self._take)
        try:
            with nullcontext() if samples is None else compat.as_batch(self._trainer, piece, samples):
                yield
        finally:
            undo()

    def _take(self, log: Callable[..., None], fx: str, name: str, value: Any, **options: Any) -> None:
        size = options.get("batch_size")
        if self._whole:
            value, size = value.clone() if isinstance(value, Tensor) else value, math.nan
        elif size is None or self._constant(size):
            mean = isinstance(value, Tensor) and compat.logged_reduction(fx, name, options) == "mean"
            size = compat.size_of_batch(self._trainer, required=mean and options["on_epoch"])
        call = sum(known[:2] == (fx, name) for known in self._piece)
        value = value.detach() if isinstance(value, Tensor) else value
        self._piece[fx, name, call] = log, value, float(size), options

    def keep(self) -> None:
        """The piece is done."""
        for key, (log, value, size, options) in self._piece.items():
            logged = self._step.setdefault(key, _Logged(log, options))
            logged.values.append(value)
            logged.sizes.append(size)
        self._piece = {}

    def publish(self) -> None:
        """Logs what was kept."""
        for (fx, name, _), logged in self._step.items():
            if math.isnan(total := math.fsum(logged.sizes)):
                logged.log(fx, name, logged.values[0], **logged.options)
                continue
            size = int(total) if total.is_integer() else total
            logged.log(fx, name, _combined(fx, name, logged), **{**logged.options, "batch_size": size})
        self._step = {}


def _combined(fx: str, name: str, logged: _Logged) -> Any:
    """Returns the whole batch's value; of a metric, which has counted all pieces, the metric itself."""
    last = logged.values[-1]
    if not isinstance(last, Tensor):
        return last
    reduction = compat.logged_reduction(fx, name, logged.options)
    values = torch.stack([v if v.is_floating_point() else v.to(torch.get_default_dtype()) for v in logged.values])
    if reduction != "mean":
        return {"sum": values.sum, "max": values.amax, "min": values.amin}[reduction](0)
    if not any(logged.sizes):
        return values.mean(0)
    counted = [(v, size) for v, size in zip(values, logged.sizes, strict=True) if size]  # 0 * NaN is NaN
    return sum(v * size for v, size in counted) / sum(size for _, size in counted)


@dataclass(slots=True)
class GuardedStep:
    """The step that runs.

    Attributes:
        original: the user's ``training_step``.
        samples: of this rank's batch; None: not counted yet.
        planned: samples of each piece, by ``max_samples``, as many pieces on every rank; 0: one that counts nothing.
        args, kwargs: of ``training_step``, whose first is the batch; none once the step is over.
        whole: whether it has computed the batch at once, and backward is not over.
        loss_gradient: of the loss that it returned, once the backward pass has come to it.
        cut_again: whether the batch is computed in pieces other than the planned ones.
        in_pieces: whether a piece runs.
        reason: why it did not fit.
    """

    original: Callable[..., Any]
    samples: int | None
    planned: Sequence[int]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    whole: bool = False
    loss_gradient: Tensor | None = None
    in_pieces: bool = False
    cut_again: bool = False
    reason: str = ""

    def run(self, piece: Any) -> Any:
        """Returns what ``training_step`` does for a piece of the batch."""
        return self.original(piece, *self.args[1:], **self.kwargs)


ToDo = tuple[Any, int, float, Callable[[], None] | None]
"""A piece, its samples, the number below which its collectives count already, and what puts back what it changes."""


class PieceRunner:
    """Runs steps in pieces, and learns how many samples fit.

    Args:
        trainer: the running trainer; with automatic optimization.
        model: as it is trained, wrapped or not.
        device: of this rank.
        cap: what is known of this rank's memory; kept up to date.

    Attributes:
        device: of this rank.
        tried: whether the step was tried without success before it was done in pieces.
        exchanged: collectives of this forward pass.
    """

    def __init__(self, trainer: Trainer, model: nn.Module, *, device: HostDevice, cap: MemoryCap) -> None:
        self.cap, self.tried, self.exchanged = cap, False, 0
        self._trainer, self._model, self.device = trainer, model, device
        self._module: LightningModule = trainer.lightning_module

    def run(
        self, step: GuardedStep, most: int, run: Callable[[Any, int, float], float | None], *,
        todo: deque[ToDo] | None = None, more: Callable[[int], bool] = bool, idle: Callable[[], None] | None = None,
    ) -> Any:  # fmt: skip
        """Runs all pieces that count, and returns the first.

        Args:
            step: the step; its samples are counted.
            most: samples of a piece; fewer where these do not fit.
            run: computes a piece of so many samples; what it keeps of a piece is kept at its end. Returns after how
                many collectives memory ran out.
            todo: pieces besides the planned ones; see `ToDo`; None: the whole batch.
            more: whether to go on, with so many pieces to do.
            idle: runs where this rank has nothing to do, and goes on; None: there are no peers, and ``run`` raises.
        """
        assert step.samples is not None
        batch, least = step.args[0], least_samples(self._module)
        if todo is None:
            planned = [size for size in step.planned if size] or [step.samples]
            parts = self.split(step, batch, planned) if len(planned) > 1 else [batch]
            todo = deque((part, size, 0.0, None) for part, size in zip(parts, planned, strict=True))
        first = todo[0][0] if todo else batch
        while more(len(todo)):
            if not todo:
                assert idle is not None
                step.in_pieces = True
                idle()
                step.in_pieces = False
                continue
            piece, size, void, put_back = todo.popleft()
            if len(smaller := cut(size, most, least)) > 1:
                parts = zip(self.split(step, piece, smaller), smaller, strict=True)
                todo.extendleft(reversed([(part, n, void, None) for part, n in parts]))
                piece, size, void, put_back = todo.popleft()
            if put_back is None and (step.cut_again or self.cap.untried(size)):
                put_back = self.save()
            step.in_pieces = True
            try:
                done = run(piece, size, void)
            except Exception as error:
                short = is_out_of_memory(error)
                if not short and step.reason:
                    give_up(step.reason, f"{type(error).__name__}: {error}", error)
                if not short or idle is not None:
                    raise
                self.check(step, error, size)
                done = 0.0
            finally:
                step.in_pieces = False
            if done is None:
                self.cap.fits(size)
                continue
            # Out of the handler, so that the error's frames are gone and with them what they hold.
            if put_back is not None:
                put_back()
            step.cut_again = True
            most = self.failed(size)
            todo.appendleft((piece, size, max(void, done), None))
        return first

    def split(self, step: GuardedStep, piece: Any, sizes: list[int]) -> list[Any]:
        try:
            return split_batch(piece, sizes, self._layout, samples=sum(sizes), owner=self._module)
        except (TypeError, ValueError) as error:
            if step.reason:
                give_up(step.reason, str(error), error)
            raise TypeError(
                "max_samples is less than a rank's part of a batch, which is computed in pieces: raise it, or lower the"
                f" batch. It cannot be cut: {error}"
            ) from error

    @cached_property
    def _layout(self) -> Layout | None:
        """How the train batches are cut; None where the module does it."""
        trainer, module = self._trainer, self._module
        if callable(getattr(module, "split_batch", None)):
            return None
        move = partial(compat.batch_to_device, trainer, move=partial(Strategy.batch_to_device, trainer.strategy))
        put_back = self.save()
        try:
            with compat.unlogged(module):
                loaders = compat.train_loaders(trainer)
                drawn = {id(copy): first_samples(users_own(copy), 4, in_use=True) for copy in loaders}

                def collate(numbers: list[int]) -> Any:
                    def batch(copy: Any) -> Any:
                        samples = drawn[id(copy)]
                        return users_own(copy).collate_fn([samples[i % len(samples)] for i in numbers])

                    return move(tree_map(batch, trainer.train_dataloader))

                return learn_layout(collate, range(4))
        finally:
            put_back()

    def trained(self) -> list[nn.Parameter]:
        return [p for p in self._module.parameters() if p.requires_grad]

    def save(self) -> Callable[[], None]:
        """Returns what puts back what a forward pass changes: buffers, random states, metrics and logged values."""
        logged = compat.save_metrics(self._module), compat.save_logs(self._trainer)
        saved = save_buffers(self._module), save_random_states(self.device), *logged

        def put_back() -> None:
            for one in saved:
                one()

        return put_back

    def failed(self, samples: int) -> int:
        """So many samples have not fitted; returns how many to try next."""
        self.tried = True
        self.cap.fails(samples)
        free_memory(self.device)
        return min(-(-samples // 2), self.cap.safe or samples)

    def check(self, step: GuardedStep, error: BaseException, samples: int) -> None:
        """Raises the error, with the reason, if smaller pieces would not help."""
        step.reason, why = reason_of(error), ""
        if isinstance(error, dist.DistError):  # of NCCL: its peers are in it, and its communicator has failed
            why = "it ran out in a collective, which this rank cannot begin again; max_samples leaves it more memory"
        elif any(isinstance(layer, nn.SyncBatchNorm) for layer in self._module.modules()):
            why = "SyncBatchNorm communicates with the other ranks in forward"
        elif self.exchanged:
            why = "training_step had already communicated with the other ranks"
        elif samples < 2 * least_samples(self._module):
            why = f"{samples} sample{'s' if samples != 1 else ''} cannot be divided any further"
        if why:
            give_up(step.reason, why, error)

    def check_reached(self, step: GuardedStep, reached: Iterable[bool]) -> None:
        """Gives up if DDP waits for a gradient that pieces do not have: one that a nested backward pass computes."""
        model = self._model
        if isinstance(model, DistributedDataParallel) and not model.find_unused_parameters and not all(reached):
            give_up(step.reason, "not all parameters are in its graph; checkpointing needs use_reentrant=False")


def reason_of(error: BaseException) -> str:
    return str(error).strip() or type(error).__name__


def give_up(text: str, why: str, cause: BaseException | None = None) -> NoReturn:
    """Raises the error of a step that cannot be done in pieces.

    Args:
        text: of the error that began it; empty: there was none.
        why: pieces do not help.
        cause: the error that is handled.
    """
    raise torch.OutOfMemoryError(f"{text}\nthe step cannot be done in pieces: {why}".lstrip()) from cause
