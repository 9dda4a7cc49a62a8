"""Layers change hands with all that belongs to them, or nothing changes on any rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_hetero.pipeline.runtime.ownership import migration as migrating
from lightning_hetero.pipeline.runtime.ownership.full_state import WholeState
from lightning_hetero.pipeline.runtime.ownership.migration import CancelledError, Migration, moves
from lightning_hetero.pipeline.runtime.ownership.owner_groups import OwnerGroups
from lightning_hetero.pipeline.runtime.ownership.ownership import Ownership
from tests.ranks.harness import run_ranks
from tests.ranks.pipeline.ownership_kit import PLANS, Model, frozen, plan, same
from tests.ranks.pipeline.state_kit import OPTIMIZERS, Divided

WORLD, CPU = 4, torch.device("cpu")


def migration(part: Divided, name: str, **options: Any) -> Migration:
    assert dist.group.WORLD is not None
    new = Ownership(part.model, part.model.layers, PLANS[name], rank=part.held.rank)
    found = Migration(
        part.model, part.optimizers, part.held, new, device=CPU, group=dist.group.WORLD, wait=dist.Work.wait,
        wait_for_peer=lambda work: work.wait(), **options,
    )
    found.plan = new  # type: ignore[attr-defined]
    return found


def go(part: Divided, name: str, **options: Any) -> Migration:
    change = migration(part, name, **options)
    change.stage({"to": name})
    change.commit()
    part.held = change.plan  # type: ignore[attr-defined]
    part.state = WholeState(part.model, part.held, group=part.state.group)
    return change


# ---- who sends what --------------------------------------------------------------------------------------------------


def test_only_what_is_missing_is_sent_and_senders_share_the_work() -> None:
    model = Model()

    def change(old: Any, new: Any) -> list[tuple[str, int, int]]:
        before, after = (Ownership(model, model.layers, p, rank=0) for p in (old, new))
        return [(m.name, m.source, m.target) for m in moves(before, after, model)]

    one = plan(((0, 1), (0, 2, 5)))
    assert change(one, one) == []
    assert change(one, plan(((0, 1), (0, 3, 5)))) == []  # layer 2 has nothing
    border = change(one, plan(((0, 1), (0, 4, 5))))
    assert {(s, t) for _, s, t in border} == {(1, 0)} and all(n.startswith("net.3") for n, _, _ in border)
    assert "net.3.mask" not in [n for n, _, _ in border], "rank 0 has the mask that all layers share"
    lead = {n for n, s, t in change(one, plan(((1, 0), (0, 2, 5)))) if (s, t) == (0, 1)}
    assert {"embed.weight", "embed.bias", "head.bias", "unused", "net.0.linear.weight", "net.0"} <= lead
    assert "head.weight" not in lead, "tied weights are one tensor"
    two, four = plan(((0,), (0, 5)), ((1,), (0, 5))), plan(*(((r,), (0, 5)) for r in range(4)))
    spread = change(two, four)
    sources = {(n, t): s for n, s, t in spread if n.endswith("weight")}
    assert {s for s in sources.values()} == {0, 1}
    statistics = change(two, plan(((1,), (0, 5)), ((0,), (0, 5))))
    assert {n.split(".")[-1] for n, _, _ in statistics} == {
        "mask", "empty", "calls", "running_mean", "running_var", "num_batches_tracked", "0", "3",
    }, "those of the lowest group stay those of the lowest group"  # fmt: skip
    assert {(s, t) for _, s, t in statistics} == {(0, 1)}


# ---- what arrives ----------------------------------------------------------------------------------------------------


def _moving(rank: int, world: int, all_kinds: bool) -> None:
    names = list(PLANS)
    through = (*names, names[2], names[0])
    for kind in OPTIMIZERS:
        part = Divided(rank, PLANS[names[-1]], kind)
        for i, name in enumerate(through if all_kinds or kind.startswith("two") else through[::2]):
            part.train(2, seed=10 * i)
            assert go(part, name).size_bytes > 0
            for tensor_name, tensor in part.held.tensors(part.model).items():
                assert tensor.is_meta != part.held.holds(tensor_name), tensor_name
            assert part.model.head.weight is part.model.embed.weight
            assert all(not p.is_meta for o in part.optimizers for p in o.state)
            saved = part.saved()
            assert rank != 0 or same(part.expected(), saved), (kind, name)
        part.train(2, seed=1000)
        saved = part.saved()
        assert rank != 0 or same(part.expected(), saved), kind


@pytest.mark.parametrize("all_kinds", [False, pytest.param(True, marks=pytest.mark.long)])
def test_tensors_optimizer_states_and_extra_states_arrive_bit_by_bit(all_kinds: bool) -> None:
    """With two optimizers through all plans; with one through every second plan, or all, too."""
    run_ranks(WORLD, _moving, all_kinds)


def _odd(rank: int, world: int) -> None:
    """Memory formats, hooks, gradients, trained or not, copies."""
    part = Divided(rank, PLANS["2x2"], "Adam")
    copy = Divided(rank, PLANS["2x2"], "Adam").model
    part.train(1, seed=0)
    mine = part.held.tensors(part.model)
    gone: list[int] = []
    for name, tensor in mine.items():
        if name == "net.4.weight":
            tensor.requires_grad_(False)  # since training began
        if name in part.held.parameters and part.held.holds(name):
            tensor.grad = torch.full_like(tensor, 7.0)
    weight: Any = part.model.net[0].linear.weight
    weight.register_hook(lambda g: gone.append(1))
    if part.held.holds("net.0.linear.weight"):
        state = part.optimizers[0].state[weight]
        state["odd"] = {"columns": torch.arange(12.0).view(3, 4).t(), "word": "kept", "none": torch.empty(0, 3)}
    change = go(part, "1x2 and 1x1, rank 0 rests", gradients=True, copies=[copy])
    assert change.size_bytes > 0
    for name, tensor in part.held.tensors(part.model).items():
        if part.held.holds(name) and name in part.held.parameters:
            assert tensor.grad is not None and bool((tensor.grad == 7).all()), name
            assert tensor.requires_grad == (name != "net.4.weight" and not name.startswith("net.1."))
    assert all(t.is_meta != part.held.holds(n) for n, t in part.held.tensors(copy).items())
    if part.held.holds("net.0.linear.weight"):
        weight = part.model.net[0].linear.weight
        odd = part.optimizers[0].state[weight]["odd"]
        assert odd["word"] == "kept" and odd["none"].shape == (0, 3)
        assert odd["columns"].stride() == (1, 4) and torch.equal(odd["columns"].t().flatten(), torch.arange(12.0))
        weight.sum().backward()
        assert gone == [1], "a user's hook is where the parameter is"


def test_formats_hooks_gradients_and_copies_go_along() -> None:
    run_ranks(WORLD, _odd)


# ---- or nothing does -------------------------------------------------------------------------------------------------


class Sparse:
    """Cannot be sent."""

    def __reduce__(self) -> Any:
        raise ValueError("this optimizer's state is its own")


def _cancelled(rank: int, world: int) -> list[str]:
    part = Divided(rank, PLANS["2x2"], "Adam")
    part.train(2, seed=0)
    before, said = frozen(part.state.state_dict()), []

    def refused(match: str, error: type[Exception] = CancelledError, ticket: Any = "the same") -> None:
        with pytest.raises(error, match=match) as caught:
            migration(part, "1x4").stage(ticket)
        said.append(str(caught.value))
        assert same(before, part.state.state_dict())
        assert all(t.is_meta != part.held.holds(n) for n, t in part.held.tensors(part.model).items())

    if rank == 3:
        for state in part.optimizers[0].state.values():
            state["odd"] = Sparse()
    refused("rank 3: .*its own")
    if rank == 3:
        for state in part.optimizers[0].state.values():
            del state["odd"]
    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            patch.setattr(migrating, "_rooms", _none)
        refused("rank 2: RuntimeError: out of memory")
    refused(r"ranks \[1\] are about to change", RuntimeError, "another" if rank == 1 else "the same")
    go(part, "1x4")  # as if nothing had been
    part.train(1, seed=5)
    saved = part.saved()
    assert rank != 0 or same(part.expected(), saved)
    return said


def _none(described: Any, device: Any) -> Any:
    raise RuntimeError("out of memory")


def test_what_one_rank_cannot_do_is_cancelled_on_all() -> None:
    found = run_ranks(WORLD, _cancelled)
    assert all(said == found[0] for said in found)


# ---- groups ----------------------------------------------------------------------------------------------------------


def _groups(rank: int, world: int) -> None:
    assert dist.group.WORLD is not None
    groups = OwnerGroups(dist.group.WORLD)
    made: list[Any] = []
    new_group, dist.new_group = dist.new_group, lambda *a, **k: made.append(a[0]) or new_group(*a, **k)
    try:
        groups.prepare([(1, 0), (0, 1), (2,), (3, 0, 1)])
        assert made == [[0, 1], [0, 1, 3]]
        groups.prepare([(1, 0), (2, 3)])
        groups.prepare([(0, 1, 3), (3, 2)])
        assert made == [[0, 1], [0, 1, 3], [2, 3]], "one that comes back is not made again"
    finally:
        dist.new_group = new_group
    if rank in (2, 3):
        x = torch.ones(1)
        dist.all_reduce(x, group=groups.get((3, 2)))
        assert x == 2
    groups.close()


def test_groups_are_made_once() -> None:
    run_ranks(WORLD, _groups)


def test_a_sparse_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match="only dense ones"):
        migrating._described({"a": torch.eye(2).to_sparse()}, CPU)
