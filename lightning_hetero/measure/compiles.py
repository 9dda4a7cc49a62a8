"""What torch compiles, and when: a step in which this rank compiled tells nothing of its speed (layer T).

torch has no documented API for either question. All that is taken from its private parts is in this file, and pinned
to the installed version by `tests/ranks/measure/test_compiles.py`:

- ``torch._dynamo.callback.callback_handler`` calls back when compilation starts: of a forward, of a backward that was
  put off, of a CUDA graph.
- What ``torch.compile`` returns has ``get_compiler_config``, a closure over the context with what was asked for.

Nothing is imported: where ``torch._dynamo`` is not loaded, nothing can be compiled.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_hetero.measure.device import HostDevice


class CompileWatch:
    """Returns whether torch compiled anything in this process since it was asked last.

    It costs one look-up per question, and nothing in between. `close` ends it.
    """

    def __init__(self) -> None:
        self._compiled = False
        self._handler: Any = None
        self.ask()

    def _started(self, args: object) -> None:
        del args
        self._compiled = True

    def ask(self) -> bool:
        """Returns whether a compilation has begun since the question before; asked once, it forgets."""
        module = sys.modules.get("torch._dynamo.callback")
        if module is None:
            return False
        if self._handler is None or self._started not in self._handler.start_callbacks:
            # Loaded, or reset, since the question before: either takes long, and is there to compile something.
            self._handler = module.callback_handler
            self._handler.register_start_callback(self._started)
            self._compiled = True
        compiled, self._compiled = self._compiled, False
        return compiled

    def close(self) -> None:
        """Is called back no more."""
        if self._handler is not None and self._started in self._handler.start_callbacks:
            self._handler.remove_start_callback(self._started)
        self._handler = None


class NewSizes:
    """Tells the first batch of each size where libraries may look for the best kernels of that size.

    Args:
        device: that computes the batches.
    """

    def __init__(self, device: HostDevice) -> None:
        self._looks, self._seen = device.asynchronous, set[int]()

    def first(self, samples: int) -> bool:
        """Whether a batch of so many samples is the first one, so that its time says little of the device's speed."""
        new = self._looks and samples not in self._seen
        self._seen.add(samples)
        return new


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """What of a module is compiled.

    Attributes:
        any: whether anything is.
        per_size: whether something is compiled, or recorded as a CUDA graph, again for each number of samples.
    """

    any: bool = False
    per_size: bool = False


def compiled_parts(module: nn.Module, device: HostDevice) -> Compiled:
    """Returns what of a module, its submodules and their methods is compiled for a device.

    ``torch.compile`` of a module, ``module.compile()``, a compiled method, in a class or put on an instance, and what
    Lightning makes of a compiled `LightningModule` are found. A compiled function that is no attribute of a module is
    not, neither is a backend that itself records graphs, e.g. ``backend="cudagraphs"``: they count as code that
    takes any size.
    """
    if "torch._dynamo" not in sys.modules:
        return Compiled()
    found = [_per_size(one, device) for part in module.modules() for one in _attributes(part) if _is_compiled(one)]
    return Compiled(any=bool(found), per_size=any(found))


def _attributes(module: nn.Module) -> Iterator[object]:
    yield module
    yield from vars(module).values()  # ``module.compile()`` leaves what it made here, too
    for base in type(module).__mro__:
        if base is nn.Module:
            break
        yield from vars(base).values()


def _is_compiled(one: object) -> bool:
    """Whether ``torch.compile`` has made it; asked of its attributes, for a module answers for what it wraps."""
    return callable(one) and "get_compiler_config" in getattr(one, "__dict__", {})


def _per_size(one: Any, device: HostDevice) -> bool:
    config = one.get_compiler_config()  # Inductor's; None of other backends
    if device.records_graphs and isinstance(config, dict) and config.get("triton.cudagraphs"):
        return True
    asked = (cell.cell_contents for cell in one.get_compiler_config.__closure__ or ())
    dynamic = next((context._dynamic for context in asked if hasattr(context, "_dynamic")), True)
    if dynamic is None:  # by default a size that has changed once is taken as one that changes
        settings = sys.modules["torch._dynamo"].config
        return not settings.automatic_dynamic_shapes and settings.assume_static_by_default
    return not dynamic
