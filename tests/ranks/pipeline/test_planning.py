"""From nothing, a cluster or an emulation to a plan, in the Trainer: measured without a trace, agreed by all ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
from lightning.pytorch import LightningDataModule
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, Subset

from lightning_hetero import Scenario, ThrottleCallback
from lightning_hetero.pipeline.decide.costs import model_to_plain
from lightning_hetero.pipeline.runtime.ownership.gradients import GradientSync
from lightning_hetero.solvers.plans import plan_to_plain
from tests.ranks.harness import run_ranks
from tests.ranks.kit import rank_trainer, regression, single, weights
from tests.ranks.pipeline.kit import FEATURES, LAYERS, WIDTH, Deep, pipeline

SLOW_LINK = {"devices": [{"count": 2}], "link": {"bandwidth": "1 MB/s", "latency": "1 ms"}}
FREE_LINK = {"devices": [{"name": "fast"}, {"name": "slow", "speed": 0.25}], "link": {"bandwidth": "10 GB/s"}}


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return iter(regression(32))


class Data(LightningDataModule):
    def setup(self, stage: str) -> None:
        self.train = regression(32)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, batch_size=8)


def run(rank: int, world: int, strategy: Any, loader: Any = None, module: Any = None, **options: Any) -> dict[str, Any]:
    module = module or Deep()
    trainer = rank_trainer(rank, world, strategy, **{"max_epochs": 1, **options})
    trainer.fit(module, loader if loader is not None else DataLoader(regression(32), batch_size=8, shuffle=True))
    planned = strategy.planned
    return {
        "plan": plan_to_plain(planned.plan),
        "model": None if planned.model is None else model_to_plain(planned.model),
        "speeds": [d.speed for d in planned.cluster.devices],
        "weights": weights(module),
        "steps": trainer.global_step,
        "calls": planned.calls,
    }


def heavy(model: dict[str, Any]) -> dict[str, Any]:
    """Returns the costs of a model that computes long and hands on much."""
    slow = {"forward": [0.0, 0.1], "backward": [0.0, 0.2], "output_bytes": 1e6}
    before = {**model["before"], "output_bytes": 1e6}
    return {**model, "before": before, "layers": [{**layer, **slow} for layer in model["layers"]]}


class Twice(Deep):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.head(self.model(self.model(self.before(x)))), y)


def good(rank: int, world: int) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    found["probed"] = run(rank, world, pipeline(None))
    spec = OmegaConf.create({"cluster": FREE_LINK})  # as Hydra hands it over
    with patch.object(GradientSync, "arm", autospec=True, side_effect=GradientSync.arm) as arm:
        found["described"] = run(rank, world, pipeline(None, cluster=spec.cluster, micro_batch_size=4, max_groups=1))
    found["described"]["armed"] = arm.call_count
    found["replicas"] = run(rank, world, pipeline(None, cluster=SLOW_LINK, profile=heavy(found["described"]["model"])))
    throttle = ThrottleCallback(Scenario(speeds=[1.0, 0.5], sample_s=2e-3))
    with patch.object(GradientSync, "arm", autospec=True, side_effect=GradientSync.arm) as arm:
        found["emulated"] = run(rank, world, pipeline(None), callbacks=[throttle])
    found["emulated"]["armed"] = arm.call_count
    plain = found["described"]
    given = OmegaConf.create({"profile": plain["model"], "plan": plain["plan"]})
    found["by profile"] = run(rank, world, pipeline(None, cluster=FREE_LINK, profile=given.profile, micro_batch_size=4,
                                                    max_groups=1))  # fmt: skip
    found["by plan"] = run(rank, world, pipeline(given.plan))
    found["twice"] = run(rank, world, pipeline(None, cluster=FREE_LINK, max_groups=1), module=Twice())
    shared = pipeline(None, cluster=FREE_LINK, stream="shared")
    found["stream"] = run(rank, world, shared, DataLoader(Stream(), batch_size=8))
    batches = BatchSampler(SequentialSampler(range(32)), 8, False)
    pooled = pipeline(None, cluster=FREE_LINK, batch_sampler="pool")
    found["pool"] = run(rank, world, pooled, DataLoader(regression(32), batch_sampler=batches))
    one = DataLoader(Subset(regression(8), [0]), batch_size=1)
    found["one sample"] = run(rank, world, pipeline(None, cluster=FREE_LINK), one)
    found["data module"] = run(rank, world, pipeline(None, cluster=FREE_LINK), Data())

    # A validation comes first: its plan, of replicas, is none to train with.
    module, strategy = Deep(), pipeline(None, cluster=FREE_LINK, max_groups=1)
    trainer = rank_trainer(rank, world, strategy, max_epochs=1)
    (first,) = trainer.validate(module, DataLoader(regression(8), batch_size=4), verbose=False)
    assert strategy.planned is not None
    groups = len(strategy.planned.plan.groups)
    trainer.fit(module, DataLoader(regression(32), batch_size=8, shuffle=True))
    found["validated first"] = {"plan": plan_to_plain(strategy.planned.plan), "weights": weights(module), "val": first,
                                "groups": groups}  # fmt: skip
    return found


def test_a_plan_is_found_and_trains() -> None:
    ranks = run_ranks(2, good, timeout_s=150.0)
    first = ranks[0]
    for name, found in first.items():
        assert all(rank[name]["plan"] == found["plan"] for rank in ranks), name
        assert all(rank[name]["weights"].distance(found["weights"]) == 0.0 for rank in ranks), name

    # Sums are not begun in a real backward pass that is over long before the emulated one.
    assert sum(rank["described"]["armed"] for rank in ranks) > 0
    assert sum(rank["emulated"]["armed"] for rank in ranks) == 0

    layers = first["probed"]["model"]["layers"]
    assert [layer["name"] for layer in layers] == [f"model.{i}" for i in range(LAYERS)]
    for layer in layers:
        assert layer["param_bytes"] == 8 * (WIDTH * WIDTH + WIDTH)
        assert layer["state_bytes"] >= 4 * layer["param_bytes"]  # gradient and Adam's two
        assert layer["output_bytes"] == 8 * WIDTH and layer["activation_bytes"] > 0
        assert all(x >= 0 for x in layer["forward"]) and sum(layer["backward"]) > 0
    before = first["probed"]["model"]["before"]
    outside = FEATURES * WIDTH + WIDTH + WIDTH + 1
    assert before["param_bytes"] == 8 * outside and before["output_bytes"] == 8 * WIDTH

    described = first["described"]["plan"]["groups"]
    assert first["described"]["speeds"] == [1.0, 0.25]
    assert [set(group["micro_batches"]) for group in described] == [{4}]
    assert sorted(group["ranks"] for group in first["replicas"]["plan"]["groups"]) == [[0], [1]]
    assert first["emulated"]["speeds"] == [1.0, 0.5]
    shares = {tuple(g["ranks"]): g["samples"] for g in first["emulated"]["plan"]["groups"]}
    assert shares == pytest.approx({(0,): 11, (1,): 5}, abs=1) or len(shares) == 1
    # 2 ms x 16 samples on a device of speed 1, by layers in the measured proportions
    model = first["emulated"]["model"]
    costs = [model["before"], *model["layers"], model["head"]]
    assert sum(cost[k][1] for cost in costs for k in ("forward", "backward")) == pytest.approx(2e-3)
    assert first["by profile"]["plan"] == first["described"]["plan"] == first["by plan"]["plan"]
    assert first["by profile"]["model"] == first["described"]["model"] and first["by plan"]["model"] is None
    assert (first["twice"]["calls"], first["described"]["calls"]) == (2, 1)

    expected = Deep()
    single(expected, regression(32), 16, max_epochs=1)
    for name in ("described", "replicas", "emulated", "by profile", "by plan", "validated first"):
        assert first[name]["weights"].distance(weights(expected)) <= 1e-12, name
    for name in ("stream", "data module"):
        assert first[name]["steps"] == 2
    assert first["stream"]["weights"].distance(weights(Deep())) > 1e-4
    assert first["one sample"]["steps"] == 1 and first["pool"]["steps"] == 2
    assert first["validated first"]["groups"] == 2 and len(first["validated first"]["plan"]["groups"]) == 1


# ---- what is refused, on all ranks -----------------------------------------------------------------------------


class Failing(Deep):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise ZeroDivisionError("no step to measure")


class Never(Deep):
    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self.head(self.before(batch[0])), batch[1])


class Sometimes(Deep):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        h = self.model(self.before(x))
        return nn.functional.mse_loss(self.head(self.model(h) if len(x) > 4 else h), y)


class Empty(Dataset):
    def __len__(self) -> int:
        return 0

    def __getitem__(self, i: int) -> Any:
        raise IndexError(i)


def group(**changes: Any) -> dict[str, Any]:
    return {"groups": [{"ranks": [0, 1], "cuts": [0, 3, 6], "samples": 16, "micro_samples": 4, **changes}]}


BAD: dict[str, tuple[Callable[[], Any], Callable[[], Any], str, str]] = {
    # strategy, module; the reason on rank 0, and on the others where that is another one
    "three devices": (lambda: pipeline(None, cluster={"devices": [{"count": 3}]}), Deep, "3 devices", ""),
    "no memory": (
        lambda: pipeline(None, cluster={"devices": [{"count": 2, "mem": 1000}]}),
        Deep,
        "no plan fits these devices: .* 1000.0 B of 'device:0'; what helps",
        "rank 0 could not plan the pipeline: ValueError: no plan fits these devices: .* 1000.0 B",
    ),
    "profile of others": (
        lambda: pipeline(None, profile={"layers": [], "before": 1, "head": 2}),
        Deep,
        "a layer of the profile=1 must be a mapping",
        "",
    ),
    "profile incomplete": (lambda: pipeline(None, profile={"layers": []}), Deep, "lacks .*'head'", ""),
    "profile of no kind": (lambda: pipeline(None, profile=3), Deep, "profile=3", ""),
    "key of plan": (lambda: pipeline(group(rank=3)), Deep, "unknown keys \\['rank'\\]", ""),
    "ranks": (lambda: pipeline(group(ranks=[0, 2])), Deep, "ranks \\[0, 2\\] must be different ones of 0..1", ""),
    "cuts": (lambda: pipeline(group(cuts=[0, 3, 7])), Deep, "rising numbers from 0 to 6", ""),
    "samples": (lambda: pipeline(group(samples=15)), Deep, "divides 15 samples, but the global batch has 16", ""),
    "failing step": (lambda: pipeline(None), Failing, "^ZeroDiv", "not plan.*ZeroDivisionError: no step"),
    "no call": (lambda: pipeline(None), Never, "without calling the backbone", "could not plan.*without calling"),
    "calls differ": (lambda: pipeline(None), Sometimes, "must not depend on the batch", "could not plan"),
    "no such attribute": (lambda: pipeline(None, backbone="modle"), Deep, "modle", ""),
}  # fmt: skip


def bad(rank: int, world: int) -> dict[str, str]:
    found = {}
    for name, (strategy, module, _, _) in BAD.items():
        try:
            run(rank, world, strategy(), module=module())
            found[name] = "trained"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    try:
        run(rank, world, pipeline(None), DataLoader(Stream(), batch_size=8))
    except TypeError as error:
        found["stream"] = str(error)
    try:
        run(rank, world, pipeline(None, cluster=FREE_LINK), DataLoader(Empty(), batch_size=8))
        found["empty"] = "trained"
    except Exception as error:
        found["empty"] = str(error)
    return found


def test_what_cannot_be_planned_is_refused_on_all_ranks_with_the_reason() -> None:
    ranks = run_ranks(2, bad, timeout_s=100.0)
    for name, (_, _, reason, others) in BAD.items():
        for found, pattern in zip(ranks, (reason, others or reason), strict=True):
            assert re.search(pattern, found[name], re.DOTALL), (name, found[name])
    for found in ranks:
        assert "stream='shared'" in found["stream"]
        assert "the train dataset is empty" in found["empty"]
