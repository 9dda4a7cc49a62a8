"""Gradients in buckets: copied together, summed over the owners, and copied back (layer T).

owners (2, 1)    [ layer 3 | layer 2 ]               [ layer 0 ]  [ outside ]
owners (2, 0)                           [ layer 1 ]                            launched in this order only
one bucket       | gradient | gradient | ... | present? present? ... |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hetero.transport.one_round import Sum, start_sum


class Bucket:
    """Gradients that are summed together, of one dtype.

    Args:
        late: some of them are complete only when all backward passes are done, or it is not known when.
        group: of their owners.
    """

    def __init__(self, late: bool, group: dist.ProcessGroup) -> None:
        self.parameters: list[nn.Parameter] = []
        self.late, self._group = late, group
        self.awaited: set[int] = set()  # ids of parameters whose gradient is still to come
        self.sent: Tensor | None = None
        self._sum: Sum | None = None

    @torch.no_grad()
    def launch(self) -> None:
        """Starts to sum a copy of the gradients, and of which there are."""
        flags = self.parameters[0].new_ones(len(self.parameters))
        for i, parameter in enumerate(self.parameters):
            if parameter.grad is None:
                flags[i].zero_()
        self.sent = torch.cat([*map(_flat, self.parameters), flags])
        self._sum = start_sum(self.sent, self._group)

    @torch.no_grad()
    def collect(self, wait: Callable[[dist.Work], object]) -> None:
        """Waits for the sum and writes it back; the bucket's memory is given free."""
        assert self._sum is not None
        wait(self._sum.work)
        *pieces, flags = self._sum.result().split([*map(torch.Tensor.numel, self.parameters), len(self.parameters)])
        lacking = [i for i, p in enumerate(self.parameters) if p.grad is None]
        used = (flags.abs() > 0).tolist() if lacking else ()
        for i in lacking:
            if used[i]:
                self.parameters[i].grad = torch.empty_like(self.parameters[i])
        pairs = [(p.grad, piece) for p, piece in zip(self.parameters, pieces, strict=True) if p.grad is not None]
        if pairs:
            # Many small ones: views of the gradients take a third of the time that views in their shapes do.
            flat = [grad.is_contiguous() for grad, _ in pairs]
            targets = [grad.view(-1) if one else grad for one, (grad, _) in zip(flat, pairs, strict=True)]
            sources = [piece if one else piece.view(grad.shape) for one, (grad, piece) in zip(flat, pairs, strict=True)]
            torch._foreach_copy_(targets, sources)
        self.forget()

    def forget(self) -> None:
        """Gives the memory free."""
        self.sent = self._sum = None
        self.awaited = set()


class Queue:
    """This rank's buckets, launched in the order that all ranks launch theirs in, whatever sets of owners they are of.

    So no two ranks wait for one another, each in another sum, where a device carries out one after the other.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = buckets
        self._launched = 0

    def launch(self) -> None:
        """Launches the next buckets while they are complete."""
        for bucket in self.buckets[self._launched :]:
            if bucket.awaited or bucket.late:
                return
            self._launched += 1
            bucket.launch()

    def launch_all(self) -> None:
        """Launches what has not been yet."""
        for bucket in self.buckets[self._launched :]:
            self._launched += 1
            bucket.launch()

    def forget(self) -> None:
        """Begins anew."""
        self._launched = 0
        for bucket in self.buckets:
            bucket.forget()


class BucketArrived:
    """The hook of a bucket's parameters: one more gradient is complete."""

    def __init__(self, queue: Queue, bucket: Bucket) -> None:
        self._queue, self._bucket = queue, bucket

    def __call__(self, parameter: Tensor) -> None:
        if self._bucket.sent is not None:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} got a further gradient after it had been"
                " synchronised; reentrant checkpointing does this to parameters it uses several times: use"
                " use_reentrant=False, or synchronise without overlap"
            )
        self._bucket.awaited.discard(id(parameter))
        if not self._bucket.awaited:
            self._queue.launch()


def fill_buckets(
    entries: Sequence[tuple[nn.Parameter, bool]],
    bucket_bytes: int,
    *,
    group: dist.ProcessGroup,
    least_bytes: int = 0,
) -> list[Bucket]:
    """Fills buckets in the order of the parameters, the late ones last; one is open for each dtype.

    Args:
        entries: parameters, and whether the gradient is late.
        bucket_bytes: from which on a bucket is full.
        group: of their owners.
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
            bucket = Bucket(late, group)
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
