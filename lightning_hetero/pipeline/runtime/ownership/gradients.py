"""One gradient on all owners of a layer, and norms over the whole model (layer T).

    backward of the last micro-batch   layer 3 ──► layer 2 ──► layer 1 ──► layer 0 ──► before
    owners (2, 3)                      [ bucket 0 ]──────► summed, not waited for
    owners (2, 1)                                            [ bucket 1 ]─► [ bucket 2, outside ]
    one bucket                         | gradient | gradient | ... | present? present? ... |
    finish()                           what is left; wait; write back into .grad

Losses are weighted before backward, so gradients are *summed* over the owners. As in DDP, all ranks reduce their
buckets in one order that is fixed beforehand, whatever order the gradients come in. A bucket carries one more
number per parameter: whether this rank had a gradient. So a parameter that was used in some group gets the sum in all
of them, and one that was used nowhere keeps ``None``, without a further exchange.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hetero.pipeline.runtime.ownership.owner_groups import OwnerGroups
from lightning_hetero.pipeline.runtime.ownership.ownership import Ownership
from lightning_hetero.transport.one_round import Sum, start_sum


class GradientSync:
    """Sums gradients over the owners of each layer, overlapped with the last backward.

    ::

        sync = GradientSync(module, ownership, groups=groups)      # on all ranks, after `prune`
        ...                                                        # backward passes
        sync.arm()                                                 # before the last one of this rank's layers
        ...                                                        # the last one
        sync.finish()                                              # on all ranks

    `arm` may be left out: then nothing overlaps. Without `finish`, as under gradient accumulation, gradients stay
    local. Buckets are launched in the order that all ranks launch theirs in, whatever sets of owners they are of: so no
    two ranks wait for one another, each in another sum, where a device carries out one after the other.

    Args:
        module: the whole model, pruned.
        ownership: which rank holds what.
        groups: of processes; those that are needed here are made now, so the constructor is collective.
        bucket_bytes: of gradients per all-reduce, as DDP's ``bucket_cap_mb``.
        least_bytes: of gradients that are reduced before the last backward pass has ended. Fewer travel with the rest.
        wait: waits for a collective, e.g. with a look at what became of the others, `FailureBoard.wait`.

    Raises:
        ValueError: the module is not the ownership's.
    """

    def __init__(
        self, module: nn.Module, ownership: Ownership, *, groups: OwnerGroups, bucket_bytes: int = 25 * 2**20,
        least_bytes: int = 0, wait: Callable[[dist.Work], object] = dist.Work.wait,
    ) -> None:  # fmt: skip
        self._groups, self._wait = groups, wait
        self._bucket_bytes, self._least_bytes = bucket_bytes, least_bytes
        tensors, names = ownership.tensors(module), ownership.parameters
        groups.prepare(ownership.holders(name) for name in tensors)
        self._own = [tensors[name] for name in names]
        self._counted = {id(tensors[n]) for n in names if ownership.owners(n)[0] == ownership.rank}
        floating = (tensor.dtype for tensor in self._own if tensor.is_floating_point())
        self._dtype = next(floating, torch.get_default_dtype())

        def late(name: str) -> bool:
            """Whether it has gradients in front of the layers as well as behind them, or in several."""
            return ownership.layer_of[name] is None or ownership.is_shared(name)

        self._synced: dict[tuple[int, ...], list[tuple[nn.Parameter, bool]]] = {}
        self._place: dict[int, int] = {}  # of a parameter in the order of all that are summed, the same on all ranks
        for name in sorted(reversed(names), key=lambda n: (late(n), -(ownership.layer_of[n] or 0))):
            owners, parameter = ownership.owners(name), tensors[name]
            self._place[id(parameter)] = len(self._place)
            if len(owners) > 1 and ownership.rank in owners:
                assert isinstance(parameter, nn.Parameter)
                self._synced.setdefault(owners, []).append((parameter, late(name)))
        self._layouts: dict[tuple[bool, ...], list[Bucket]] = {}
        self._buckets: list[Bucket] | None = None  # while they are armed or under way
        self._launched = 0
        self._hooks: list[Any] = []

    def sizes_bytes(self) -> dict[tuple[int, ...], int]:
        """Returns what is summed in each set of owners that this rank is in, of what is trained at present [bytes]."""
        return {
            owners: sum(parameter.nbytes for parameter, _ in entries if parameter.requires_grad)
            for owners, entries in self._synced.items()
        }

    # ---- sums over the owners ----------------------------------------------------------------------------------

    def arm(self) -> None:
        """From now on, a bucket is reduced as soon as this rank's gradients in it are complete.

        Each parameter is taken to get its last gradient in one backward pass that has not begun yet; what is outside
        the layers, and tied weights, wait for `finish`.
        """
        self._buckets = self._layout()
        for bucket in self._buckets:
            if not bucket.late:
                bucket.awaited = set(map(id, bucket.parameters))
                arrived = partial(self._arrived, bucket)
                self._hooks += [p.register_post_accumulate_grad_hook(arrived) for p in bucket.parameters]

    def close(self) -> None:
        """Removes the hooks of `arm`, and forgets what is under way."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for bucket in self._buckets or ():
            bucket.forget()
        self._buckets, self._launched = None, 0

    def launch(self) -> None:
        """Starts to reduce what has not been yet; all ranks call it, or none, before `finish`.

        Raises:
            TypeError: a sparse gradient.
        """
        self._buckets = self._layout() if self._buckets is None else self._buckets
        self._launch(all_of_them=True)

    def finish(self) -> None:
        """Reduces what has not been yet, waits for all, and writes the sums into ``.grad``.

        All ranks call it, once for each update; a gradient that no owner has stays None.

        Raises:
            TypeError: a sparse gradient.
            RuntimeError: a peer is lost, or what ``wait`` raises.
        """
        try:
            self.launch()
            for bucket in self._buckets or ():
                bucket.collect(self._wait)
        finally:
            self.close()

    def _arrived(self, bucket: Bucket, parameter: Tensor) -> None:
        """One more gradient of a bucket is complete."""
        if bucket.sent is not None:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} got a further gradient after it had been"
                " synchronised; reentrant checkpointing does this to parameters it uses several times: use"
                " use_reentrant=False, or synchronise without overlap"
            )
        bucket.awaited.discard(id(parameter))
        if not bucket.awaited:
            self._launch(all_of_them=False)

    def _launch(self, *, all_of_them: bool) -> None:
        """Launches the next buckets, while they are complete or all."""
        assert self._buckets is not None
        for bucket in self._buckets[self._launched :]:
            if not all_of_them and (bucket.awaited or bucket.late):
                return
            self._launched += 1
            bucket.launch()

    def _layout(self) -> list[Bucket]:
        """The buckets for the parameters that are trained at present: some are frozen or thawed meanwhile."""
        trained = tuple(p.requires_grad for entries in self._synced.values() for p, _ in entries)
        if trained not in self._layouts:
            buckets: list[Bucket] = []
            for owners, entries in self._synced.items():
                group = self._groups.get(owners)
                assert group is not None
                chosen = [entry for entry in entries if entry[0].requires_grad]
                buckets += fill_buckets(chosen, self._bucket_bytes, group=group, least_bytes=self._least_bytes)
            # Not by the first one: a bucket is complete with its last.
            buckets.sort(key=lambda bucket: (bucket.late, max(self._place[id(p)] for p in bucket.parameters)))
            self._layouts[trained] = buckets
        return self._layouts[trained]

    # ---- over the whole model ----------------------------------------------------------------------------------

    @torch.no_grad()
    def norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """Returns the 2-norm of gradients over the whole model, as if they were one vector on one device.

        After `finish`; all ranks call it. Each parameter counts once, on the owner in the lowest group.

        Args:
            parameters: of this module, those that this rank holds.

        Returns:
            A number (0-dimensional tensor), the same on all ranks, of the module's dtype.
        """
        norms = [norm for norm in self.own_norms(parameters, 2.0) if norm is not None]
        return self._total(torch.tensor(norms, dtype=torch.float64).pow(2).sum()).sqrt().to(self._dtype)

    @torch.no_grad()
    def own_norms(self, parameters: Sequence[Tensor], norm_type: float) -> list[float | None]:
        """Returns the norms of the gradients that count on this rank; None of others, and without a gradient.

        Args:
            parameters: of this module, this rank's or stand-ins.
            norm_type: see `torch.linalg.vector_norm`.
        """
        found: list[float | None] = [None] * len(parameters)
        own = {i: p.grad for i, p in enumerate(parameters) if id(p) in self._counted and p.grad is not None}
        if own:
            norms = torch._foreach_norm([*own.values()], norm_type)
            for i, norm in zip(own, torch.stack([n.to(torch.float64) for n in norms]).tolist(), strict=True):
                found[i] = norm
        return found

    @torch.no_grad()
    def clip_by_norm(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """Scales gradients so that their norm over the whole model is at most ``max_norm``; returns what it was.

        `torch.nn.utils.clip_grad_norm_` for a model that no rank has as a whole; after `finish`, all ranks call it.

        Args:
            parameters: see `norm`.
            max_norm: the greatest norm allowed, >= 0.
        """
        total = self.norm(parameters)
        if gradients := _gradients(parameters):
            factor = (float(max_norm) / (total + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(gradients, factor.item())  # a number goes to the device without a copy
        return total

    @torch.no_grad()
    def agree_nonfinite(self) -> bool:
        """Puts NaN into a gradient on every rank if some rank has an infinite or NaN one; returns whether.

        For a `torch.amp.GradScaler`, which looks at its own rank only, between `finish` and ``unscale_`` or ``step``:
        all ranks then skip the update together. All ranks call it.
        """
        gradients, flag = _gradients(self._own), torch.zeros(1)
        if gradients:
            # A norm in the gradients' own dtype could overflow although all are finite; the greatest value cannot.
            each = torch.stack([n.to(torch.float32) for n in torch._foreach_norm(gradients, math.inf)])
            flag[0] = (~each.isfinite()).any()
        found = bool(self._total(flag))
        if found and gradients:
            gradients[0].fill_(math.nan)
        return found

    def _total(self, tensor: Tensor) -> Tensor:
        under_way = start_sum(tensor, self._groups.world)
        self._wait(under_way.work)
        return under_way.result()


def _gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Returns the gradients that are on this rank; without empty ones, of which an infinity norm is an error."""
    return [p.grad for p in parameters if not p.is_meta and p.numel() and p.grad is not None]


class Bucket:
    """Gradients that are copied and summed together, of one dtype.

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


def fill_buckets(
    entries: Sequence[tuple[nn.Parameter, bool]], bucket_bytes: int, *, group: dist.ProcessGroup,
    least_bytes: int = 0,
) -> list[Bucket]:  # fmt: skip
    """Fills buckets in the order of the parameters; one is open for each dtype, and one for what is late.

    Args:
        entries: parameters, and whether the gradient is late.
        bucket_bytes: from which on a bucket is full.
        group: of their owners.
        least_bytes: early gradients of one dtype that are fewer in all travel with the late ones.
    """
    early_bytes = Counter[torch.dtype]()
    for parameter, late in entries:
        early_bytes[parameter.dtype] += 0 if late else parameter.nbytes
    few = {p.dtype for p, late in entries if late and early_bytes[p.dtype] < least_bytes}
    buckets: list[Bucket] = []
    filling: dict[tuple[bool, torch.dtype], Bucket] = {}
    for parameter, comes_late in entries:
        key = comes_late or parameter.dtype in few, parameter.dtype
        if key not in filling:
            filling[key] = Bucket(key[0], group)
            buckets.append(filling[key])
        filling[key].parameters.append(parameter)
        if sum(p.nbytes for p in filling[key].parameters) >= bucket_bytes:
            del filling[key]
    return buckets


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
