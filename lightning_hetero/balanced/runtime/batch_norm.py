"""BatchNorm on parts of a batch: it needs more than one sample, and must not learn from a dummy (layer T).

torch raises "Expected more than 1 value per channel when training" for a batch of one sample without further
dimensions. So where a module has BatchNorm a rank gets none or at least two samples, `ShareBounds.least`, and the dummy
of a rank without samples has two.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


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
    kept: list[tuple[nn.Module, str, Tensor]] = []
    for layer in module.modules():
        if _is_local(layer):
            for name, buffer in layer.named_buffers(recurse=False):
                kept.append((layer, name, buffer))
                setattr(layer, name, buffer.clone())
    try:
        yield
    finally:
        for layer, name, buffer in kept:
            setattr(layer, name, buffer)


def _is_local(layer: nn.Module) -> bool:
    return isinstance(layer, _BatchNorm) and not isinstance(layer, nn.SyncBatchNorm)
