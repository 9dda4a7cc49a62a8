"""Gradients in buckets: copied together, summed over the owners, and copied back (layer T).

lane of owners (2, 1)    [ layer 2 | layer 1 ]  [ layer 0 ]  [ outside ]      launched in this order only
one bucket               | gradient | gradient | ... | present? present? ... |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hetero.transport.one_round import Sum, start_sum

__all__ = ["Arrived", "Bucket", "Lane", "fill_buckets"]


class Bucket:
    """Gradients that are summed together, of one dtype.

    Args:
        late: some of them are complete only when all backward passes are done, or it is not known when.
    """

    def __init__(self, late: bool) -> None:
        self.parameters: list[nn.Parameter] = []
        self.late = late
        self.awaited: set[int] = set()  # ids of parameters whose gradient is still to come
        self.sent: Tensor | None = None
        self._sum: Sum | None = None

    @torch.no_grad()
    def launch(self, group: dist.ProcessGroup) -> None:
        """Starts to sum a copy of the gradients, and of which there are."""
        present = [p.grad is not None for p in self.parameters]
        flags = torch.tensor(present, dtype=self.parameters[0].dtype).to(self.parameters[0].device)
        self.sent = torch.cat([*map(_flat, self.parameters), flags])
        self._sum = start_sum(self.sent, group)

    @torch.no_grad()
    def collect(self, wait: Callable[[dist.Work], object]) -> None:
        """Waits for the sum and writes it back; the bucket's memory is given free."""
        assert self._sum is not None
        wait(self._sum.work)
        *pieces, flags = self._sum.result().split([*(p.numel() for p in self.parameters), len(self.parameters)])
        lacking = [p.grad is None for p in self.parameters]
        used = (flags.abs() > 0).tolist() if any(lacking) else ()
        targets, sources = [], []
        for i, (parameter, piece) in enumerate(zip(self.parameters, pieces, strict=True)):
            if lacking[i] and used[i]:
                parameter.grad = torch.empty_like(parameter)
            if parameter.grad is not None:
                targets.append(parameter.grad)
                sources.append(piece.view(parameter.shape))
        if targets:
            torch._foreach_copy_(targets, sources)
        self.forget()

    def forget(self) -> None:
        """Gives the memory free."""
        self.sent = self._sum = None
        self.awaited = set()


class Lane:
    """The buckets of one set of owners, launched in this order on all of them."""

    def __init__(self, group: dist.ProcessGroup, buckets: Sequence[Bucket]) -> None:
        self.buckets = buckets
        self._group = group
        self._launched = 0

    def launch(self, *, all_of_them: bool = False) -> None:
        """Launches the next buckets while they are complete."""
        for bucket in self.buckets[self._launched :]:
            if not all_of_them and (bucket.awaited or bucket.late):
                return
            self._launched += 1
            bucket.launch(self._group)

    def forget(self) -> None:
        """Begins anew."""
        self._launched = 0
        for bucket in self.buckets:
            bucket.forget()


class Arrived:
    """The hook of a bucket's parameters: one more gradient is complete."""

    def __init__(self, lane: Lane, bucket: Bucket) -> None:
        self._lane, self._bucket = lane, bucket

    def __call__(self, parameter: Tensor) -> None:
        if self._bucket.sent is not None:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} got a further gradient after it had been"
                " synchronised; reentrant checkpointing does this to parameters it uses several times: use"
                " use_reentrant=False, or synchronise without overlap"
            )
        self._bucket.awaited.discard(id(parameter))
        if not self._bucket.awaited:
            self._lane.launch()


def fill_buckets(
    entries: Sequence[tuple[nn.Parameter, bool]], bucket_bytes: int, *, least_bytes: int = 0
) -> list[Bucket]:
    """Fills buckets in the order of the parameters, the late ones last; one is open for each dtype.

    Args:
        entries: parameters, and whether the gradient is late.
        bucket_bytes: from which on a bucket is full.
        least_bytes: early gradients of one dtype that are fewer in all travel with the late ones.
    """
    early_bytes: dict[torch.dtype, int] = {}
    for parameter, late in entries:
        if not late:
            early_bytes[parameter.dtype] = early_bytes.get(parameter.dtype, 0) + parameter.nbytes
    few = {p.dtype for p, late in entries if late and early_bytes.get(p.dtype, 0) < least_bytes}
    buckets: list[Bucket] = []
    fill: dict[tuple[bool, torch.dtype], tuple[Bucket, int]] = {}
    for parameter, comes_late in entries:
        late = comes_late or parameter.dtype in few
        key = late, parameter.dtype
        bucket, size_bytes = fill.get(key, (None, 0))
        if bucket is None:
            bucket = Bucket(late)
            buckets.append(bucket)
        bucket.parameters.append(parameter)
        size_bytes += parameter.numel() * parameter.element_size()
        if size_bytes < bucket_bytes:
            fill[key] = bucket, size_bytes
        else:
            fill.pop(key, None)
    return sorted(buckets, key=lambda bucket: bucket.late)


def _flat(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    if gradient is None:
        return parameter.new_zeros(parameter.numel())
    if gradient.layout is not torch.strided:
        raise TypeError(
            f"a parameter of shape {tuple(parameter.shape)} has a {gradient.layout} gradient, which cannot be summed"
            " over groups: use sparse=False in its embedding"
        )
    return gradient.reshape(-1)
