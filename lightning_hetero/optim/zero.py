"""`UnevenZeroOptimizer` (layer T).

    divide     once, for each group of parameters                                                  [division]
    step       each rank makes the step of its own rows, and sends them to all others
    save       rank 0 gets the rows of all: the state is that of the optimizer without a division
    load       each rank takes its own rows out of such a state
"""

from __future__ import annotations

import math
import platform
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Literal

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from lightning_hetero.checked import is_list, real
from lightning_hetero.measure.device import device_of
from lightning_hetero.optim.division import divide

# The step of an element depends on nothing but this element's gradient and state: rows may be on different ranks.
_ELEMENT_WISE = {
    torch.optim.ASGD, torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW,
    torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD,
}  # fmt: skip
_BUCKET_BYTES = 2**24  # sent at a time


class UnevenZeroOptimizer(Optimizer):
    """An optimizer whose state is divided among the ranks by their memory, for ``strategy="hetero_balanced"`` and DDP.

    Each rank keeps the state of some rows of the parameters, makes their step, and sends them to all others. The
    weights are those of the optimizer without a division. Stage 1 of ZeRO (Rajbhandari et al. 2020,
    arXiv:1910.02054); ours are the parts by memory and by rows. `torch.distributed.optim.ZeroRedundancyOptimizer`
    divides into equal parts, and whole tensors only.

    The optimizers of `torch.optim` whose step treats each element separately (``Adam``, ``AdamW``, ``SGD``, ``NAdam``,
    ``RAdam``, ``Adamax``, ``Adagrad``, ``Adadelta``, ``RMSprop``, ``Rprop``, ``ASGD``) are divided by rows, the first
    dimension. All others, subclasses included, get whole tensors, which need not divide well. An optimizer whose step
    of a parameter depends on other parameters (a norm over all gradients, as in LAMB) must not be divided.

    Without a process group, or on one rank, it is the plain optimizer. All ranks must make each step, as they do under
    DDP. A closure is evaluated once, before the step.

    Checkpoints of the Trainer contain the complete state, as that of ``optimizer_class`` alone: training goes on with
    other capacities, on other numbers of ranks, and with or without a division. Elsewhere call `consolidate_state_dict`
    on all ranks before ``state_dict`` on rank 0.

    Args:
        params: parameters, names with parameters, or groups, as every optimizer takes them.
        optimizer_class: optimizer of which each rank makes its part, e.g. ``torch.optim.AdamW``.
        capacities: one number for each rank, equal on all ranks, in proportion to which the state is divided: ``[24,
            10]``. ``"auto"``: what is left of the memory of each rank's device besides weights and gradients; ranks
            that share a device, or the memory of a host, share it equally.
        **defaults: arguments of ``optimizer_class``.

    Attributes:
        optim: this rank's optimizer, of its rows only.
        capacities: in proportion to which the state is divided; empty where it is not.

    Raises:
        TypeError: ``optimizer_class`` is no optimizer, or LBFGS, which is not divisible; parameters that FSDP or tensor
            parallelism has divided already.
        ValueError: not one positive number for each rank, or different numbers on the ranks.
    """

    def __init__(
        self, params: ParamsT, optimizer_class: type[Optimizer], *,
        capacities: Literal["auto"] | Sequence[float] = "auto", **defaults: Any,
    ) -> None:  # fmt: skip
        if issubclass(optimizer_class, torch.optim.LBFGS):
            raise TypeError("LBFGS needs inner products over all parameters: its state cannot be divided; use it alone")
        self._world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        self._rank = dist.get_rank() if self._world > 1 else 0
        self.optim: Optimizer | None = None
        self.capacities: tuple[float, ...] = ()
        self._by_rows = optimizer_class in _ELEMENT_WISE
        self._cuts: dict[Tensor, list[int]] = {}  # where the ranks' rows begin, and where the last one's end
        self._parts: dict[Any, Any] = {}  # this rank's rows, where it has some and not all
        self._held = {trained: [0.0] * self._world for trained in (True, False)}  # by each rank [byte]
        self._whole: dict[str, dict[Any, Any]] = {}  # the complete state, until the next step
        given = None if isinstance(capacities, str) and capacities == "auto" else _numbers(capacities, self._world)
        super().__init__(params, {})
        optim = optimizer_class([{**_options(g), "params": g["params"]} for g in self.param_groups], **defaults)
        if self._world > 1:  # all parameters and arguments have been checked
            self.capacities = self._agreed(given)
            own = [{**_options(group), "params": self._divided(group)} for group in self.param_groups]
            optim = optimizer_class(own, **defaults)
        self.optim, self.defaults, self.state = optim, optim.defaults, optim.state
        with self._as_parts():
            self.register_state_dict_post_hook(_with_whole_state)

    # ---- who has what -----------------------------------------------------------------------------------------

    def _agreed(self, given: list[float] | None) -> tuple[float, ...]:
        """Returns the ranks' capacities, by what all of them say."""
        params = _params(self.param_groups)
        on = device_of(params[0].device)
        own = psutil.virtual_memory().total if math.isinf(on.total_bytes()) else on.total_bytes()
        said = self._gathered((given, (platform.node(), on.identity() or str(on.device)), own))
        if any(first != given for first, *_ in said):
            raise ValueError(f"capacities={[first for first, *_ in said]} of the ranks must be the same on all of them")
        sharing = Counter(place for _, place, _ in said)
        memory = [size / sharing[place] for _, place, size in said]
        needed = sum(p.nbytes * (1 + p.requires_grad) for p in params)
        left = [max(0.0, size - needed) for size in memory]
        return tuple(given or (left if any(left) else memory))

    def _gathered(self, own: Any) -> list[Any]:
        gathered: list[Any] = [None] * self._world
        dist.all_gather_object(gathered, own)
        return gathered

    def _divided(self, group: dict[str, Any]) -> list[Tensor]:
        """Divides a group, what is trained and what is frozen separately; returns this rank's part of it."""
        for trained, held in self._held.items():
            params = [p for p in group["params"] if p.requires_grad is trained]
            tensors = [(_rows(p), p.nbytes / _rows(p)) for p in params]
            divided = divide(tensors, self.capacities, held, by_rows=self._by_rows)
            self._cuts |= dict(zip(params, divided, strict=True))
        own = [(p, *self._own(p)) for p in group["params"]]
        self._parts |= {p: p.detach()[start:stop] for p, start, stop in own if 0 < stop - start < _rows(p)}
        return [self._parts.get(p, p) for p, start, stop in own if start < stop]

    def _own(self, param: Tensor) -> tuple[int, int]:
        start, stop = self._cuts[param][self._rank : self._rank + 2]
        return start, stop

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if any(hasattr(p, "placements") for p in group["params"]):
            raise TypeError("FSDP or tensor parallelism has divided the state already: leave out UnevenZeroOptimizer")
        if self.optim is not None:
            params = group["params"] if self._world == 1 else self._divided(group)
            self.optim.add_param_group({**_options(group), "params": params})

    # ---- steps ------------------------------------------------------------------------------------------------

    @contextmanager
    def _as_parts(self) -> Iterator[Optimizer]:
        """Inside, this rank's optimizer has the options of all groups, and the state of its parts."""
        optim = self.optim
        assert optim is not None
        for group, own in zip(self.param_groups, optim.param_groups, strict=True):
            own.update(_options(group))
        optim.state = self.state  # somebody may have replaced it
        _rename(optim.state, self._parts)
        try:
            yield optim
        finally:
            self.state = optim.state
            _rename(self.state, {part: param for param, part in self._parts.items()})
            for group, own in zip(self.param_groups, optim.param_groups, strict=True):
                group.update(_options(own))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Makes a step; all ranks must.

        Args:
            closure: computes the loss and the gradients.

        Returns:
            What ``closure`` returns.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._whole.clear()
        for param, part in self._parts.items():
            (start, stop), grad = self._own(param), param.grad
            part.data = param.detach()[start:stop]  # the parameter's memory may be another by now
            if grad is not None:
                part.grad = grad.narrow_copy(0, start, stop - start) if grad.is_sparse else grad[start:stop]
        with self._as_parts() as optim:
            optim.step()
        for part in self._parts.values():
            part.grad = None
        self._exchange()
        return loss

    def _exchange(self) -> None:
        """Sends this rank's rows to all others, and takes theirs, with or without a gradient here."""
        buckets: dict[Any, list[Tensor]] = defaultdict(list)
        sizes: Counter[Any] = Counter()
        for param, cuts in self._cuts.items():
            if param.requires_grad or param.grad is not None:
                for owner, (start, stop) in enumerate(pairwise(cuts)):
                    for piece in _pieces(torch.atleast_1d(param.detach())[start:stop]):
                        key = owner, piece.dtype, piece.device
                        buckets[key].append(piece)
                        sizes[key] += piece.nbytes
                        if sizes[key] >= _BUCKET_BYTES:
                            self._broadcast(owner, buckets.pop(key))
                            del sizes[key]
        for (owner, *_), pieces in buckets.items():
            self._broadcast(owner, pieces)

    def _broadcast(self, owner: int, tensors: list[Tensor]) -> None:
        one = len(tensors) == 1 and tensors[0].is_contiguous()
        flat = tensors[0].view(-1) if one else torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.broadcast(flat.view(torch.uint8), owner)  # as bytes: not every backend knows every type
        if not one and owner != self._rank:
            for tensor, piece in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
                tensor.copy_(piece.view(tensor.shape))

    # ---- checkpoints ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collects the complete state in the memory of one rank's host, for ``state_dict`` there, until the next step.

        All ranks must call it, as the Trainer does when it saves.

        Args:
            to: that rank.
        """
        if self._world == 1:
            return
        params = _params(self.param_groups)
        own = {i: _without_rows(self.state[p]) for i, p in enumerate(params) if p in self.state}
        whole: dict[Any, Any] = {name: value for name, value in self.state.items() if not isinstance(name, Tensor)}
        for owner, states in enumerate(self._gathered(own)):
            for index, state in states.items():
                param, entry = params[index], whole.setdefault(index, {})
                for name, value in state.items():
                    pieces = _pieces(self.state[param][name] if owner == self._rank else value)
                    rows = [entry[name]] if pieces and name in entry else []  # of the ranks before
                    for piece in pieces:
                        sent = torch.empty_like(piece, device=param.device)
                        if owner == self._rank:
                            sent.copy_(piece)
                        self._broadcast(owner, [sent])
                        if self._rank == to:
                            rows.append(sent.cpu())
                    entry[name] = torch.cat(rows) if rows else value
                    if rows and entry[name].shape == param.shape:  # fused steps want the parameter's order in memory
                        entry[name] = torch.empty_like(param, dtype=value.dtype, device="cpu").copy_(entry[name])
        if self._rank == to:
            self._whole["state"] = whole

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes this rank's part out of a complete state; see `torch.optim.Optimizer.load_state_dict`."""
        last = self.register_load_state_dict_pre_hook(_with_own_rows)  # behind those of users
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()
        self._whole.clear()
        with self._as_parts() as optim:  # which adapts what an older release has saved
            optim.__setstate__({"state": optim.state, "param_groups": optim.param_groups})


def _with_whole_state(optimizer: Any, packed: dict[str, Any]) -> dict[str, Any]:
    if optimizer._world == 1:
        return packed
    if "state" not in optimizer._whole:
        raise RuntimeError(
            "the state is divided among the ranks: call consolidate_state_dict() on all of them after the last step,"
            " then state_dict() on rank 0"
        )
    return {**packed, **optimizer._whole}


def _with_own_rows(optimizer: Any, given: dict[str, Any]) -> dict[str, Any]:
    if optimizer._world == 1:
        return given
    known = dict(zip(_params(given["param_groups"]), _params(optimizer.param_groups), strict=False))
    state = {}
    for name, entry in given["state"].items():
        start, stop = optimizer._own(known[name]) if name in known else (0, 1)
        if known.get(name) in optimizer._parts:
            state[name] = {k: v[start:stop].clone() if _pieces(v) else v for k, v in entry.items()}
        elif start < stop:
            state[name] = entry
    return {**given, "state": state}


def _params(groups: Sequence[Mapping[str, Any]]) -> list[Any]:
    return [param for group in groups for param in group["params"]]


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def _rename(state: dict[Any, Any], names: Mapping[Tensor, Tensor]) -> None:
    for old, new in names.items():
        if old in state:
            state[new] = state.pop(old)


def _rows(tensor: Tensor) -> int:
    return max(1, len(tensor)) if tensor.ndim else 1


def _pieces(value: Any) -> Sequence[Tensor]:
    """Some rows of a tensor at a time; nothing of what has no rows."""
    if not (isinstance(value, Tensor) and value.ndim and len(value)):
        return ()
    return value.split(max(1, _BUCKET_BYTES * len(value) // max(1, value.nbytes)))


def _without_rows(state: Mapping[str, Any]) -> dict[str, Any]:
    """What a parameter's state consists of: tensors without memory, and numbers."""
    return {k: v if not isinstance(v, Tensor) else v.to("meta") if _pieces(v) else v.cpu() for k, v in state.items()}


def _numbers(capacities: Any, world: int) -> list[float]:
    values = list(capacities) if is_list(capacities) else []
    if not values or len(values) != world > 1:
        raise ValueError(
            f"capacities={capacities!r} must be 'auto', or a list of one number > 0 for each of the {world} ranks, in"
            " proportion to which the state is divided, e.g. [24, 10] for cards of 24 and 10 GB"
        )
    return [real(f"capacities[{rank}]", value, above=True) for rank, value in enumerate(values)]
