"""FSDP2's collectives on this rank: counted, left out, or taken part in with zeros (layer T).

A *pass* is a forward and a backward pass of one batch or piece. Its all-gathers and reduce-scatters are numbered, in
the same order on all ranks. A rank that runs out of memory after c of them runs the pass again with a few samples,
without the first c and with zeros for the others, so that its peers finish theirs: below c the gradients have its part,
and from c on later passes add it.

Private names of torch's FSDP stand in this file only; `tests/ranks/balanced/test_fsdp_passes.py` names the version.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


class FSDPPasses:
    """Stands between FSDP and its collectives, the user's custom ones included.

    Args:
        module: with sharded modules in it.

    Attributes:
        done: collectives of this pass so far.
        void: those with lower numbers get zeros from this rank.
        agree: given a number before each collective, and its size: all ranks must be about to do the same.
    """

    def __init__(self, module: nn.Module) -> None:
        self.agree: Callable[..., None] = _ignore
        self.done = 0
        self.void: float = 0
        self._skip = self._ended = 0
        self._reduced = True  # the last reduce-scatter was not left out
        self._modules = [m for m in module.modules() if isinstance(m, FSDPModule)]
        # One for each module before torch 2.12, if any.
        groups = (getattr(s, "_fsdp_param_groups", ()) or [s._fsdp_param_group] for s in map(_state, self._modules))
        self._groups: list[Any] = list(dict.fromkeys(group for some in groups for group in some if group))
        for i, group in enumerate(self._groups):
            group._all_gather_comm = _Comm(group._all_gather_comm, self._gathers, lambda n, i=i: self.agree(2 * i, n))
            scatter = group._reduce_scatter_comm
            group._reduce_scatter_comm = _Comm(scatter, self._reduces, lambda n, i=i: self.agree(2 * i + 1, n))

    def close(self) -> None:
        """Gives FSDP its own back."""
        for group in self._groups:
            for name in ("_all_gather_comm", "_reduce_scatter_comm"):
                if isinstance(comm := getattr(group, name), _Comm):
                    setattr(group, name, comm.comm)

    def why_not(self) -> str:
        """Returns why passes cannot be finished without this rank's part; empty: they can."""
        for group in self._groups:
            if not (group.reduce_grads and group.all_reduce_grads):
                return "gradients are not reduced in each backward pass (set_requires_gradient_sync or _all_reduce)"
            if not group.reshard_after_backward:
                return "with set_reshard_after_backward(False) ranks do not gather the same parameters again"
            if group._use_post_forward_mesh:
                return "with a number for reshard_after_forward peers gather in backward what a rank made in forward"
            if group._all_reduce_hook is not None:
                return "a hook of set_all_reduce_hook communicates"
            if any(param.is_dtensor for param in group.fsdp_params):
                return "tensor-parallel ranks communicate within each layer"
            if group._all_gather_process_group.size() == 1:
                return "its parameters are not sharded"
        return "" if hasattr(FSDPModule, "reset_iter_state") else "this torch has no FSDPModule.reset_iter_state"

    # ---- passes -----------------------------------------------------------------------------------------------

    def begin(self, *, void: float = 0) -> None:
        """A pass begins, from sharded parameters on all ranks: a forward pass in between has left some gathered."""
        if self.done != self._ended and not self.why_not():
            self.reset()
        self.done = self._ended = self._skip = 0
        self.void = void

    def agree_with(self, agree: Callable[..., None] | None) -> None:
        """Sets or ends ``agree``."""
        self.agree = agree or _ignore

    def end(self) -> None:
        """Its backward pass is over."""
        self._ended = self.done

    def reset(self) -> None:
        """Forgets a pass that has failed, or whose backward pass does not come."""
        for module in self._modules:
            if _state(module)._is_root:  # None: it has not run yet
                module.reset_iter_state()
        self._ended = self.done

    @contextmanager
    def again(self, done: int) -> Iterator[None]:
        """Inside, a pass that has failed after so many collectives runs again to its end, without values that count."""
        self.reset()
        self.begin(void=math.inf)
        self._skip = done
        all_reduce = dist.all_reduce

        def not_twice(*args: Any, **kwargs: Any) -> Any:
            """FSDP reduces over replicas right behind a reduce-scatter."""
            reduced, self._reduced = self._reduced, True
            return all_reduce(*args, **kwargs) if reduced else None

        dist.all_reduce = not_twice
        try:
            yield
        finally:
            dist.all_reduce = all_reduce

    # ---- collectives ------------------------------------------------------------------------------------------

    def _gathers(self, run: Callable[[], Any], output: Tensor, given: Tensor, group: dist.ProcessGroup) -> Any:
        if self.done >= self._skip:
            work = run()
        else:  # numbers of a likely size
            work, _ = None, output.view(group.size(), -1).copy_(given.clone())
        self.done += 1
        return work

    def _reduces(self, run: Callable[[], Any], output: Tensor, given: Tensor, group: dist.ProcessGroup) -> Any:
        if self.done < self.void:  # not by a factor alone: 0 * NaN is NaN
            given.zero_()
        work = run() if self.done >= self._skip else None
        self._reduced = self.done >= self._skip
        if not self._reduced:
            output.zero_()
        self.done += 1
        return work


class _Comm:
    """What `FSDPModule.set_custom_all_gather` and ``set_custom_reduce_scatter`` take, around another one."""

    def __init__(self, comm: Any, runs: Callable[..., Any], before: Callable[[int], None]) -> None:
        self.comm, self._runs, self._before = comm, runs, before
        self.allocate = comm.allocate

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, *args: Any, **kwargs: Any
    ) -> Any:
        def run() -> Any:
            self._before(input_tensor.numel())
            return self.comm(output_tensor, input_tensor, group, *args, **kwargs)

        return self._runs(run, output_tensor, input_tensor, group)


def _ignore(number: int, size: int = 0) -> None:
    """Ranks whose numbers of samples have been seen together do the same."""


def in_reduction(error: BaseException) -> bool:
    """Whether FSDP was handing over reduced gradients: some may be lost."""
    return any(frame.f_code.co_name == "foreach_reduce" for frame, _ in traceback.walk_tb(error.__traceback__))


def _state(module: FSDPModule) -> Any:
    return module._get_fsdp_state()
