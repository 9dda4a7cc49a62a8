"""Memory: a rank holds its layers only, activations up to its depth, and of a checkpoint nothing but its own part."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hetero.pipeline.runtime.ownership.full_state import is_local, load_mapped, save_streamed
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Weights, regression, single, weights
from tests.ranks.pipeline.kit import LAYERS, PLANS, WORLD, Block, Deep, fit, pipeline

MIB = 1 << 20


def storages(tensors: Iterable[Tensor]) -> int:
    """Bytes of all memory behind some tensors, each counted once."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if not t.is_meta}
    return sum(found.values())


def has_memory(tensor: Tensor) -> bool:
    """Whether it is no wrapper of a trace, which an earlier test of this process may have left."""
    try:
        return bool(tensor.untyped_storage().data_ptr())
    except RuntimeError:
        return False


def reachable() -> int:
    """Bytes of whatever Python can reach: also what an engine has put aside."""
    found = [o for o in gc.get_objects() if isinstance(o, Tensor) and not o.is_meta and o.layout is torch.strided]
    found = [o for o in found if has_memory(o)]
    return storages(found + [t.grad for t in found if t.is_leaf and t.grad is not None])


class Meter(Callback):
    """Notes what a rank holds wherever a callback may look."""

    def __init__(self) -> None:
        gc.collect()
        self.before = reachable()
        self.own = 0
        self.held: dict[str, int] = {}
        self.more: dict[str, list[int]] = {}  # messages on their way included, which are more on a busy machine

    def note(self, hook: str, trainer: Trainer) -> None:
        parameters = [p for p in trainer.lightning_module.parameters() if not p.is_meta]
        states = [s for o in trainer.optimizers for state in o.state.values() for s in state.values()]
        grads = [p.grad for p in parameters if p.grad is not None]
        self.own = storages(parameters)
        self.held[hook] = max(self.held.get(hook, 0), storages([*parameters, *grads, *states]))
        self.more.setdefault(hook, []).append(reachable() - self.before)

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        self.note("batch starts", trainer)

    def on_before_backward(self, trainer: Any, *args: Any) -> None:
        self.note("before backward", trainer)

    def on_after_backward(self, trainer: Any, *args: Any) -> None:
        self.note("after backward", trainer)

    def on_before_optimizer_step(self, trainer: Any, *args: Any) -> None:
        self.note("before step", trainer)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.note("batch ends", trainer)


def held_job(rank: int, world: int, plan: str) -> tuple[int, dict[str, int], dict[str, int]]:
    data = regression(128)
    module, strategy = Wide(), pipeline(plan)
    gc.collect()
    meter = Meter()
    meter.before -= storages(module.parameters())
    fit(rank, world, module, strategy, data=data, max_epochs=1, accumulate_grad_batches=3, callbacks=[meter])
    return meter.own, meter.held, {hook: int(median(seen)) for hook, seen in meter.more.items()}


class Wide(Deep):
    """Its layers are large against a batch."""

    def backbone(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 64), *(Block(64) for _ in range(LAYERS - 2)), nn.Linear(64, 8))


def layer_bytes() -> list[int]:
    """Of the layers, and last of what is outside."""
    module = Wide()
    sizes = [storages(layer.parameters()) for layer in module.model]  # type: ignore[union-attr]
    return [*sizes, storages([*module.before.parameters(), *module.head.parameters()])]


@pytest.mark.parametrize("plan", ["2x2", "resting"])
def test_a_rank_holds_parameters_gradients_and_optimizer_state_of_its_layers(plan: str) -> None:
    sizes, slack = layer_bytes(), 40 << 10  # messages, counters, batches, logged values
    mine = dict.fromkeys(range(WORLD[plan]), 0)
    for group in PLANS[plan]["groups"]:
        for stage, rank in enumerate(group["ranks"]):
            mine[rank] = sum(sizes[group["cuts"][stage] : group["cuts"][stage + 1]]) + (sizes[-1] if stage == 0 else 0)
    for rank, (own, held, more) in enumerate(run_ranks(WORLD[plan], held_job, plan)):
        assert own == mine[rank]
        for hook in held:  # Adam: two of everything, and gradients once, during accumulation, too
            assert held[hook] <= 4 * own + slack, (rank, hook, held[hook] / max(own, 1))
            assert more[hook] <= 4 * own + slack, (rank, hook, more[hook] / max(own, 1))
        assert max(held.values()) >= 4 * own


# ---- activations ---------------------------------------------------------------------------------------------------


class Watched(Block):
    """Counts for how many micro-batches its input is alive."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[weakref.ref[Any]] = []
        self.most = 0

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.inputs.append(weakref.ref(x.untyped_storage()))
            self.most = max(self.most, sum(ref() is not None for ref in self.inputs))
        return super().forward(x)


class Lively(Deep):
    def backbone(self) -> nn.Module:
        return nn.Sequential(*(Watched() for _ in range(LAYERS)))


class Looped(Lively):
    """The step walks the layers itself, and hands each a mask."""

    def backbone(self) -> nn.Module:
        return nn.ModuleList([Masked() for _ in range(LAYERS)])

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        mask, x = (x[:, :1] > 0).to(x), self.before(x)
        for layer in self.model:  # type: ignore[union-attr]
            x = layer(x, mask)[0]
        return F.mse_loss(self.head(x), y)


class Masked(Watched):
    def forward(self, x: Tensor, mask: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x) * mask, mask


DEPTHS = [(8, 8), (3, 2), (2, 2), (1, 1)]


def alive_job(rank: int, world: int) -> list[int]:
    found = []
    for make, depths in [*((Lively, depths) for depths in DEPTHS), (Looped, DEPTHS[1])]:
        group = {"ranks": [0, 1], "cuts": [0, 2, 6], "samples": 16, "micro_samples": 2, "depths": list(depths)}
        module = make()
        fit(rank, world, module, pipeline({"groups": [group]}), max_epochs=1, data=regression(64))
        found.append(max(layer.most for layer in module.model))  # type: ignore[union-attr]
    return found


def test_activations_are_bounded_by_the_depth() -> None:
    ranks = run_ranks(2, alive_job)
    for stage, found in enumerate(ranks):
        for depths, most in zip([*DEPTHS, DEPTHS[1]], found, strict=True):
            assert 1 <= most <= depths[stage], (stage, depths)
    assert ranks[0][0] > 3 and ranks[0][1] == 3  # the bound is what bounds


# ---- larger than a device ------------------------------------------------------------------------------------------


def capped_job(rank: int, world: int, mem: int, options: dict[str, Any]) -> tuple[Weights | str, int, int]:
    cluster = {"devices": [{"mem": mem, "count": world}], "link": {"bandwidth": "1 GiB/s", "latency": 1e-5}}
    module, meter = Wide(), Meter()
    strategy = pipeline(None, cluster=cluster, **options)
    try:
        options = {"batch": 18, "max_epochs": 1, "callbacks": [meter]}
        end, trainer = fit(rank, world, module, strategy, data=regression(90), **options)
    except (ValueError, RuntimeError) as error:
        return str(error), 0, 0
    (group,) = trainer.strategy.planned.plan.groups
    return end, max(meter.held.values()), len(group.ranks)


def test_a_model_larger_than_a_device_trains_on_three_and_is_refused_on_two_that_are_too_small() -> None:
    module = Wide()
    total = 4 * storages(module.parameters())
    mem = int(0.55 * total)
    single(module, regression(90), 18, max_epochs=1)
    for end, held, ranks in run_ranks(3, capped_job, mem, {}):
        assert isinstance(end, Weights) and end.distance(weights(module)) <= 1e-12
        assert ranks >= 2 and held <= mem < total
    for said, _, _ in run_ranks(2, capped_job, int(0.3 * total), {}):
        assert isinstance(said, str) and "no plan fits" in said, said
    for said, _, _ in run_ranks(3, capped_job, total // 20, {"max_groups": 1}):
        assert isinstance(said, str) and "model.1" in said and "B" in said, said


# ---- checkpoints ---------------------------------------------------------------------------------------------------


def test_a_file_is_replaced_when_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "of" / "a.ckpt"
    save_streamed({"w": torch.ones(1 << 16)}, path)
    old = load_mapped(path)
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
        save_streamed({"w": torch.zeros(1 << 16), "not possible": lambda: None}, path)
    save_streamed({"w": torch.full((1 << 16,), 2.0)}, path)
    new = load_mapped(path)
    assert old is not None and old["w"].unique().tolist() == [1.0]  # still mapped
    assert new is not None and new["w"].unique().tolist() == [2.0]
    assert list(path.parent.iterdir()) == [path]
    assert is_local(path) and is_local("a/b.ckpt") and not is_local("s3://bucket/a.ckpt")
