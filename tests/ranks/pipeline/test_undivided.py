"""Where no layers are known each device trains the whole model on its part of the batch, and one warning says so."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_hetero import Scenario, ThrottleCallback
from lightning_hetero.solvers.plans import plan_to_plain, replicas
from tests.ranks.harness import run_ranks
from tests.ranks.kit import FEATURES, Toy, rank_trainer, regression, single, weights
from tests.ranks.pipeline.kit import pipeline
from tests.ranks.pipeline.replan_kit import Scripted, heard
from tests.ranks.pipeline.variants import Branched

UNEQUAL = {"devices": [{"name": "fast"}, {"name": "slow", "speed": 0.25}], "link": {"bandwidth": "10 GB/s"}}


class Branches(Toy):
    """Two towers side by side: no chain of layers anywhere."""

    def __init__(self) -> None:
        super().__init__()
        del self.net
        g = torch.Generator().manual_seed(1)
        self.left = nn.ModuleList([nn.Linear(FEATURES, 8), nn.Linear(8, 1)]).double()
        self.right = nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=g, dtype=p.dtype) * 0.3)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self.left[1](self.left[0](x).tanh()) + self.right(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.right(batch[0])


class Opaque:
    """A batch of which nobody knows what belongs to which sample."""

    def __init__(self, pairs: Any) -> None:
        self.x, self.y = torch.utils.data.default_collate(pairs)


class OpaqueBranches(Branches):
    def loss(self, batch: Any) -> Tensor:
        return super().loss((batch.x, batch.y) if isinstance(batch, Opaque) else batch)


def fit(rank: int, world: int, module: Toy, strategy: Any, loader: Any = None, **options: Any) -> dict[str, Any]:
    seed_everything(0, verbose=False)
    trainer = rank_trainer(rank, world, strategy, **{"max_epochs": 1, **options})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, loader or DataLoader(regression(64), batch_size=8, shuffle=True))
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
    return {
        "warnings": [str(w.message) for w in caught if "hetero_pipeline" in str(w.message)],
        "plan": plan_to_plain(strategy.planned.plan),
        "weights": weights(module),
        "steps": trainer.global_step,
        "trainer": trainer,
        "module": module,
    }


CASES: dict[str, tuple[Callable[[], Toy], dict[str, Any], dict[str, Any]]] = {
    "plain": (Branches, {}, {}),
    "clipped": (Branches, {}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
    "named": (Branched, {"backbone": "model"}, {}),
    "micro": (Branches, {"micro_batch_size": 3}, {}),
    "opaque": (OpaqueBranches, {}, {}),
}


def job(rank: int, world: int) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, (make, arguments, options) in CASES.items():
        strategy = pipeline(None, **{"backbone": None, **arguments})
        loader = None
        if name == "opaque":
            loader = DataLoader(regression(64), batch_size=8, shuffle=True, collate_fn=Opaque)
        uneven = ThrottleCallback(Scenario(speeds=[1.0, 0.25], sample_s=4e-3))
        found[name] = fit(rank, world, make(), strategy, loader, callbacks=[uneven], **options)
        trainer, module = found[name].pop("trainer", None), found[name].pop("module", None)
        if name == "plain":
            data = DataLoader(regression(8), batch_size=4)
            (found[name]["val"],) = trainer.validate(module, data, verbose=False)
            found[name]["predicted"] = len(trainer.predict(module, data) or [])
    return found


@pytest.mark.stock_ddp(
    "layers", "pipeline", differs="the batch is divided instead, where the model fits on each device"
)  # fmt: skip
def test_without_layers_the_batch_is_divided() -> None:
    ranks = run_ranks(2, job, timeout_s=120.0)
    for name, (make, _, options) in CASES.items():
        first, second = (rank[name] for rank in ranks)
        assert "error" not in first, (name, first)
        groups = first["plan"]["groups"]
        assert [g["ranks"] for g in groups] == [[0], [1]] and first["plan"] == second["plan"]
        assert groups[0]["samples"] > groups[1]["samples"]
        pieces = [len(g["micro_batches"]) for g in groups]
        assert pieces == ([1, 1] if name != "micro" else [-(-g["samples"] // 3) for g in groups]), name
        module = make()
        single(module, regression(64), 16, max_epochs=1, **options)
        for found in (first, second):
            assert found["weights"].distance(weights(module)) <= 1e-12, name
        assert len(first["warnings"]) == 1 and not second["warnings"]  # rank 0 says it, once
        (told,) = first["warnings"]
        assert "each device trains the whole model" in told
        assert ("pipeline_layers()" if make is Branched else "the output of layer 0") in told
    told = ranks[0]["plain"]["warnings"][0]
    assert "backbone='left' (2 modules, 66 % of the parameters); backbone='right' (3 modules" in told
    assert "is not a chain of its children" in ranks[0]["named"]["warnings"][0]
    assert ranks[0]["plain"]["val"]["val"] == ranks[1]["plain"]["val"]["val"] > 0.0
    assert [rank["plain"]["predicted"] for rank in ranks] == [1, 1]


def test_it_is_refused_where_memory_needs_the_division() -> None:
    ranks = run_ranks(2, job_refused, timeout_s=60.0)
    for found in ranks:
        assert re.search(
            "no plan fits these devices: .*1000.0 B.*; and the layers that were found cannot be .*backbone='left'",
            found["no memory"]["error"],
            re.DOTALL,
        ), found["no memory"]
        assert re.search("ValueError: backbone='lefd'.*did you mean 'left'", found["unknown"]["error"])


def job_refused(rank: int, world: int) -> dict[str, dict[str, Any]]:
    small = {"devices": [{"count": 2, "mem": 1000}]}
    return {
        "no memory": fit(rank, world, Branches(), pipeline(None, backbone=None, cluster=small)),
        "unknown": fit(rank, world, Branches(), pipeline(None, backbone="lefd", cluster=UNEQUAL)),
    }


@heard(at_once=True)
def replanned(rank: int, world: int, workers: int) -> tuple[Any, list[int]]:
    """Batches cannot be cut, and some, larger than the plan in force has them, were read for the one before."""
    script = {2: replicas(1, [16, 0]), 4: replicas(1, [3, 13]), 6: replicas(1, [0, 16])}
    module, strategy = OpaqueBranches(), pipeline(None, backbone=None, cluster=UNEQUAL, controller=Scripted(script))
    options: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
    loader = DataLoader(regression(400), batch_size=8, shuffle=True, collate_fn=Opaque, **options)
    result = fit(rank, world, module, strategy, loader)
    assert "error" not in result, result
    return weights(module), [r.bytes for r in strategy.replans]


@pytest.mark.parametrize("workers", [0, 1])
def test_devices_rest_and_wake_with_the_whole_model(workers: int) -> None:
    expected = Branches()
    single(expected, regression(400), 16, max_epochs=1)
    for found, sent_bytes in run_ranks(2, replanned, workers):
        assert found.distance(weights(expected)) <= 1e-12
        assert [n > 0 for n in sent_bytes] == [False, True, False]  # who wakes gets all of it
