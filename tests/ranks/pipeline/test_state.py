"""Ownership, pruning and whole-model checkpoints: what several ranks save is what one process saves."""

from __future__ import annotations

import gc
import os
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hetero.pipeline.runtime.ownership.full_state import load_mapped
from lightning_hetero.pipeline.runtime.ownership.ownership import Ownership, tied
from lightning_hetero.pipeline.runtime.ownership.pruning import prune, restore
from tests.ranks.harness import run_ranks
from tests.ranks.pipeline.ownership_kit import PLANS, Counted, Model, plan, same
from tests.ranks.pipeline.state_kit import OPTIMIZERS, Divided

WORLD = 4


# ---- who holds what --------------------------------------------------------------------------------------------


def test_owners_are_one_rank_per_group_and_names_are_those_of_the_state_dict() -> None:
    model = Model()
    o = Ownership(model, model.layers, PLANS["2x2"], rank=2)
    assert set(model.state_dict()) - o.layer_of.keys() == {
        f"{n}._extra_state" for n in ("net.0", "net.3", "first")
    }
    assert o.parameters == tuple(n for n, _ in model.named_parameters())
    assert o.layer_of["net.4.bias"] == 4 and o.layer_of["embed.bias"] is None
    assert o.layer_of["first.linear.weight"] == 0, "an alias of a layer is the layer"
    assert [o.owners(f"net.{i}.weight") for i in (1, 4)] == [(3, 0), (1, 2)]
    assert o.owners("net.3.linear.weight") == (1, 2) and o.owners("head.weight") == (3, 0)
    assert o.holders("net.3.mask") == (3, 0, 1, 2), (
        "a shared buffer is where its layers are, its owners first"
    )
    assert o.owners_of_key("net.3._extra_state") == (1, 2) and o.owners_of_key("of.nobody") == (3, 0)
    assert o.holds("net.3.norm.weight") and not o.holds("net.0.norm.weight")
    assert o.holds("net.3.mask") and not o.holds("embed.weight") and not o.holds("unused")


def test_tied_weights_must_stay_on_one_rank() -> None:
    model = Model()
    assert tied(model, model.layers) == [], "head and embedding are both outside"
    model.net[3].linear.weight = model.net[0].linear.weight
    model.net[1].weight = model.embed.weight
    first, second = sorted(tied(model, model.layers), key=lambda entry: len(entry.layers))
    assert (first.layers, None in first.units, set(first.names)) == (
        (1,), True, {"embed.weight", "head.weight", "net.1.weight"},
    )  # fmt: skip
    assert (second.layers, None in second.units) == ((0, 3), False)
    together = plan(((1, 0), (0, 4, 5)))
    o = Ownership(model, model.layers, together, rank=0)
    assert o.layer_of["net.1.weight"] is None and o.is_shared("net.1.weight") and not o.is_shared("head.bias")
    with pytest.raises(
        ValueError, match=r"used by layer 0 and layer 3, but group 0 .* ranks \[0, 1\].*untie"
    ):
        Ownership(model, model.layers, plan(((1, 0), (0, 2, 5))), rank=0)
    with pytest.raises(ValueError, match=r"used by layer 1 and the code outside the layers, but group 1"):
        Ownership(model, model.layers, plan(((3,), (0, 5)), ((0, 1), (0, 1, 5))), rank=0)


def test_layers_must_be_initialised_and_what_is_added_later_is_left_alone() -> None:
    lazy = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ValueError, match=r"'0.weight' has no shape yet"):
        tied(lazy, list(lazy))
    model = Model()
    o = Ownership(model, model.layers, PLANS["1x1"], rank=0)
    before = [*o.tensors(model)]
    model.net[2] = nn.Linear(2, 2)  # had no parameters
    assert [*o.tensors(model)] == before


# ---- pruning ---------------------------------------------------------------------------------------------------


def test_pruning_frees_the_memory_and_keeps_names_positions_and_attributes() -> None:
    model = Model()
    model.rnn = nn.LSTM(3, 3).double()  # keeps a list of its weights
    optimizers = [
        torch.optim.Adagrad(model.net.parameters()),
        torch.optim.SGD(model.rnn.parameters(), lr=1.0),
    ]
    before = dict(model.state_dict(keep_vars=True))
    shapes = {name: (t.shape, t.requires_grad) for name, t in before.items() if isinstance(t, Tensor)}
    groups = [list(o.param_groups[0]["params"]) for o in optimizers]
    held = Ownership(model, model.layers, PLANS["2x2"], rank=2)
    gone = [weakref.ref(t.untyped_storage()) for n, t in model.named_parameters() if not held.holds(n)]
    reference = model.embed.weight  # a user's
    model.net[0].linear.weight.grad = torch.ones_like(model.net[0].linear.weight)
    keys = list(model.state_dict())
    prune(model, optimizers, held)
    gc.collect()
    assert all(ref() is None for ref in gone)
    with pytest.raises(RuntimeError, match=r"reference to embed\.weight"):
        reference.numel()
    assert list(model.state_dict()) == keys
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            continue
        assert tensor.is_meta != held.holds(name) and (tensor.shape, tensor.requires_grad) == shapes[name], name
        assert (tensor is before[name]) == held.holds(name), name
        assert tensor.grad is None
    assert model.embed.bias.of_user == "kept" and isinstance(model.embed.bias, nn.Parameter)
    assert model.head.weight is model.embed.weight and model.first.linear.weight.is_meta
    assert all(weight.is_meta for weight in model.rnn._flat_weights)
    for optimizer, old in zip(optimizers, groups, strict=True):
        new = optimizer.param_groups[0]["params"]
        assert len(new) == len(old) and all(n is o or n.is_meta for n, o in zip(new, old, strict=True))
        assert all(not p.is_meta for p in optimizer.state), "state of what is gone is gone"
    assert len(optimizers[0].state) == sum(not p.is_meta for p in optimizers[0].param_groups[0]["params"]) > 0
    prune(model, optimizers, held)  # once more changes nothing
    assert list(model.state_dict()) == keys


# ---- on several ranks ------------------------------------------------------------------------------------------

def _checkpoints(rank: int, world: int) -> None:
    names = list(PLANS)
    for turn, (name, kind) in enumerate(zip(names, [*OPTIMIZERS, *OPTIMIZERS], strict=True)):
        part = Divided(rank, PLANS[name], kind)
        part.train(3, seed=0)
        saved, expected = part.saved(), part.expected()
        path = f"{turn}.ckpt"
        if rank == 0:
            assert same(expected, saved), (name, kind)
            assert saved["state"]._metadata == expected["state"]._metadata
            torch.save(saved, path)
            assert same(expected, torch.load(path, weights_only=True)), (name, kind)
            assert abs(os.path.getsize(path) - _size(expected)) < 4096, "tied weights are written once"
        else:
            assert saved == {"state": {}, "optimizers": [{}] * len(part.optimizers)}
        dist.barrier()
        other = names[(turn + 1) % len(names)]
        there = Divided(rank, PLANS[other], kind)
        there.train(1, seed=50)
        there.load(path)
        there.train(2, seed=100)
        saved, expected = there.saved(), there.expected()
        assert rank != 0 or same(expected, saved), f"{kind} from {name} to {other}"
        _refusals(there)
        restore(there.model, (), there.held, there.state.group)
        assert same(there.model.state_dict(), _from_rank_0(expected["state"])), other
        assert [p.requires_grad for p in there.model.parameters()] == [
            p.requires_grad for p in there.whole.parameters()
        ]
        there.model.loss(torch.randn(3, 6, dtype=torch.float64)).backward()
        assert there.model.head.weight is there.model.embed.weight


def _size(state: Any) -> int:
    with open("expected.ckpt", "wb") as file:
        torch.save(state, file)
    return os.path.getsize("expected.ckpt")


def _from_rank_0(state: Any) -> Any:
    box = [state]
    dist.broadcast_object_list(box, 0)
    return box[0]


def _refusals(part: Divided) -> None:
    state = part.whole.state_dict()
    weight = state.pop("net.4.weight")
    with pytest.raises(RuntimeError, match=r"Missing.*net\.4\.weight"):
        part.state.load_state_dict(state)
    assert part.state.load_state_dict({**state, "new": weight}, strict=False) == (["net.4.weight"], ["new"])
    with pytest.raises(RuntimeError, match=r"size mismatch for net\.4\.weight"):
        part.state.load_state_dict({**state, "net.4.weight": weight[1:]})
    former = part.state.optimizer_state(torch.optim.SGD([nn.Parameter(torch.zeros(2))]))
    assert part.held.rank != 0 or former["param_groups"][0]["params"] == [0]  # of a layer that was replaced
    other = torch.optim.SGD(list(part.model.parameters())[:2])
    with pytest.raises(ValueError, match="doesn't match the size"):
        part.state.load_optimizer_state(other, torch.optim.SGD(part.whole.parameters()).state_dict())
    rank = part.held.rank
    part.model.head.register_state_dict_post_hook(_failing if rank == 2 else _renaming)
    with pytest.raises(RuntimeError, match=r"^rank 2: ZeroDivisionError: of the user$"):
        part.state.state_dict()
    part.model.head._state_dict_hooks.clear()
    part.model.net[4].register_state_dict_post_hook(_renaming)
    part.whole.net[4].register_state_dict_post_hook(_renaming)
    saved, expected = part.state.state_dict(), part.whole.state_dict()
    assert rank != 0 or (same(expected, saved) and "renamed" in saved and "net.4.bias" not in saved)
    part.model.net[4]._state_dict_hooks.clear()


def _failing(*_: Any) -> None:
    raise ZeroDivisionError("of the user")


def _renaming(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    state["renamed"] = state.pop(f"{prefix}bias") * 2


def test_checkpoints_are_those_of_one_process_under_every_plan() -> None:
    run_ranks(WORLD, _checkpoints)


# ---- files -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory in use from /proc")
def test_what_cannot_be_mapped_is_left_to_others(tmp_path: Path) -> None:
    old = tmp_path / "old.ckpt"
    torch.save({"a": torch.zeros(2)}, old, _use_new_zipfile_serialization=False)
    assert load_mapped(old) is None
    assert load_mapped(tmp_path / "none.ckpt") is None
    assert load_mapped("memory://bucket/a.ckpt") is None
    code = tmp_path / "code.ckpt"
    torch.save({"a": Counted}, code)
    with pytest.raises(pickle.UnpicklingError, match="eights"):
        load_mapped(code, weights_only=True)
