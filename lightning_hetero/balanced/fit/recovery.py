"""A step that does not fit this rank's memory, or exceeds its ``max_samples``, is done in pieces (layer L).

    whole      training_step, inside of what DDP wraps, runs on the batch; if memory runs out in it, what it has changed
               is put back, and it runs in pieces
    pieces     training_step runs on pieces of the batch, halved until they fit; the gradients of their losses are
               summed up, and the step goes on with a loss that stands in for the batch's

DDP sees one forward and one backward pass, and peers notice a slow step, nothing else. What cannot be done in pieces is
raised with the reason: a step in which peers take part, a single sample that does not fit, and a lack of memory in the
backward pass, whose gradients are exchanged already.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from lightning_hetero import lightning_compat as compat
from lightning_hetero.balanced.fit.piece_logs import PieceLogs
from lightning_hetero.balanced.runtime.batch_norm import least_samples, statistics_kept
from lightning_hetero.balanced.runtime.loss_weight import LossWeight
from lightning_hetero.balanced.runtime.pieces import (
    MemoryWatch,
    PieceGradients,
    cut,
    free_memory,
    save_buffers,
    save_random_states,
    stand_in,
)
from lightning_hetero.data.copies import users_own
from lightning_hetero.data.layouts import Layout, first_samples, learn_layout
from lightning_hetero.data.micro_batches import join_outputs, split_batch
from lightning_hetero.lightning_compat.patches import patched
from lightning_hetero.measure.device import HostDevice, is_out_of_memory
from lightning_hetero.shares.caps import MemoryCap

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["Recovery"]


@dataclass(slots=True)
class _Guarded:
    """The step that runs.

    Attributes:
        original: the user's ``training_step``.
        samples: of this rank's batch; None: not counted yet.
        planned: samples of each piece, by ``max_samples``, as many pieces on every rank; 0: one that counts nothing.
        whole: whether the batch was computed at once.
        cut_again: whether it is computed in pieces other than the planned ones.
        in_pieces: whether a piece runs.
        reason: why it did not fit.
    """

    original: Callable[..., Any]
    samples: int | None
    planned: Sequence[int]
    whole: bool = False
    in_pieces: bool = False
    cut_again: bool = False
    reason: str = ""


class Recovery:
    """Runs this rank's steps, in pieces if need be, and learns how many samples fit.

    Args:
        trainer: the running trainer; with automatic optimization.
        model: as it is trained, wrapped or not.
        device: of this rank.
        weight: tells what a piece counts.
        cap: what is known of this rank's memory; kept up to date.
        constant: see `compat.weigh_logs`.
    """

    def __init__(
        self,
        trainer: Trainer,
        model: nn.Module,
        *,
        device: HostDevice,
        weight: LossWeight,
        cap: MemoryCap,
        constant: Callable[[int], bool],
    ) -> None:
        self.cap = cap
        self._believed = True  # the last step was done at once, or as planned
        self._tried = False  # it was tried in vain before it was done in pieces
        self._trainer, self._model = trainer, model
        self._module: LightningModule = trainer.lightning_module
        self._device, self._weight, self._constant = device, weight, constant
        self._memory = MemoryWatch(device, cap)
        self._step: _Guarded | None = None
        self._exchanged = 0  # collectives of this forward pass
        self._learned: Mapping[str, Any] = {}
        self._warned = False

    def guarding(self, samples: int | None, planned: Sequence[int] = ()) -> AbstractContextManager[None]:
        """Inside, ``training_step`` of the module runs in the pieces that are planned, and survives a lack of memory.

        For the length of a step only: another patch of the module's, e.g. an emulated device's, stays below this one.

        Args:
            samples: of this rank's batch; None: as Lightning counts them, once memory has been short.
            planned: see `_Guarded`; fewer than two: none are.
        """
        self._step = _Guarded(self._module.training_step, samples, planned if len(planned) > 1 else ())
        return patched(self._module, "training_step", self._training_step)

    def _training_step(self, *args: Any, **kwargs: Any) -> Any:
        step, cap = self._step, self.cap
        assert step is not None
        self._believed, self._tried, self._exchanged = True, False, 0
        step.whole = False
        if step.samples is None and cap.failed is not None:
            self._count(step, args)
        samples = -1 if step.samples is None else step.samples
        most = max(step.planned, default=samples)
        if cap.exceeded_by(most):
            step.cut_again, most = True, cap.safe
            step.reason = step.reason or f"{samples} samples do not fit, as was learned before"
        if step.planned or most < samples:
            return self._in_pieces(step, args, kwargs, most)
        put_back = self._save() if cap.untried(samples) else None
        self._memory.begin(samples)
        try:
            output = step.original(*args, **kwargs)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self._check(step, error, self._count(step, args))
        else:
            step.whole = True
            return output
        # Out of the handler, so that the error's frames are gone and with them what they hold.
        if put_back is not None:
            put_back()
        step.cut_again = True
        return self._in_pieces(step, args, kwargs, self._failed(self._count(step, args)))

    def _count(self, step: _Guarded, args: tuple[Any, ...]) -> int:
        """Returns the batch's samples; not counted before they are needed, as it takes a walk through the batch."""
        if step.samples is None:
            step.samples = compat.size_of_batch(self._trainer, required=False, batch=args[0])
        return step.samples

    def _in_pieces(self, step: _Guarded, args: tuple[Any, ...], kwargs: dict[str, Any], most: int) -> Any:
        """Returns the whole batch's output, with a loss that stands in for its own.

        Args:
            step: the step.
            args, kwargs: of ``training_step``.
            most: samples of a piece; fewer where these do not fit.
        """
        total = self._count(step, args)
        least = least_samples(self._module)
        scaler = getattr(self._trainer.precision_plugin, "scaler", None)
        gradients = PieceGradients(self._trained(), scale=1.0 if scaler is None else float(scaler.get_scale()))
        logs = PieceLogs(self._trainer, self._constant)

        def run(piece: Any, size: int) -> tuple[Any, Tensor | None]:
            with logs.collecting(piece, size):
                output = step.original(piece, *args[1:], **kwargs)
            loss, weight = _loss_of(output), self._weight.of_piece(piece, size, total)
            if loss is None:
                return None, None
            gradients.add(loss, weight)
            value = loss.detach() * weight if weight else torch.zeros_like(loss)
            return apply_to_collection(_without_loss(output), Tensor, Tensor.detach), value

        done: list[tuple[Any, Tensor | None]] = []
        sizes: list[int] = []
        todo = deque([(args[0], total)])
        if planned := [size for size in step.planned if size]:
            todo = deque(zip(self._split(step, args[0], planned), planned, strict=True))
        first, empty = todo[0][0], len(step.planned) - len(planned)
        while todo:
            piece, size = todo.popleft()
            if len(smaller := cut(size, most, least)) > 1:
                todo.extendleft(reversed(list(zip(self._split(step, piece, smaller), smaller, strict=True))))
                continue
            put_back = self._save() if step.cut_again or self.cap.untried(size) else None
            step.in_pieces = True
            try:
                done.append(run(piece, size))
            except Exception as error:
                if not is_out_of_memory(error):
                    if not step.reason:
                        raise
                    _give_up(step.reason, f"{type(error).__name__}: {error}", error)
                self._check(step, error, size)
            else:
                sizes.append(size)
                logs.keep()
                self.cap.fits(size)
                continue
            finally:
                step.in_pieces = False
            if put_back is not None:
                put_back()
            step.cut_again = True
            most = self._failed(size)
            todo.appendleft((piece, size))
        for _ in range(empty):  # the peers have more pieces, in which a step may communicate
            with compat.metrics_frozen(self._module), statistics_kept(self._module), logs.collecting(first, 0):
                loss = _loss_of(step.original(first, *args[1:], **kwargs))
            if loss is not None:
                gradients.add(loss, 0.0)
        self._believed = not step.cut_again
        logs.publish()
        if self._tried:
            self._tell(step, max(step.planned, default=total))
        outputs, values = zip(*done, strict=True)
        if any(value is None for value in values):
            return None  # Lightning says what that means
        value, found = torch.stack(values).sum(0), gradients.gradients()
        self._check_reached(step, (p in found for p in self._trained()))
        rest, loss = join_outputs(outputs, sizes), stand_in(value, found)
        return loss if rest is None else {"loss": loss, **rest}

    def _split(self, step: _Guarded, piece: Any, sizes: list[int]) -> list[Any]:
        try:
            return split_batch(piece, sizes, self._layout, samples=sum(sizes), owner=self._module)
        except (TypeError, ValueError) as error:
            if step.reason:
                _give_up(step.reason, str(error), error)
            raise TypeError(
                "max_samples is less than a rank's part of a batch, which is computed in pieces: raise it, or lower the"
                f" batch. As it is, it cannot be cut: {error}"
            ) from error

    @cached_property
    def _layout(self) -> Layout | None:
        """How the train batches are cut; None where the module does it."""
        trainer, module = self._trainer, self._module
        if callable(getattr(module, "split_batch", None)):
            return None
        move = partial(compat.batch_to_device, trainer, move=partial(Strategy.batch_to_device, trainer.strategy))
        put_back = self._save()
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

    # ---- around the step --------------------------------------------------------------------------------------

    def in_backward(self, error: RuntimeError) -> None:
        """Raises what a lack of memory in the step's backward pass means; returns of any other error."""
        step = self._step
        if step is None or not is_out_of_memory(error):
            return
        samples = step.samples or 0
        self.cap.fails(samples)
        _give_up(
            _reason_of(error),
            f"it ran out in the backward pass of {samples} samples, whose gradients the peers are waiting for."
            f" max_samples={max(1, samples // 2)} for rank {self._trainer.global_rank} leaves it more memory",
            error,
        )

    def backward_over(self) -> None:
        """The step's backward pass is over, and what was computed at once has fitted."""
        step = self._step
        if step is not None and step.whole and step.samples:
            self._memory.end(step.samples)
            self.cap.fits(step.samples)
            step.whole = False

    def communicates(self) -> None:
        """Called before a collective of the user's, within the step or not.

        Raises:
            RuntimeError: of a step that is done in pieces: its peers take part once.
        """
        self._exchanged += 1
        if self._step is not None and self._step.in_pieces and (self._step.cut_again or not self._step.planned):
            raise RuntimeError(
                "training_step communicates with the other ranks (all_gather, reduce, broadcast or barrier),"
                " once per piece on this rank and once on the others; lower max_samples for this rank"
            )

    def tells_speed(self, fit: bool) -> bool:
        """Whether the last step's time says how fast this rank is; pieces do only where they are there to stay.

        Args:
            fit: whether the ranks together hold a global batch.
        """
        return self._believed or not (self._tried or fit)

    def take_learned(self) -> Mapping[str, Any]:
        """Returns and forgets what the last failure has taught, for a trace; empty: nothing new."""
        learned, self._learned = self._learned, {}
        return learned

    # ---- parts of it ------------------------------------------------------------------------------------------

    def _trained(self) -> list[nn.Parameter]:
        return [p for p in self._module.parameters() if p.requires_grad]

    def _save(self) -> Callable[[], None]:
        """Returns what puts back what a forward pass changes: buffers, random states, metrics and logged values."""
        saved = [
            save_buffers(self._module),
            save_random_states(self._device),
            compat.save_metrics(self._module),
            compat.save_logs(self._trainer),
        ]

        def put_back() -> None:
            for one in saved:
                one()

        return put_back

    def _failed(self, samples: int) -> int:
        """So many samples have not fitted; returns how many to try next."""
        self._tried = True
        self.cap.fails(samples)
        free_memory(self._device)
        return min(-(-samples // 2), self.cap.safe or samples)

    def _check(self, step: _Guarded, error: BaseException, samples: int) -> None:
        """Raises the error, with the reason, if smaller pieces would not help."""
        step.reason, why = _reason_of(error), ""
        if isinstance(error, dist.DistError):  # of NCCL: its peers are in it, and its communicator has failed
            why = "it ran out in a collective, which this rank cannot begin again; max_samples leaves it more memory"
        elif any(isinstance(layer, nn.SyncBatchNorm) for layer in self._module.modules()):
            why = "SyncBatchNorm communicates with the other ranks in forward"
        elif self._exchanged:
            why = "training_step had already communicated with the other ranks"
        elif samples < 2 * least_samples(self._module):
            why = f"{samples} sample{'s' if samples != 1 else ''} cannot be divided any further"
        if why:
            _give_up(step.reason, why, error)

    def _check_reached(self, step: _Guarded, reached: Iterable[bool]) -> None:
        """Gives up if DDP waits for a gradient that pieces do not have: one that a nested backward pass computes."""
        model = self._model
        if isinstance(model, DistributedDataParallel) and not model.find_unused_parameters and not all(reached):
            _give_up(step.reason, "not all parameters are in its graph; checkpointing needs use_reentrant=False")

    def _tell(self, step: _Guarded, samples: int) -> None:
        """Keeps what was learned, and says so once in a fit, on this rank, whichever it is."""
        cap = self.cap
        self._learned = {"failed": samples, "most": cap.most}
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"rank {self._trainer.global_rank} ran out of memory with {samples} samples"
            f" ({step.reason.splitlines()[0]}). Nothing is lost: the step was done in pieces, of which"
            f" {cap.safe} samples fit; this rank goes on with at most {cap.most}",
            stacklevel=2,
        )


def _reason_of(error: BaseException) -> str:
    return str(error).strip() or type(error).__name__


def _give_up(text: str, why: str, cause: BaseException | None = None) -> NoReturn:
    raise torch.OutOfMemoryError(f"{text}\nthe step cannot be done in pieces: {why}".lstrip()) from cause


def _loss_of(output: Any) -> Tensor | None:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    return loss if isinstance(loss, Tensor) else None


def _without_loss(output: Any) -> Any:
    return {k: v for k, v in output.items() if k != "loss"} if isinstance(output, Mapping) else None
