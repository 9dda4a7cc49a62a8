"""Gradients over groups with different cuts: sums, norms, clipping and AMP's decision are those of one process."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hetero.pipeline.runtime.ownership import gradients as summing
from lightning_hetero.pipeline.runtime.ownership.gradients import GradientSync, fill_buckets
from lightning_hetero.pipeline.runtime.ownership.owner_groups import OwnerGroups, share_buffers, share_initial
from lightning_hetero.pipeline.runtime.ownership.ownership import Ownership
from lightning_hetero.transport.failures import FailureBoard
from lightning_hetero.transport.one_round import Sum, start_sum
from lightning_hetero.transport.run_store import RunStore
from lightning_hetero.types import PipelinePlan
from tests.ranks.harness import run_ranks
from tests.ranks.pipeline.ownership_kit import PLANS, Model, plan
from tests.ranks.pipeline.state_kit import Divided

WORLD = 4
NOBODY: Any = None  # no group


class Rank(Divided):
    """One rank's part of a model under a plan, and the same model undivided."""

    def __init__(self, rank: int, the_plan: PipelinePlan, **kwargs: Any) -> None:
        super().__init__(rank, the_plan, "Adagrad")
        self.groups = OwnerGroups(self.state.group)
        self.sync = GradientSync(self.model, self.held, groups=self.groups, **kwargs)
        self.group = next((g for g, ranks in enumerate(self.held.groups) if rank in ranks), None)
        self.pairs = list(zip(self.model.parameters(), self.whole.parameters(), strict=True))

    def backward(self, gradients: Sequence[Tensor | None]) -> None:
        """A backward pass of this rank that adds these gradients, of all parameters, to those of its own."""
        terms = [
            (p * g).sum()
            for (p, _), g in zip(self.pairs, gradients, strict=True)
            if g is not None and not p.is_meta and p.requires_grad
        ]
        if terms:
            torch.stack(terms).sum().backward()

    def distance(self) -> float:
        """The greatest relative difference of this rank's gradients from those of the whole model."""
        worst = 0.0
        for mine, whole in self.pairs:
            if mine.is_meta:
                assert mine.grad is None
                continue
            assert (mine.grad is None) == (whole.grad is None), tuple(mine.shape)
            if mine.grad is not None and whole.grad is not None:
                worst = max(worst, float((mine.grad - whole.grad).abs().max() / whole.grad.abs().max()))
        return worst


def _random(model: Model, seed: int, without: Iterable[str] = ()) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(p.shape, generator=generator, dtype=p.dtype)
        if p.requires_grad and n not in without
        else None
        for n, p in model.named_parameters()
    ]


def _add(model: Model, gradients: Sequence[Tensor | None]) -> None:
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        if gradient is not None:
            parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad + gradient


def _board(rank: int) -> FailureBoard:
    return FailureBoard(RunStore(dist.distributed_c10d._get_default_store(), b""), rank)


def _everything(rank: int, world: int, all_sizes: bool) -> None:
    sizes = ((1, True), (700, True), (700, False), (1 << 20, True))
    for number, (name, the_plan) in enumerate(PLANS.items()):
        for bucket_bytes, armed in sizes if all_sizes else sizes[number % 2 :: 2]:
            part = Rank(rank, the_plan, bucket_bytes=bucket_bytes, wait=_board(rank).wait)
            for step in range(2):
                part.model.zero_grad()
                part.whole.zero_grad()
                # group 1 does not use one layer, no group uses "unused"; each accumulates two micro-batches
                lacking = [["unused"], ["unused", "net.3.linear.weight", "net.3.linear.bias"]]
                for micro in range(2):
                    for group in range(len(the_plan.groups)):
                        seed = 100 * step + 10 * group + micro
                        gradients = _random(part.whole, seed, lacking[min(group, 1)])
                        _add(part.whole, gradients)
                        if group == part.group:
                            if armed and micro == 1:
                                part.sync.arm()
                            part.backward(gradients)
                part.sync.finish()
                assert part.distance() < 1e-14, (name, bucket_bytes, armed)
            _norms(part)
            _amp(part, rank)
        _buffers(part, rank)


def _norms(part: Rank) -> None:
    subset = [i for i, (p, _) in enumerate(part.pairs) if i % 2]
    for some in (range(len(part.pairs)), subset):
        mine, whole = [part.pairs[i][0] for i in some], [part.pairs[i][1] for i in some]
        expected = nn.utils.clip_grad_norm_(whole, 0.3)
        total = part.sync.clip_by_norm(mine, 0.3)
        assert total.dtype == expected.dtype and total.shape == expected.shape
        assert abs(float(total / expected) - 1) < 1e-12
        assert part.distance() < 1e-12


def _amp(part: Rank, rank: int) -> None:
    assert not part.sync.agree_nonfinite()
    _scaler(part, rank)
    for value in (math.inf, math.nan):
        owner = part.held.owners("net.4.bias")[-1]
        gradient = part.model.net[4].bias.grad
        if rank == owner:
            assert gradient is not None
            gradient[1] = value
        total = part.sync.norm([p for p, _ in part.pairs])
        counted = owner == part.held.owners("net.4.bias")[0]
        assert not counted or (float(total) == math.inf if value == math.inf else math.isnan(float(total)))
        assert part.sync.agree_nonfinite()
        mine = [p.grad for p, _ in part.pairs if p.grad is not None]
        assert not mine or not all(g.isfinite().all() for g in mine)
        for g in mine:
            g.fill_(1.0)


def _scaler(part: Rank, rank: int) -> None:
    """torch's own scaler skips a step on all ranks, though the overflow is on one."""
    owned = [p for p in part.model.parameters() if not p.is_meta and p.grad is not None]
    if rank == part.held.owners("net.4.bias")[0]:
        part.model.net[4].bias.grad[0] = math.inf  # type: ignore[index]
    assert part.sync.agree_nonfinite()
    if owned:
        before = [p.detach().clone() for p in owned]
        scaler, sgd = torch.amp.GradScaler("cpu", init_scale=1024.0), torch.optim.SGD(owned, lr=1.0)
        scaler.scale(torch.zeros(()))
        scaler.step(sgd)
        scaler.update()
        assert scaler.get_scale() == 512.0
        assert all(torch.equal(p, b) for p, b in zip(owned, before, strict=True))
    for parameter in owned:
        parameter.grad = torch.ones_like(parameter)


def _buffers(part: Rank, rank: int) -> None:
    for i, (_, buffer) in enumerate(part.model.named_buffers()):
        if not buffer.is_meta:
            buffer.fill_(10 * i + rank) if buffer.dtype != torch.bool else None
    share_buffers(part.model, part.held, part.groups)
    for i, (name, buffer) in enumerate(part.model.named_buffers()):
        if not buffer.is_meta and buffer.numel():
            assert (buffer == 10 * i + part.held.owners(name)[0]).all(), name


@pytest.mark.parametrize("all_sizes", [False, pytest.param(True, marks=pytest.mark.long)])
def test_sums_norms_clipping_and_buffers_under_every_plan(all_sizes: bool) -> None:
    """In buckets of two sizes for each plan, or of all."""
    run_ranks(WORLD, _everything, all_sizes)


SUMS: list[Tensor] = []


def _faults(rank: int, world: int) -> None:
    with patch.object(summing, "start_sum", noted):
        _faults_counted(rank)


def noted(tensor: Tensor, group: dist.ProcessGroup) -> Sum:
    SUMS.append(tensor)
    return start_sum(tensor, group)


def _faults_counted(rank: int) -> None:
    board = _board(rank)
    part = Rank(rank, PLANS["4x1"], bucket_bytes=1, wait=board.wait)
    part.sync.arm()
    part.sync.finish()  # nobody has a gradient
    assert all(p.grad is None for p, _ in part.pairs)

    # a layer that is frozen in between, and thawed again
    for frozen in (True, False):
        part.model.net[4].requires_grad_(not frozen)
        part.whole.net[4].requires_grad_(not frozen)
        part.model.zero_grad()
        part.whole.zero_grad()
        for group in range(4):
            gradients = _random(part.whole, group)
            _add(part.whole, gradients)
            if group == part.group:
                part.sync.arm()
                part.backward(gradients)
        part.sync.finish()
        assert part.distance() < 1e-14

    # a second gradient after the first was sent
    part.sync.arm()
    gradients = _random(part.whole, 1)
    before = len(SUMS)
    part.backward(gradients)
    layers = sum(
        part.held.layer_of[n] is not None for n, p in part.model.named_parameters() if p.requires_grad
    )
    assert len(SUMS) - before == layers > 5, "each is summed as soon as it is complete, but what is outside"
    with pytest.raises(RuntimeError, match=r"further gradient after .* use_reentrant=False"):
        part.backward(gradients)
    part.sync.finish()
    part.backward(gradients)  # no hook is left

    weight = part.model.net[4].weight
    weight.grad = weight.detach().to_sparse()
    with pytest.raises(TypeError, match="sparse=False"):
        part.sync.finish()
    weight.grad = None
    dist.barrier()
    # rank 3 fails and never comes: the others learn why while they wait
    if rank == 3:
        board.report(RuntimeError("rank 3 has failed"))
        return
    with pytest.raises(RuntimeError, match="rank 3 has failed"):
        part.sync.norm([p for p, _ in part.pairs])


def test_faults_of_the_synchronisation() -> None:
    run_ranks(WORLD, _faults)


def _order(rank: int, world: int) -> list[list[int]]:
    """Owners of each sum in the order in which this rank begins them."""
    groups = ((0,), (0, 5)), ((1,), (0, 5)), ((2, 3), (0, 2, 5))  # ranks 0 and 1 are in two sets of owners
    part = Rank(rank, plan(*groups), bucket_bytes=1, wait=_board(rank).wait)
    part.sync.arm()
    begun: list[list[int]] = []

    def start(tensor: Tensor, group: Any) -> Sum:
        begun.append(dist.get_process_group_ranks(group))
        return start_sum(tensor, group)

    with patch.object(summing, "start_sum", start):
        if rank != 1:  # whose group has nothing to do in this batch
            part.backward(_random(part.whole, part.group))
        part.sync.finish()
    return begun


def test_all_ranks_begin_sums_in_one_order_whoever_has_gradients() -> None:
    begun = run_ranks(WORLD, _order)
    ahead: set[tuple[tuple[int, int, int], ...]] = set()
    for own in begun:  # the n-th sum of a set of owners is the same one on all of them
        seen = [(*owners, sum(o == owners for o in own[:i])) for i, owners in enumerate(own)]
        ahead |= {(a, b) for i, a in enumerate(seen) for b in seen[i + 1 :]}  # type: ignore[misc]
    assert not any((b, a) in ahead for a, b in ahead)


def _different(rank: int, world: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    model = Model()
    if rank == 1:
        model.net[4] = nn.Linear(6, 11).double()
    held = Ownership(model, model.layers, plan(((0, 1), (0, 2, 5))), rank=rank)
    with pytest.raises(RuntimeError, match=r"ranks \[1\] have another model or another plan than rank 0"):
        share_initial(model, held, group)


def test_a_model_that_differs_between_ranks_is_refused() -> None:
    run_ranks(2, _different)


def test_buckets_are_filled_in_order_per_dtype_and_few_early_gradients_travel_with_late_ones() -> None:
    a, b, c = (nn.Parameter(torch.zeros(4)) for _ in range(3))  # 16 bytes each
    half = nn.Parameter(torch.zeros(4).half())
    entries = [(a, False), (half, False), (b, False), (c, True)]
    for least_bytes, expected in {
        0: [([a, b], False), ([half], False), ([c], True)],
        33: [([a, b], True), ([half], False), ([c], True)],  # there is nothing late of half's dtype to travel with
    }.items():
        buckets = fill_buckets(entries, 32, group=NOBODY, least_bytes=least_bytes)
        found = [([id(p) for p in bucket.parameters], bucket.late) for bucket in buckets]
        assert found == [([id(p) for p in parameters], late) for parameters, late in expected]
