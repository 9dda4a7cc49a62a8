"""Any plan computes what one process computes: stages, schedules, suspended training steps, gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.pipeline.schedules import one_f_one_b
from lightning_hetero.pipeline.runtime.execute.stage_runner import MicroBatch
from lightning_hetero.types import GroupPlan
from tests.ranks.harness import run_ranks
from tests.ranks.pipeline import models
from tests.ranks.pipeline.models import LAYERS, Case, Net, assert_same, make_runner, plan

CASES = {
    "plain": Case(models.plain, steps=8),
    "two batches per step": Case(models.twice, calls=2, steps=4, accumulate=2),
    "textbook": Case(models.plain, options={"policy": one_f_one_b}),
    "skip": Case(models.skip),
    "twice": Case(models.twice, calls=2, steps=5),
    "teacher": Case(models.teacher, calls=2),
    "pair": Case(models.pair, block=models.PairBlock),
    "data": Case(models.data),
    "frozen": Case(models.plain, frozen=("embed", "backbone.0", "backbone.1", "backbone.2", "backbone.6")),
    "all layers frozen": Case(models.skip, frozen=("backbone",)),
    "nothing to go back": Case(models.plain, frozen=("backbone", "embed")),
    "apart": Case(models.apart),
    "checkpoint": Case(models.twice, calls=2, checkpoint=True),
    "checkpoint, data": Case(models.data, checkpoint=True),
    "bfloat16": Case(models.half, dtype=torch.float32, tolerance=1e-6),
    "checkpoint, bfloat16": Case(models.half, checkpoint=True, dtype=torch.float32, tolerance=1e-6),
}


ONE = plan([((0,), (0, LAYERS), (3, 1, 2))])
TWO = plan([((1, 0), (0, 2, LAYERS), (3, 1, 2, 1))])
FOUR = plan([((0, 1, 2, 3), (0, 1, 3, 6, LAYERS), (2, 1, 3, 1, 1))])
TWO_BY_TWO = plan([((0, 1), (0, 3, LAYERS), (2, 1)), ((3, 2), (0, 5, LAYERS), (1, 3, 1))])


def own_parameters(net: Net, group: GroupPlan, rank: int) -> list[nn.Parameter]:
    position = group.ranks.index(rank)
    layers = net.backbone[group.cuts[position] : group.cuts[position + 1]]
    own = [*layers.parameters()]
    if position == 0:
        own += [p for name, p in net.named_parameters() if not name.startswith("backbone")]
    return own


def add_up(parameters: list[nn.Parameter], own: list[nn.Parameter]) -> None:
    """Adds up the gradients of all ranks, for those who own them."""
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    present = torch.tensor([p.grad is not None for p in parameters], dtype=grads[0].dtype)
    flat = torch.cat([*(grad.flatten() for grad in grads), present])
    dist.all_reduce(flat)
    *sums, present = flat.split([*(p.numel() for p in parameters), len(parameters)])
    ids = {id(p) for p in own}
    for p, total, some in zip(parameters, sums, present, strict=True):
        p.grad = total.view_as(p).clone() if some and id(p) in ids else None


def sizes_of(groups: list[GroupPlan]) -> list[int]:
    return [size for group in groups for size in group.micro_batches]


def train(case: Case, groups: list[GroupPlan], rank: int, name: str, expected: Mapping[str, Tensor]) -> float:
    """Trains this rank's part; returns the largest difference of its parameters to one process's."""
    sizes = sizes_of(groups)
    net = case.net()
    group = next((group for group in groups if rank in group.ranks), None)
    own = own_parameters(net, group, rank) if group is not None else []
    others = [p for p in net.parameters() if all(p is not one for one in own)]
    for parameter in others:
        nn.init.constant_(parameter.detach(), math.nan)
    optimizer = models.optimizer_of(own) if own else None
    runner = make_runner(case, net, group, rank, name) if group is not None else None
    for step in range(case.steps):
        batch = case.batch(step, sum(sizes))
        parts = list(zip(*(part.split(sizes) for part in batch), strict=True))
        torch.manual_seed(step)
        before = torch.get_rng_state()
        if runner is not None and group is not None:
            first = sum(len(other.micro_batches) for other in groups[: groups.index(group)])
            numbers = range(first, first + len(group.micro_batches))
            armed: list[list[bool]] = []

            def arm(armed: list[list[bool]] = armed) -> None:
                armed.append([p.grad is not None for p in own])

            if rank == group.ranks[0]:
                batches = [
                    MicroBatch(
                        body=lambda part=parts[number]: case.step(net, part),
                        samples=sizes[number],
                        weight=sizes[number] / sum(sizes),
                        number=number,
                    )
                    for number in numbers
                ]
                results = runner.train(step, batches, before_last_backward=arm)
                assert [result["size"] for result in results] == list(group.micro_batches)
                assert all(not result["loss"].requires_grad for result in results)
            else:
                runner.serve(step, group.micro_batches, before_last_backward=arm)
            assert len(armed) == 1
        assert torch.equal(before, torch.get_rng_state())
        assert all(p.grad is None for p in others)
        if (step + 1) % case.accumulate:
            continue
        add_up(list(net.parameters()), own)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    if runner is not None:
        runner.close()
        runner.close()
    worst = 0.0
    for name, parameter in net.named_parameters():
        if any(parameter is p for p in own):
            error = (parameter - expected[name]).detach().abs().max() / expected[name].abs().max()
            worst = max(worst, float(error))
    return worst


def at_the_edges(groups: list[GroupPlan], rank: int) -> None:
    """A step of evaluation that draws, a loss that is scaled, and what is refused."""
    case = Case(models.plain, dtype=torch.float32)
    group = next((group for group in groups if rank in group.ranks), None)
    if group is None:
        return
    net = case.net()
    runner = make_runner(case, net, group, rank, "edges")
    leads, size = rank == group.ranks[0], sum(group.micro_batches)
    x = case.batch(0, size)[0]

    def body() -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return net.backbone(net.backbone(x).relu_()), "text"

    with torch.no_grad():
        if leads:  # three in flight behind one another, told apart by what they draw
            outputs = runner.evaluate(0, [(number, body) for number in (0, 3, 2)], samples=size)
            for number, output in zip((0, 3, 2), outputs, strict=True) if len(group.ranks) > 1 else ():
                with models.seeded_layers(net, 0, number):
                    assert_same(output, body())
        else:
            runner.serve_evaluation(0)
    assert all(p.grad is None for p in net.parameters())
    if leads:
        parts = zip(*(part.split(group.micro_batches) for part in case.batch(0, size)), strict=True)
        batches = [
            MicroBatch(body=lambda part=part: case.step(net, part), samples=len(part[0]), weight=1.0, number=i)
            for i, part in enumerate(parts)
        ]
        runner.train(0, batches, scale=lambda loss: loss * math.inf)
        assert net.head.weight.grad is not None and not net.head.weight.grad.isfinite().all()
    else:
        runner.serve(0, group.micro_batches)
    runner.close()
    with pytest.raises(RuntimeError, match="is closed"):
        runner.evaluate(0, [(0, body)], samples=1)


def all_cases(
    rank: int, world_size: int, groups: list[GroupPlan], expected: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, float]:
    errors = {name: train(CASES[name], groups, rank, name, theirs) for name, theirs in expected.items()}
    at_the_edges(groups, rank)
    return errors


def assert_exact(world_size: int, groups: list[GroupPlan]) -> None:
    expected = {name: models.reference(case, sizes_of(groups)).state_dict() for name, case in CASES.items()}
    for rank, errors in enumerate(run_ranks(world_size, all_cases, groups, expected)):
        for name, error in errors.items():
            assert error <= CASES[name].tolerance, (rank, name, error)


def test_one_rank() -> None:
    assert_exact(1, ONE)


@pytest.mark.long
def test_two_ranks() -> None:
    assert_exact(2, TWO)


def test_four_ranks() -> None:
    assert_exact(4, FOUR)


@pytest.mark.long
def test_two_groups_of_two() -> None:
    assert_exact(4, TWO_BY_TWO)
