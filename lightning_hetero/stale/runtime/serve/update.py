"""Applies pools to the server's parameters, as DDP would apply an all-reduced gradient (layer T).

The server holds G, the global ``.grad``. One update, for each optimizer the workers zeroed: G = 0; then G += pool; then
for each optimizer that steps: clip, step. So accumulation over batches, several optimizers and manual optimization need
no special case. An update worth less than a batch (asynchronous policies) differs in two points:

- an optimizer zeroed and stepped by the same update steps at once, its learning rates multiplied by the worth;
- one that accumulates over global steps gets the pool multiplied by the worth, is zeroed once at the beginning of a
  window, and steps with the last update of the global step that ends it: so it steps once per window, as under DDP.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hetero.stale.runtime.hyper_parameters import CLIP_NORM, CLIP_VALUE, HyperParameters
from lightning_hetero.stale.runtime.layout import NONFINITE, FlatLayout
from lightning_hetero.stale.runtime.serve.accumulator import GradientSum, KeptMean, Spares, runs
from lightning_hetero.stale.runtime.serve.agreement import RunEndsError
from lightning_hetero.stale.runtime.serve.thread_shards import ThreadShards, step
from lightning_hetero.transport.progress import STEPS, Stamp

_SLOTS = 256


def bits(mask: int) -> Iterator[int]:
    """Yields the numbers of the set bits.

    >>> list(bits(0b101))
    [0, 2]
    """
    return (i for i in range(mask.bit_length()) if mask >> i & 1)


class Updater:
    """The server's parameters, optimizers and gradients.

    Args:
        layout: of ``area``.
        area: uint8, parameters and buffers.
        parameters: views of ``area``, in the layout's order.
        optimizers: over these parameters.
        shards: threads to use.
        divide_by: gradients are the pool's sum divided by this, not by its weight (a loss that is a sum).
        stamp: called when an optimizer's step begins.
    """

    def __init__(
        self, *, layout: FlatLayout, area: Tensor, parameters: Sequence[Tensor], optimizers: Sequence[Optimizer],
        shards: ThreadShards, divide_by: float | None = None, stamp: Stamp = lambda kind, number: None,
    ) -> None:  # fmt: skip
        self.layout, self.shards = layout, shards
        self.optimizers = list(optimizers)
        self.hyper = HyperParameters(optimizers)
        self.spares = Spares(layout)
        self.buffers = layout.views(area)[len(layout.parameters) :]
        self.parameters: dict[int, Tensor] = {}  # those some optimizer owns
        self._owners: dict[int, int] = {}  # a bit per optimizer
        self.divide_by = divide_by
        self._clips = [(0, 0.0)] * len(optimizers)
        self._seen: dict[int, list[Tensor]] = {}  # by address; keeps the memory, so addresses are not used again
        self._spent = 0  # bits of accumulating optimizers that have stepped: what comes next begins a window
        self._begun = 0  # ... that were zeroed in this global step
        self._changed: dict[int, int] = {}  # version from which on a buffer has its value
        index = {id(parameter): i for i, parameter in enumerate(parameters)}
        for o, optimizer in enumerate(self.optimizers):
            for parameter in _parameters_of(optimizer):
                parameter.grad = None
                i = index[id(parameter)]
                self.parameters[i] = parameter
                self._owners[i] = self._owners.get(i, 0) | 1 << o
        owned = [[i for i in part if i in self.parameters] for part in shards.parts]
        self._runs = [runs(layout, part) for part in owned]
        shard_of = {id(self.parameters[i]): shard for shard, part in enumerate(owned) for i in part}

        def step_of(o: int) -> None:
            stamp(STEPS, o)
            step(self.optimizers[o], shard_of, shards)

        self._step = step_of

    # ---- contributions ----------------------------------------------------------------------------------------

    def nonfinite(self, slot: Tensor) -> str | None:
        """Returns the name of the first parameter whose gradient is not finite, as the slot says; None if all are."""
        for i in (self.layout.flags_of(slot)[0] == NONFINITE).nonzero().flatten().tolist():
            if i in self.parameters:
                return self.layout.parameters[i].name
        return None

    def add(self, pool: GradientSum, slot: Tensor, *, weight: float, samples: int, scale: float = 1.0) -> None:
        """Has a slot's gradients wait for `settle` or `apply`, which add them to a pool: till then they must stay."""
        flags = self.layout.flags_of(slot)[0].tolist()
        pool.wait(flags, self._values_of(slot), pool.count(weight, samples, scale))

    def complete(self, pool: GradientSum, mean: KeptMean, slot: Tensor, *, weight: float, samples: int) -> None:
        """Completes the mean of an earlier update by a slot, which is free again then; a pool gets the move."""
        flags, values, part = self.layout.flags_of(slot)[0].tolist(), self._values_of(slot), mean.count(weight)
        pool.samples += samples

        def work(shard: int) -> None:
            for run in self._runs[shard]:
                for i in run:
                    pool.move(i, mean.complete(i, values[i] if flags[i] else None, part))

        self.shards.run(work)

    def settle(self, pool: GradientSum) -> None:
        """Adds the slots that wait; afterwards they may be written again."""
        if not pool.waits:
            return
        alone = pool.waits == 1  # nothing to keep in the cache for: few calls

        def work(shard: int) -> None:
            own = self._runs[shard]
            for run in [[i for each in own for i in each]] if alone else own:
                pool.sum_up(run)

        self.shards.run(work)
        pool.summed_up()

    def _values_of(self, slot: Tensor) -> list[Tensor]:
        """Returns views of a slot's gradients, made once per slot: there are few, and they stay where they are."""
        if (values := self._seen.get(slot.data_ptr())) is None:
            if len(self._seen) >= _SLOTS:  # those of workers long gone
                self._seen.clear()
            values = self._seen[slot.data_ptr()] = self.layout.values_of(slot)
        return values

    # ---- updates ----------------------------------------------------------------------------------------------

    def apply(
        self, pool: GradientSum, *, version: int, worth: float = 1.0, last: bool = True, mean: KeptMean | None = None
    ) -> int:
        """Makes a pool an update; see the module.

        Args:
            version: of the parameters that come of it.
            worth: what it is worth, in batches.
            last: whether it is the global step's last update.
            mean: where the mean of the pool is to be kept.

        Returns:
            Bits of the optimizers that stepped, or would have without an overflow.
        """
        if pool.numbers is not None:
            self._clips = self.hyper.apply(pool.numbers)
        at_once = -1 if worth == 1.0 else pool.zeroes & pool.steps
        zeroed = pool.zeroes & at_once | (pool.zeroes | self._spent) & ~at_once & ~self._begun
        self._begun = 0 if last else self._begun | zeroed
        self._spent &= ~zeroed
        # A sum over a part of a batch is as much smaller already as the part is worth.
        whole = pool.factor(None if self.divide_by is None else self.divide_by * worth)

        def work(shard: int) -> None:
            for run in self._runs[shard]:
                for i in run:
                    parameter = self.parameters[i]
                    if self._owners[i] & zeroed and (old := parameter.grad) is not None:
                        parameter.grad = None
                        self.spares.give(i, old)
                if pool.overflow:
                    continue
                parts = [i for i in run if self._owners[i] & at_once], [i for i in run if not self._owners[i] & at_once]
                for part, factor in zip(parts, (whole, whole * worth), strict=True):
                    pool.sum_up(part, factor)
                    for i in part:
                        if mean is not None and (total := pool.sums[i]) is not None:
                            mean.values[i] = total.clone()
                        pool.give_to(i, self.parameters[i])

        self.shards.run(work)
        pool.summed_up()
        stepping = pool.steps if last else pool.steps & at_once
        if not pool.overflow:
            for o in bits(stepping):
                self._clip_gradients(o, *self._clips[o])
                with self._learning_rates_times(o, worth if at_once >> o & 1 else 1.0):
                    self._step(o)
        self._spent |= stepping & ~at_once
        pool.buffers.apply(self.buffers, worth, self._changed, version)
        return stepping

    def _clip_gradients(self, o: int, kind: int, value: float) -> None:
        if kind == CLIP_NORM:
            torch.nn.utils.clip_grad_norm_(_parameters_of(self.optimizers[o]), value)
        elif kind == CLIP_VALUE:
            torch.nn.utils.clip_grad_value_(_parameters_of(self.optimizers[o]), value)

    @contextmanager
    def _learning_rates_times(self, o: int, worth: float) -> Iterator[None]:
        groups = [] if worth == 1.0 else [group for group in self.optimizers[o].param_groups if "lr" in group]
        before = [group["lr"] for group in groups]
        for group, lr in zip(groups, before, strict=True):
            group["lr"] = lr * worth
        try:
            yield
        finally:
            for group, lr in zip(groups, before, strict=True):
                group["lr"] = lr

    def call(self, o: int, text: str) -> None:
        """Calls a method of an optimizer; ``text`` begins with its name and a bracket.

        Raises:
            RunEndsError: it has failed, or returned something.
        """
        try:
            value = getattr(self.optimizers[o], text.partition("(")[0])()
        except Exception as error:
            raise RunEndsError(f"{text} failed in the parameter server: {type(error).__name__}: {error}") from error
        if value is not None:
            raise RunEndsError(
                f"{text} returns {value!r:.100}, which the ranks cannot have: it is called in the parameter server."
                " Use strategy='hetero_balanced'"
            )

    # ---- state ------------------------------------------------------------------------------------------------

    def state_dicts(self) -> list[dict[str, Any]]:
        """Returns the optimizers' states as in their ``state_dict()``; of the groups, which are the workers', what the
        steps have changed."""
        # What Lightning puts in the place of no optimizer has none.
        states = (optimizer.state_dict().get("state", {}) for optimizer in self.optimizers)
        return [  # threads make entries in any order
            {"state": dict(sorted(state.items())), "groups": groups}
            for state, groups in zip(states, self.hyper.own_entries(), strict=True)
        ]


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
