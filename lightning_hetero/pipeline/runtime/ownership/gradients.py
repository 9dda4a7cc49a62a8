"""One gradient on all owners of a layer, and norms over the whole model (layer T).

    backward of the last micro-batch   layer 3 ──► layer 2 ──► layer 1 ──► layer 0 ──► before
    owners (2, 3)                      [ bucket 0 ]──────► summed, not waited for
    owners (2, 1)                                            [ bucket 1 ]─► [ bucket 2, outside ]
    finish()                           what is left; wait; write back into .grad

Losses are weighted before backward, so gradients are *summed* over the owners. As in DDP, all ranks reduce their
buckets in one order that is fixed beforehand, whatever order the gradients come in. A bucket carries one more
number per parameter: whether this rank had a gradient. So a parameter that was used in some group gets the sum in all
of them, and one that was used nowhere keeps ``None``, without a further exchange.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hetero.measure.device import device_of
from lightning_hetero.pipeline.runtime.ownership.buckets import Bucket, BucketArrived, Queue, fill_buckets
from lightning_hetero.pipeline.runtime.ownership.owner_groups import OwnerGroups
from lightning_hetero.pipeline.runtime.ownership.ownership import Ownership
from lightning_hetero.transport.one_round import start_sum

_MIB = 2**20


class GradientSync:
    """Sums gradients over the owners of each layer, overlapped with the last backward.

    ::

        sync = GradientSync(module, ownership, groups=groups)      # on all ranks, after `prune`
        ...                                                        # backward passes
        sync.arm()                                                 # before the last one of this rank's layers
        ...                                                        # the last one
        sync.finish()                                              # on all ranks

    `arm` may be left out: then nothing overlaps. Without `finish`, as under gradient accumulation, gradients stay
    local.

    Args:
        module: the whole model, pruned.
        ownership: who holds what.
        groups: of processes; those that are needed here are made now, so the constructor is collective.
        bucket_bytes: of gradients per all-reduce, as DDP's ``bucket_cap_mb``.
        least_bytes: of gradients that are reduced before the last backward pass has ended. Fewer travel with the rest.
        wait: waits for a collective, e.g. with a look at what became of the others, `FailureBoard.wait`.

    Raises:
        ValueError: ``bucket_bytes`` is not positive, or the module is not the ownership's.
    """

    def __init__(
        self,
        module: nn.Module,
        ownership: Ownership,
        *,
        groups: OwnerGroups,
        bucket_bytes: int = 25 * _MIB,
        least_bytes: int = 0,
        wait: Callable[[dist.Work], object] = dist.Work.wait,
    ) -> None:
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes={bucket_bytes} must be at least 1, e.g. {25 * _MIB}")
        self._groups = groups
        self._bucket_bytes, self._least_bytes = bucket_bytes, least_bytes
        self._wait = wait
        tensors = ownership.tensors(module)
        names = ownership.parameters
        groups.prepare(ownership.holders(name) for name in tensors)
        self._known = {id(tensors[name]): tensors[name] for name in names}  # kept: an id is not given again
        self._counted = {id(tensors[n]) for n in names if ownership.owners(n)[0] == ownership.rank}
        devices = [device_of(tensor.device) for tensor in self._known.values()]
        self._widest = devices[0].widest_float() if devices else torch.float64
        floating = (tensor.dtype for tensor in self._known.values() if tensor.is_floating_point())
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
        self._layouts: dict[tuple[bool, ...], Queue] = {}
        self._queue: Queue | None = None  # while armed
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

        Raises:
            RuntimeError: it is armed already.
        """
        if self._queue is not None:
            raise RuntimeError("gradients are being synchronised: call finish() before the next arm()")
        self._queue = self._layout()
        for bucket in self._queue.buckets:
            bucket.awaited = set() if bucket.late else set(map(id, bucket.parameters))
            if not bucket.late:
                arrived = BucketArrived(self._queue, bucket)
                self._hooks += [p.register_post_accumulate_grad_hook(arrived) for p in bucket.parameters]

    def disarm(self) -> None:
        """Removes the hooks of `arm`; for a step that failed. What is under way is forgotten."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._queue is not None:
            self._queue.forget()
        self._queue = None

    def close(self) -> None:
        """As `disarm`, for good: lets go of the groups."""
        self.disarm()
        self._layouts.clear()

    def launch(self) -> None:
        """Starts to reduce what has not been yet; all ranks call it, or none, before `finish`.

        Raises:
            TypeError: a sparse gradient.
        """
        self._queue = self._layout() if self._queue is None else self._queue
        try:
            self._queue.launch_all()
        except BaseException:
            self.disarm()
            raise

    def finish(self) -> None:
        """Reduces what has not been yet, waits for all, and writes the sums into ``.grad``.

        All ranks call it, once for each update; a gradient that no owner has stays None.

        Raises:
            TypeError: a sparse gradient.
            RuntimeError: a peer is lost, or what ``wait`` raises.
        """
        self.launch()
        try:
            assert self._queue is not None
            for bucket in self._queue.buckets:
                bucket.collect(self._wait)
        finally:
            self.disarm()

    def _layout(self) -> Queue:
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
            self._layouts[trained] = Queue(buckets)
        return self._layouts[trained]

    # ---- over the whole model ----------------------------------------------------------------------------------

    @torch.no_grad()
    def norm(self, parameters: Iterable[Tensor] | None = None) -> Tensor:
        """Returns the 2-norm of the whole model's gradients, as if they were one vector on one device.

        After `finish`; all ranks call it. Each parameter counts once, on the owner in the lowest group.

        Args:
            parameters: of this module, this rank's or all; None: all.

        Returns:
            A number (0-dimensional tensor), the same on all ranks, of the module's dtype.

        Raises:
            ValueError: a parameter that is not the module's.
        """
        gradients = [
            p.grad for p in self._chosen(parameters) if id(p) in self._counted and p.grad is not None
        ]
        norms = torch.zeros(1, dtype=torch.float64)
        if gradients:
            norms = torch.stack([n.to(self._widest) for n in torch._foreach_norm(gradients)]).to("cpu", torch.float64)
        return self._total(norms.pow(2).sum()).sqrt().to(self._dtype)

    @torch.no_grad()
    def own_norms(self, parameters: Sequence[Tensor], norm_type: float) -> list[float | None]:
        """Returns the norms of the gradients that count on this rank; None of others, and where there is none.

        Args:
            parameters: of this module, this rank's or stand-ins.
            norm_type: see `torch.linalg.vector_norm`.
        """
        found: list[float | None] = [None] * len(parameters)
        own = {i: p.grad for i, p in enumerate(parameters) if id(p) in self._counted and p.grad is not None}
        if own:
            norms = torch._foreach_norm([*own.values()], norm_type)
            for i, norm in zip(own, torch.stack([n.to(self._widest) for n in norms]).tolist(), strict=True):
                found[i] = norm
        return found

    @torch.no_grad()
    def clip_by_norm(self, parameters: Iterable[Tensor] | None, max_norm: float) -> Tensor:
        """Scales gradients so that their norm over the whole model is at most ``max_norm``.

        `torch.nn.utils.clip_grad_norm_` for a model that no rank has as a whole; after `finish`, all ranks call it.

        Args:
            parameters: of this module, this rank's or all; None: all.
            max_norm: the greatest norm allowed, >= 0.

        Returns:
            The norm before, the same on all ranks.

        Raises:
            ValueError: ``max_norm`` is negative or NaN, or a parameter is not the module's.
        """
        if not float(max_norm) >= 0.0:
            raise ValueError(f"max_norm={max_norm!r} must be >= 0")
        chosen = self._chosen(parameters)
        total = self.norm(chosen)
        gradients = [g for p in chosen if (g := _gradient(p)) is not None]
        if gradients:
            factor = (float(max_norm) / (total + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(gradients, factor.item())  # a number goes to the device without a copy
        return total

    @torch.no_grad()
    def agree_nonfinite(self) -> bool:
        """Puts NaN into a gradient on every rank if some rank has an infinite or NaN one; returns whether.

        For a `torch.amp.GradScaler`, which looks at its own rank only, between `finish` and ``unscale_`` or ``step``:
        all ranks then skip the update together. All ranks call it.
        """
        gradients = [g for p in self._known.values() if (g := _gradient(p)) is not None]
        flag = torch.zeros(1)
        if gradients:
            # A norm in the gradients' own dtype could overflow although all are finite; the greatest value cannot.
            each = torch.stack([n.to(torch.float32) for n in torch._foreach_norm(gradients, math.inf)])
            flag[0] = (~each.isfinite()).any()
        found = bool(self._total(flag))
        if found and gradients:
            gradients[0].fill_(math.nan)
        return found

    def _chosen(self, parameters: Iterable[Tensor] | None) -> list[Tensor]:
        if parameters is None:
            return list(self._known.values())
        chosen = list({id(p): p for p in parameters}.values())
        if foreign := sum(id(p) not in self._known for p in chosen):
            raise ValueError(
                f"{foreign} of {len(chosen)} parameters are not the module's: who else holds them is not known"
            )
        return chosen

    def _total(self, tensor: Tensor) -> Tensor:
        under_way = start_sum(tensor, self._groups.world)
        self._wait(under_way.work)
        return under_way.result()


def _gradient(parameter: Tensor) -> Tensor | None:
    if parameter.is_meta or not parameter.numel():  # of no elements, an infinity norm is an error
        return None
    return parameter.grad
