"""What surrounds a training step without being passed to it: torch's per-thread switches (layer T).

A training step that is suspended in the middle (see `resumable`) must take these along, or a ``no_grad``
that it holds open would hold for everything which runs meanwhile. They fall into three classes:

- **swapped** at every switch (`Switches`): grad mode, autocast (enabled, dtype, cache, nesting), of an accelerator
  also the current device and stream;
- **refused** when a step changed them and calls the backbone meanwhile (`Surroundings`): they cannot be swapped, or
  mean nothing to layers that are computed elsewhere: ``inference_mode``, saved-tensor hooks, ``with torch.device``,
  the default dtype, ...;
- **reseeded** at every entry (`random_streams.seed_streams`): the random streams of torch, `random` and NumPy.

The private names of torch needed for this are in `_REFUSED`, `saved_tensor_hooks` and `hooks_taken_off`;
``tests/ranks/pipeline/test_torch_state.py`` pins them to the installed torch. Verified with torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C import _autograd
from torch._C._functorch import maybe_current_level

from lightning_hetero.measure.device import autocast_kinds, device_in_use

# ---- swapped ---------------------------------------------------------------------------------------------------


def enabled_autocast() -> dict[str, torch.dtype]:
    """Returns the dtype of autocast for each type of device for which it is enabled now."""
    return {kind: dtype for kind, enabled, dtype in _autocast() if enabled}


def _autocast() -> tuple[tuple[str, bool, torch.dtype], ...]:
    return tuple(
        [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in autocast_kinds()]
    )


def _autocast_nesting() -> int:
    torch.autocast_increment_nesting()  # the number is only told by a change
    return torch.autocast_decrement_nesting()


@dataclass(frozen=True, slots=True)
class Switches:
    """All that is swapped, as of one moment; a few µs to read and to put."""

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    autocast_cache: bool
    autocast_nesting: int
    put_device: Callable[[], None] = field(compare=False)

    @classmethod
    def now(cls) -> Switches:
        """Returns the switches of this thread."""
        return cls(
            grad=torch.is_grad_enabled(), autocast=_autocast(), autocast_cache=torch.is_autocast_cache_enabled(),
            autocast_nesting=_autocast_nesting(), put_device=device_in_use().here(),
        )  # fmt: skip

    def put(self, *, over: Switches | None = None) -> None:
        """Sets the switches of this thread.

        Args:
            over: what is in force, if that is known: then what is the same is left.
        """
        if self != over:
            self._put_modes()
        # Autocast's cache of cast weights is one for the process, and emptied where this thread's outermost block ends:
        # what one step has cast must not serve another, e.g. after the latter has changed the weights.
        torch.clear_autocast_cache()
        self.put_device()

    def _put_modes(self) -> None:
        torch.set_grad_enabled(self.grad)
        for kind, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self.autocast_cache)
        nesting = _autocast_nesting()
        for _ in range(nesting, self.autocast_nesting):
            torch.autocast_increment_nesting()
        for _ in range(self.autocast_nesting, nesting):
            torch.autocast_decrement_nesting()


# ---- refused ---------------------------------------------------------------------------------------------------

_INSIDE_LAYERS = "put it into the layers, or around what stands before or after the backbone's call"


def _sdpa_kernels() -> tuple[bool, ...]:
    flags = torch.backends.cuda
    return flags.flash_sdp_enabled(), flags.mem_efficient_sdp_enabled(), flags.math_sdp_enabled()


# What it is, how it is read, the way out. Compared by ==.
_REFUSED: tuple[tuple[str, Callable[[], Any], str], ...] = (
    (
        "torch.inference_mode",
        torch.is_inference_mode_enabled,
        "use torch.no_grad, or enter it outside the step as Trainer(inference_mode=True) does for validation",
    ),
    (
        "the forward of a torch.autograd.Function (e.g. torch.utils.checkpoint(..., use_reentrant=True))",
        torch._C._is_fwd_grad_enabled,  # off in autograd.Function.forward and in inference mode only
        f"it computes without a graph and once more in backward: {_INSIDE_LAYERS}, e.g. checkpoint each layer",
    ),
    (
        "saved-tensor hooks (torch.autograd.graph.saved_tensors_hooks, save_on_cpu, torch.utils.checkpoint)",
        lambda: saved_tensor_hooks(),
        f"the backbone's activations are saved elsewhere: {_INSIDE_LAYERS}, e.g. checkpoint each layer in its forward",
    ),
    (
        "a torch function mode (with torch.device(...), torch.set_default_device)",
        torch._C._len_torch_function_stack,
        f"pass device= to the functions that need it, or {_INSIDE_LAYERS}",
    ),
    ("a torch dispatch mode", torch._C._len_torch_dispatch_stack, _INSIDE_LAYERS),
    (
        "another torch.set_default_dtype",
        torch.get_default_dtype,
        "set it before training, or use Trainer(precision=...), which sets it on all ranks",
    ),
    ("torch.nn.attention.sdpa_kernel", _sdpa_kernels, _INSIDE_LAYERS),
    ("torch.autograd.detect_anomaly", torch.is_anomaly_enabled, "use Trainer(detect_anomaly=True)"),
    ("a torch.func transform (grad, vmap, ...)", maybe_current_level, _INSIDE_LAYERS),
)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """All that is refused if a step changes it, as of one moment; about 2 µs to read."""

    values: tuple[Any, ...]

    @classmethod
    def now(cls) -> Surroundings:
        """Returns the surroundings of this thread."""
        return cls(tuple([read() for _, read, _ in _REFUSED]))

    def change(self) -> str:
        """Returns what has changed since and the way out, in words; empty if nothing has."""
        for (what, read, way_out), value in zip(_REFUSED, self.values, strict=True):
            if read() != value:
                return f"{what}: {way_out}"
        return ""

    @property
    def hooks(self) -> Any:
        """Saved-tensor hooks in force at that moment."""
        return self.values[2]


# ---- taken off while a step is suspended ------------------------------------------------------------------------


def saved_tensor_hooks() -> Any:
    """Returns the pair of saved-tensor hooks in force or None; with torch < 2.8, whether there is one."""
    top = getattr(_autograd, "_top_saved_tensors_default_hooks", None)
    if top is not None:
        return top(True)
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks("in use"):  # raises where hooks are in force
            return None
    except RuntimeError:
        return True


@contextmanager
def hooks_taken_off(kept: Any) -> Iterator[None]:
    """Inside, only those saved-tensor hooks are in force that were when `saved_tensor_hooks` returned ``kept``."""
    taken: list[tuple[Any, Any]] = []
    while (top := saved_tensor_hooks()) is not None and top != kept and top is not True:
        _autograd._pop_saved_tensors_default_hooks()
        taken.append(top)
    try:
        yield
    finally:
        for pack, unpack in reversed(taken):
            _autograd._push_saved_tensors_default_hooks(pack, unpack)
