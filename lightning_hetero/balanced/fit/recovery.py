"""A step that does not fit this rank's memory, or exceeds its ``max_samples``, is done in pieces (layer L).

    planned    training_step, inside of what DDP wraps, runs on pieces of the batch: on as many on every rank, so that
               they meet; the last one's graph is left to the step's backward pass, which DDP's exchange accompanies
    forward    training_step, inside of what DDP wraps, runs out of memory: what it has changed is put back, it runs on
               pieces of the batch, the gradients of their losses are summed up, and the step goes on with a loss that
               stands in for the batch's
    backward   DDP has some parameters' gradients already, each that of the whole batch: the others are computed in
               pieces, and a second backward pass gives them to DDP

Peers notice a slow step, nothing else. What cannot be done again in pieces, because peers take part in it or because a
single sample does not fit, is raised: see `_give_up`.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_hetero import lightning_compat as compat
from lightning_hetero.balanced.fit.piece_layout import layout_of
from lightning_hetero.balanced.fit.piece_logs import PieceLogs
from lightning_hetero.balanced.runtime.batch_norm import least_samples, statistics_kept
from lightning_hetero.balanced.runtime.loss_weight import LossWeight
from lightning_hetero.balanced.runtime.memory import MemoryWatch
from lightning_hetero.balanced.runtime.pieces import (
    GradientsTaken,
    GradientSum,
    cut,
    free_memory,
    leaves,
    save_buffers,
    save_random_states,
    stand_in,
)
from lightning_hetero.data.layouts import Layout
from lightning_hetero.data.micro_batches import join_outputs, split_batch
from lightning_hetero.lightning_compat.patches import patched
from lightning_hetero.measure.device import Device, is_out_of_memory
from lightning_hetero.shares.caps import MemoryCap

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

__all__ = ["Recovery"]

_Done = Callable[[Any, int, Callable[[], Any], bool], None]
"""Takes a piece, its samples, what runs the step on it, and whether its graph may be kept for the backward pass."""


class Recovery:
    """Runs this rank's steps, in pieces if need be, and learns how many samples fit.

    Args:
        trainer: the running trainer; with automatic optimization.
        model: as it is trained, wrapped or not.
        device: of this rank.
        weight: tells what a piece counts.
        cap: what is known of this rank's memory; kept up to date.
        waiting: module types that communicate inside forward or backward.
        constant: see `compat.weigh_logs`.

    Attributes:
        believed: whether the last step was done at once, so that its time says how fast this rank is.
        tried: whether it was tried in vain before it was done in pieces.
    """

    def __init__(
        self,
        trainer: Trainer,
        model: nn.Module,
        *,
        device: Device,
        weight: LossWeight,
        cap: MemoryCap,
        waiting: tuple[type[nn.Module], ...],
        constant: Callable[[int], bool],
    ) -> None:
        self.cap = cap
        self.believed = True
        self.tried = False
        self._learned: Mapping[str, Any] = {}
        self._trainer, self._model = trainer, model
        self._module: LightningModule = trainer.lightning_module
        self._device, self._weight, self._constant = device, weight, constant
        self._memory = MemoryWatch(device, cap)
        self._communicates = next((type(m).__name__ for m in self._module.modules() if isinstance(m, waiting)), None)
        self._parameters = list(self._module.parameters())
        self._taken = GradientsTaken(self._parameters)
        self._least = 1
        self._samples = 0
        self._planned: Sequence[int] = ()
        self._arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None  # of the forward pass that fitted
        self._arrived: Tensor | None = None  # gradient of the user's loss
        self._exchanged = 0  # collectives of this forward pass
        self._in_pieces = False
        self._backwards = 0
        self._told = False
        self._original: Callable[..., Any] | None = None
        self._reason = ""  # of the last failure

    def close(self) -> None:
        self._taken.close()

    # ---- forward ----------------------------------------------------------------------------------------------

    def guarding(self, samples: int | None, planned: Sequence[int] = ()) -> AbstractContextManager[None]:
        """Inside, ``training_step`` of the module runs in the pieces that are planned, and survives a lack of memory.

        For the length of a step only: another patch of the module's, e.g. an emulated device's, stays below this one.

        Args:
            samples: of this rank's batch; None: as Lightning counts them, once memory has been short.
            planned: samples of each piece, 0: one that counts nothing, see `piece_sizes`; fewer than two: none are.
        """
        self._original = self._module.training_step
        self._samples = -1 if samples is None else samples
        self._planned = planned if len(planned) > 1 else ()
        return patched(self._module, "training_step", self._step)

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._original is not None
        self.believed, self.tried = True, False
        self._arguments, self._arrived, self._exchanged = None, None, 0
        cap = self.cap
        if cap.failed is not None:
            self._count(args)
        if self._planned:
            output = self._by_pieces(args, kwargs, cap.safe if cap.exceeded_by(max(self._planned)) else self._samples)
            if self.tried:
                self._tell(max(self._planned))
            return output
        if cap.exceeded_by(self._samples):
            self._reason = self._reason or f"{self._samples} samples do not fit, as an earlier run has learned"
            return self._by_pieces(args, kwargs, cap.safe)
        put_back = self._save() if cap.untried(self._samples) else None
        self._memory.begin(self._samples)
        try:
            output = self._original(*args, **kwargs)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self._check(error, self._count(args))
        else:
            self._arguments = (args, kwargs)
            loss = _loss_of(output)
            if isinstance(loss, Tensor) and loss.requires_grad:
                loss.register_hook(self._arrive)
            return output
        # Out of the handler, so that the error's frames are gone and with them what they hold.
        if put_back is not None:
            put_back()
        output = self._by_pieces(args, kwargs, self._failed(self._samples))
        self._tell(self._samples)
        return output

    def _count(self, args: tuple[Any, ...]) -> int:
        """Returns the batch's samples; not counted before they are needed, as it takes a walk through the batch."""
        if self._samples < 0:
            self._samples = compat.size_of_batch(self._trainer, required=False, batch=args[0])
        return self._samples

    def _arrive(self, grad: Tensor) -> None:
        self._arrived = grad

    def _by_pieces(self, args: tuple[Any, ...], kwargs: dict[str, Any], most: int) -> Any:
        """Returns the whole batch's output, with a loss that stands in for its own."""
        scaler = getattr(self._trainer.precision_plugin, "scaler", None)
        gradients = GradientSum(self._trained(), scale=1.0 if scaler is None else float(scaler.get_scale()))
        logs = PieceLogs(self._trainer, self._constant)
        outputs: list[Any] = []
        sizes: list[int] = []
        values: list[Tensor | None] = []
        kept: list[Tensor] = []

        def done(piece: Any, size: int, run: Callable[[], Any], last: bool) -> None:
            with logs.collecting(piece, size):
                output = run()
            loss = _loss_of(output)
            weight = self._weight.of_piece(piece, size, self._samples) if size else 0.0
            if last and loss is not None and weight:
                kept.append(loss if weight == 1.0 else loss * weight)
            elif loss is not None:
                gradients.add(loss, weight)
            if not size:  # it counts nothing
                return
            values.append(None if loss is None else loss.detach() * weight if weight else torch.zeros_like(loss))
            outputs.append(_detached(_without_loss(output)))
            sizes.append(size)
            logs.keep()

        self._each_piece(args, kwargs, most, done)
        logs.publish()
        if any(value is None for value in values):
            return None  # Lightning says what that means
        value, found = torch.stack(values).sum(0), gradients.gradients()  # type: ignore[arg-type]
        if kept:  # its part of the value and of the gradients comes by its own graph
            loss = stand_in(value - kept[0].detach(), found) + kept[0]
        else:
            self._check_reached(p in found for p in self._trained())
            loss = stand_in(value, found)
        return _with_loss(join_outputs(outputs, sizes), loss)

    def _each_piece(self, args: tuple[Any, ...], kwargs: dict[str, Any], most: int, done: _Done) -> None:
        """Runs the step on pieces as planned or of ``most`` samples at most, smaller ones where these do not fit."""
        assert self._original is not None
        planned = [size for size in self._planned if size]
        self._in_pieces = not planned
        self._least = least_samples(self._module)
        original = self._original
        todo = deque([(args[0], self._samples)])
        if planned:
            todo = deque(zip(self._split(args[0], planned), planned, strict=True))
        first, empty = todo[0][0], len(self._planned) - len(planned)
        try:
            while todo:
                piece, size = todo.popleft()
                if len(sizes := cut(size, most, self._least)) > 1:
                    self._in_pieces = True
                    todo.extendleft(reversed(list(zip(self._split(piece, sizes), sizes, strict=True))))
                    continue
                untried = self.cap.untried(size)
                put_back = self._save() if self._in_pieces or untried else None
                last = bool(planned) and not (todo or empty or untried or self._in_pieces)
                try:
                    done(piece, size, lambda piece=piece: original(piece, *args[1:], **kwargs), last)
                except Exception as error:
                    if not is_out_of_memory(error):
                        if planned and not self._in_pieces:
                            raise
                        _give_up(self._reason, f"{type(error).__name__}: {error}", error)
                    self._check(error, size)
                else:
                    self.cap.fits(size)
                    continue
                if put_back is not None:
                    put_back()
                most = self._failed(size)
                todo.appendleft((piece, size))
            for _ in range(empty):  # peers have more pieces, in which a step may communicate
                with compat.metrics_frozen(self._module), statistics_kept(self._module):
                    done(first, 0, lambda: original(first, *args[1:], **kwargs), False)
        finally:
            self.believed &= not self._in_pieces
            self._in_pieces = False

    def _split(self, piece: Any, sizes: list[int]) -> list[Any]:
        try:
            return split_batch(piece, sizes, self._layout, samples=sum(sizes), owner=self._module)
        except (TypeError, ValueError) as error:
            if self._reason:
                _give_up(self._reason, str(error), error)
            raise TypeError(
                "max_samples is less than a rank's part of a batch, which is computed in pieces: raise it, or lower the"
                f" batch. As it is, it cannot be cut: {error}"
            ) from error

    # ---- backward ---------------------------------------------------------------------------------------------

    def backward(
        self,
        loss: Tensor,
        run: Callable[[Tensor], None],
        *,
        holders: Sequence[Tensor],
        ended: Callable[[Tensor], None],
    ) -> None:
        """Runs the backward pass of a step, to its end.

        Args:
            loss: to be differentiated.
            run: differentiates it.
            holders: tensors besides ``loss`` that hold the graph.
            ended: arranges on another loss what happens at the end of its backward pass.
        """
        whole = self._arguments is not None
        if whole:
            self._taken.begin()
        try:
            run(loss)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self._check_backward(error)
        else:
            self._backwards += 1
            if whole and self._samples > 0:
                self._memory.end(self._samples)
                self.cap.fits(self._samples)
            self._arguments = None
            return
        reached, taken = {id(leaf) for leaf in leaves(loss)}, self._taken.taken()
        self._check_reached(id(p) in reached for p in self._trained())
        remaining = [p for p in self._trained() if id(p) in reached - taken]
        for tensor in (loss, *holders):
            tensor.detach_()  # Lightning refers to the loss for as long as the step lasts, and so to the whole graph
        if not remaining:
            _give_up(self._reason, "all gradients were there, but their exchange was not under way")
        most = self._failed(self._samples)
        stand = stand_in(loss, self._remaining(remaining, most))
        self._tell(self._samples)
        ended(stand)
        stand.backward()
        self._backwards += 1

    def _remaining(self, parameters: list[nn.Parameter], most: int) -> dict[Tensor, Tensor]:
        """Returns gradients of the step's last loss, as the broken pass would have computed them."""
        assert self._arguments is not None and self._arrived is not None
        (args, kwargs), self._arguments = self._arguments, None
        gradients, arrived = GradientSum(parameters), self._arrived

        def done(piece: Any, size: int, run: Callable[[], Any], last: bool) -> None:
            del last
            loss = _loss_of(run())
            if loss is not None:
                gradients.add(loss, self._weight.of_piece(piece, size, self._samples), arrived)

        put_back = self._save()  # the forward pass that fitted has logged and counted
        with ExitStack() as stack:
            stack.enter_context(compat.unlogged(self._module))
            stack.enter_context(self._trainer.precision_plugin.train_step_context())
            self._each_piece(args, kwargs, most, done)
        put_back()
        found = gradients.gradients()
        self._check_reached(p in found for p in parameters)
        return {p: found[p] if p in found else torch.zeros_like(p) for p in parameters}

    # ---- what both need ---------------------------------------------------------------------------------------

    def communicates(self) -> None:
        """Called before a collective of the user's, within the step or not.

        Raises:
            RuntimeError: of a step that is done in pieces: its peers take part once.
        """
        self._exchanged += 1
        if self._in_pieces:
            raise RuntimeError(
                "training_step communicates with the other ranks (all_gather, reduce, broadcast or barrier),"
                " once per piece on this rank and once on the others; lower max_samples for this rank"
            )

    def take_learned(self) -> Mapping[str, Any]:
        """Returns and forgets what the last failure has taught, for a trace; empty: nothing new."""
        learned, self._learned = self._learned, {}
        return learned

    def _trained(self) -> list[nn.Parameter]:
        return [p for p in self._parameters if p.requires_grad]

    @cached_property
    def _layout(self) -> Layout | None:
        return layout_of(self._trainer, self._save)

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
        self.tried = True
        self.cap.fails(samples)
        free_memory(self._device)
        return min(-(-samples // 2), self.cap.safe or samples)

    def _check(self, error: BaseException, samples: int) -> None:
        """Raises the error, with the reason, if smaller pieces would not help."""
        self._reason = str(error).strip() or type(error).__name__
        least, why = least_samples(self._module), ""
        if isinstance(error, dist.DistError):  # of NCCL: its peers are in it, and its communicator has failed
            why = "it ran out in a collective, which this rank cannot begin again; max_samples leaves it more memory"
        elif self._communicates is not None:
            why = f"{self._communicates} communicates with the other ranks in forward"
        elif self._exchanged:
            why = "training_step had already communicated with the other ranks"
        elif samples < 2 * least:
            why = f"{samples} sample{'s' if samples != 1 else ''} cannot be divided any further"
        if why:
            _give_up(self._reason, why, error)

    def _check_backward(self, error: BaseException) -> None:
        """Likewise in backward, where the collectives of forward are over."""
        self._reason, why = str(error).strip() or type(error).__name__, ""
        if self._arguments is None or self._arrived is None:
            why = "memory ran out outside of the batch's own graph"
        elif isinstance(self._model, DistributedDataParallel) and self._model.static_graph and not self._backwards:
            why = "with static_graph=True DDP learns from the first backward pass"
        if why:
            _give_up(self._reason, why, error)
        assert self._arguments is not None
        self._exchanged = 0
        self._check(error, self._count(self._arguments[0]))

    def _check_reached(self, reached: Iterable[bool]) -> None:
        """Gives up if DDP waits for a gradient that pieces do not have: one that a nested backward pass computes."""
        model = self._model
        if isinstance(model, DistributedDataParallel) and not model.find_unused_parameters and not all(reached):
            _give_up(self._reason, "not all parameters are in its graph; checkpointing needs use_reentrant=False")

    def _tell(self, samples: int) -> None:
        """Keeps what was learned, and says so once in a fit, on this rank, whichever it is."""
        cap = self.cap
        self._learned = {"failed": samples, "most": cap.most}
        if self._told:
            return
        self._told = True
        warnings.warn(
            f"rank {self._trainer.global_rank} ran out of memory with {samples} samples"
            f" ({self._reason.splitlines()[0]}). Nothing is lost: the step was done in pieces, of which"
            f" {cap.safe} samples fit; this rank goes on with at most {cap.most}",
            stacklevel=2,
        )


def _give_up(text: str, why: str, cause: BaseException | None = None) -> NoReturn:
    raise torch.OutOfMemoryError(f"{text}\nthe step cannot be done in pieces: {why}") from cause


def _loss_of(output: Any) -> Tensor | None:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    return loss if isinstance(loss, Tensor) else None


def _detached(output: Any) -> Any:
    return apply_to_collection(output, Tensor, Tensor.detach)


def _without_loss(output: Any) -> Any:
    """Returns what a step gives besides its loss."""
    return {k: v for k, v in output.items() if k != "loss"} if isinstance(output, Mapping) else None


def _with_loss(rest: Any, loss: Tensor) -> Any:
    return loss if rest is None else {"loss": loss, **rest}
