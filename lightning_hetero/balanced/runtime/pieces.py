"""A rank's batch in pieces: gradients without DDP's hooks, and a loss that hands them to backward (layer T).

    pieces    torch.autograd.grad, not backward(): no AccumulateGrad node runs, so no hook of DDP's fires
    after     `stand_in`: a loss of the right value whose backward gives each parameter its gradient, once

so that whatever comes between the loss and the update, weight, scaler, DDP's buckets, clipping, sees one backward pass.

BatchNorm on parts of a batch: it needs more than one sample, and must not learn from a dummy.

torch raises "Expected more than 1 value per channel when training" for a batch of one sample without further
dimensions. So where a module has BatchNorm a rank gets none or at least two samples, `ShareBounds.least`, and the dummy
of a rank without samples has two.

Weights a rank's loss so that DDP's mean over ranks is the mean over the samples of the global batch.

    local loss L_r = mean over the rank's n_r samples,   DDP's gradient = (1/W) sum_r grad(w_r L_r)
    w_r = W n_r / N     =>     (1/W) sum_r W (n_r/N) grad L_r = grad of the mean over all N samples

The factor is applied to every micro-batch before its backward. A communication hook that weights the summed gradient
instead is wrong under gradient accumulation as soon as shares change inside the window, and with SyncBatchNorm
(measured: relative error 0.16 and 0.46), and it takes the hook away from the user.
Formula: LB-BSP, g = sum (x_i/X) g_i.

Not covered is what couples the samples of different ranks in forward while a rank is empty: the dummy sample counts in
SyncBatchNorm's statistics (as DDP's padding does), so use ``drop_last=True`` and ``min_samples >= 1`` there.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_hetero.checked import real
from lightning_hetero.data.batches import Part
from lightning_hetero.data.order import Channel
from lightning_hetero.measure.device import HostDevice
from lightning_hetero.shares.caps import MemoryCap, MemoryUse
from lightning_hetero.types import LossReduction


def least_samples(module: nn.Module) -> int:
    """Returns the least samples of a rank that has any: 2 with BatchNorm that is not synchronised, else 1.

    A layer that is frozen now (``eval()``) counts too: callbacks thaw layers at any time, and the rule costs next to
    nothing. Synchronised layers count the samples of all ranks.
    """
    return 2 if any(_is_local(layer) for layer in module.modules()) else 1


@contextmanager
def statistics_kept(module: nn.Module) -> Iterator[None]:
    """Inside, BatchNorm writes its running statistics into copies that are thrown away: a dummy must not count.

    Copies, because backward still refers to the tensors that forward has written.
    """
    with ExitStack() as stack:
        for layer in filter(_is_local, module.modules()):
            for name, buffer in layer.named_buffers(recurse=False):
                stack.callback(setattr, layer, name, buffer)
                setattr(layer, name, buffer.clone())
        yield


def _is_local(layer: nn.Module) -> bool:
    return isinstance(layer, _BatchNorm) and not isinstance(layer, nn.SyncBatchNorm)


def free_memory(device: HostDevice) -> None:
    """Gives back what nothing refers to any more: an error's frames may be part of a circle."""
    gc.collect()
    device.empty_cache()
    torch.clear_autocast_cache()


def cut(samples: int, most: int, least: int) -> list[int]:
    """Returns the sizes of as few and as equal pieces as have at most ``most`` samples each, and at least ``least``.

    If both cannot be, ``least`` holds.

    >>> cut(10, 4, 1), cut(5, 2, 2), cut(3, 1, 2)
    ([4, 3, 3], [3, 2], [3])
    """
    pieces = max(1, min(-(-samples // max(1, most)), samples // least))
    size, more = divmod(samples, pieces)
    return [size + (i < more) for i in range(pieces)]


# ---- gradients -------------------------------------------------------------------------------------------------


class PieceGradients:
    """Gradients of a weighted sum of losses, one loss after the other; no hooks run.

    Args:
        parameters: with respect to which.
        scale: losses are multiplied by it before backward and gradients divided by it, as a `GradScaler` does.
    """

    def __init__(self, parameters: Iterable[Tensor], *, scale: float = 1.0) -> None:
        self._parameters = list(parameters)
        self._scale = scale
        self._sums: list[Tensor | None] = [None] * len(self._parameters)

    def add(self, loss: Tensor, weight: float, grad: Tensor | None = None) -> None:
        """Adds ``weight`` times the gradient of ``loss``; frees its graph.

        Args:
            loss: of a piece.
            weight: of the piece.
            grad: gradient of whatever follows the loss with respect to it; None: 1.
        """
        if not (loss.requires_grad and self._parameters):
            return
        head = torch.ones_like(loss) if grad is None else grad.to(loss.dtype)
        head = head * (self._scale * (weight or 1.0))
        with _hooks_aside(self._parameters):
            found = torch.autograd.grad(loss, self._parameters, head, allow_unused=True)
        for i, gradient in enumerate(found):
            if gradient is None:
                continue
            if weight == 0.0:  # not by the product: 0 * NaN is NaN, e.g. a mean over no tokens
                gradient = torch.zeros_like(gradient)
            wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32)) / self._scale
            before = self._sums[i]  # never in place: autograd may hand out one tensor for several parameters
            self._sums[i] = wide if before is None else before + wide

    def gradients(self) -> dict[Tensor, Tensor]:
        """Returns the sums by parameter, in its type; without parameters that no loss has used. Forgets them."""
        sums = self._sums
        self._sums = [None] * len(sums)
        return {p: g.to(p.dtype) for p, g in zip(self._parameters, sums, strict=True) if g is not None}


@contextmanager
def _hooks_aside(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Inside, hooks that users have registered on parameters do not run: they are for whole gradients.

    `_backward_hooks` is not documented; handles of hooks refer to the same dict, so it stays and is only emptied.
    """
    hooked = [(hooks, dict(hooks)) for p in parameters if (hooks := getattr(p, "_backward_hooks", None))]
    for hooks, _ in hooked:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, kept in hooked:
            hooks.update(kept)


class _StandIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("a step done in pieces for want of memory has one backward pass only")
        factor = grad.reshape(())
        scaled: list[Tensor] = []
        while gradients:  # one by one given up: memory is what there is not
            scaled.append(gradients.pop(0) * factor)
        return None, None, *scaled


def stand_in(value: Tensor, gradients: Mapping[Tensor, Tensor]) -> Tensor:
    """Returns a loss of this value whose backward pass, possible once, gives these parameters these gradients."""
    if not gradients:
        return value
    return _StandIn.apply(value, list(gradients.values()), *gradients)  # type: ignore[no-any-return]


def leaves(loss: Tensor) -> list[Tensor]:
    """Returns the tensors to which a backward pass through ``loss`` would give a gradient."""
    found: list[Tensor] = []
    todo, seen = [loss.grad_fn], set[Any]()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            found.append(leaf)
        todo += [following for following, _ in node.next_functions]
    return found


class GradientsTaken:
    """Returns which parameters have their gradient of a backward pass that was broken off.

    Where no parameter has a gradient before the pass, those that have one afterwards have taken it. Under accumulation
    a hook on each tells; it stays from the first such pass on. Versions of gradients would not do: as views of DDP's
    buckets they have one in common.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list(parameters)
        self._handles: list[Any] = []
        self._noted: list[Tensor] | None = None

    def begin(self) -> None:
        """A backward pass is about to begin."""
        self._noted = [] if any(p.grad is not None for p in self._parameters) else None
        if self._noted is not None and not self._handles:
            trained = [p for p in self._parameters if p.requires_grad]
            self._handles = [p.register_post_accumulate_grad_hook(self._note) for p in trained]

    def _note(self, parameter: Tensor) -> None:
        if self._noted is not None:
            self._noted.append(parameter)

    def taken(self) -> set[int]:
        """Returns the ids of the parameters."""
        noted = self._noted
        return {id(p) for p in (self._parameters if noted is None else noted) if p.grad is not None}

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


# ---- what a step changes besides gradients -----------------------------------------------------------------------


def save_buffers(module: nn.Module) -> Callable[[], None]:
    """Returns what puts the module's buffers back as they are now, e.g. BatchNorm's statistics.

    Kept where they are, in one piece per dtype, so that nothing waits for a device; on the host where memory is short,
    or where they cannot be packed.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for buffer in module.buffers():
        alike.setdefault((buffer.device, buffer.dtype), []).append(buffer)
    saved = [(buffers, _copies(buffers)) for buffers in alike.values()]

    @torch.no_grad()
    def put_back() -> None:
        for buffers, values in saved:
            for buffer, value in zip(buffers, values, strict=True):
                buffer.copy_(value)

    return put_back


@torch.no_grad()
def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    try:
        packed = torch.cat([tensor.reshape(-1) for tensor in tensors]).split([tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(packed, tensors, strict=True)]
    except (RuntimeError, TypeError):
        return [tensor.to("cpu", copy=True) for tensor in tensors]


# ---- how much a step takes ---------------------------------------------------------------------------------------


class MemoryWatch:
    """Measures the memory of steps and keeps `MemoryCap.estimate` up to date, where the device reports what it uses.

    It measures only steps that teach something, because that takes time, and it resets a peak that the user may read.
    Other processes may use the device as well, so what is there is asked again whenever more samples than ever fitted.

    Args:
        device: of this rank.
        cap: what is known of its memory.
    """

    def __init__(self, device: HostDevice, cap: MemoryCap) -> None:
        self._device, self._cap = device, cap
        self._use = MemoryUse()
        self._begun, self._asked_for = False, -1
        self._base_bytes = self._limit_bytes = 0.0

    def begin(self, samples: int) -> None:
        """A step begins."""
        self._begun = self._device.asynchronous and self._use.wants(samples)
        if self._begun:
            self._device.forget_peak()
            self._base_bytes = self._device.used_bytes()

    def end(self, samples: int) -> None:
        """Its backward pass is over, and all samples have fitted at once."""
        if not self._begun:
            return
        self._begun = False
        if not (peak_bytes := self._device.peak_bytes()):
            return
        self._use.observe(samples, self._base_bytes, peak_bytes)
        if self._asked_for != self._cap.safe:
            self._asked_for = self._cap.safe
            self._limit_bytes = self._device.free_bytes() + self._device.used_bytes()
        self._cap.estimate = self._use.most(self._limit_bytes)


class LossWeight:
    """The loss factor of the current batch.

    Args:
        channel: sums the ranks' weights when ``batch_weight`` is given.
        world_size: number of ranks.
        reduction: ``"mean"`` if the user's loss is a mean over its batch, ``"sum"`` if it is a sum (then stock DDP's
            factor 1 is already right, except for a dummy batch).
        batch_weight: returns what the loss is a mean over, e.g. the number of tokens, when that is not samples.

    Attributes:
        local: what this rank's batch counts, in samples or in the user's unit.
    """

    def __init__(
        self, *, channel: Channel, world_size: int, reduction: LossReduction = "mean",
        batch_weight: Callable[[Any], float] | None = None,
    ) -> None:  # fmt: skip
        self._channel, self._world_size = channel, world_size
        self._reduction, self._batch_weight = reduction, batch_weight
        self.local = 1.0
        self._total: Callable[[], float] | None = None
        self._factor: float | None = 1.0

    def open(self, part: Part, batch: Any) -> None:
        """Takes the batch about to be trained on. With ``batch_weight`` it starts a sum that `factor` waits for."""
        self._total = None
        if self._batch_weight is None:
            self.local = float(part.samples)
            self._factor = part.weight if self._reduction == "mean" else float(part.samples > 0)
            return
        self.local = weight = real("batch_weight(batch)", self._batch_weight(batch)) if part.samples else 0.0
        self._factor = None
        self._total = self._channel.sum_async(weight)

    def open_equal(self, batch: Any) -> None:
        """Takes a batch of stock DDP's, of which every rank has an equal part; `local` says nothing without a unit."""
        alike = Part(epoch=0, step=0, samples=1, shares=(1,) * self._world_size, weight_base=float(self._world_size))
        self.open(alike, batch)

    def of_piece(self, piece: Any, samples: int, of_samples: int) -> float:
        """Returns the factor by which a piece's loss is a summand of the local loss of this rank's batch."""
        if self._batch_weight is not None and self.local > 0:
            return float(self._batch_weight(piece)) / self.local
        return 1.0 if self._reduction == "sum" and self._batch_weight is None else samples / of_samples

    @property
    def counts(self) -> bool:
        """Whether the user said what a batch counts."""
        return self._batch_weight is not None

    @property
    def waits(self) -> bool:
        """Whether `factor` would have to wait for the peers."""
        return self._factor is None

    def factor(self) -> float:
        """Returns the factor for the local loss; waits for the peers' weights if the user's unit is not samples."""
        if self._factor is None:
            assert self._total is not None
            total = self._total()
            self._factor = self._world_size * self.local / total if total > 0 else 0.0
        return self._factor
