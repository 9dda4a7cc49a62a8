"""The peers' benchmark: who is run when, who gets which samples, and the arithmetic, on raw data made by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DistributedSampler

from benchmarks.peers import cases, device, task
from benchmarks.peers.cases import CLUSTERS, SAMPLES, WORLD, Run, effective_samples, key, parts_of
from benchmarks.peers.figures import failures, figures_of, rows_of, table
from benchmarks.peers.groups import groups_of

pytest.importorskip("sklearn")

# ---- who and on what -----------------------------------------------------------------------------------------


def test_parts_are_the_global_batches_one_after_the_other() -> None:
    parts = list(parts_of(range(14), (3, 1, 2)))
    assert parts == [[0, 1, 2], [3], [4, 5], [6, 7, 8], [9], [10, 11]]


def test_static_parts_cover_every_epoch_in_torchs_order() -> None:
    from benchmarks.peers.under_lightning import Dealt

    shares = (23, 23, 12, 6)
    ranks = [Dealt(5, shares, rank) for rank in range(WORLD)]
    whole = Dealt(5, shares, None)
    sampler = DistributedSampler(range(SAMPLES), num_replicas=1, rank=0, seed=5)  # type: ignore[arg-type]
    for epoch in range(2):
        sampler.set_epoch(epoch)
        each, dealt = [list(rank) for rank in ranks], list(whole)
        assert [len(parts) for parts in each] == [len(rank) for rank in ranks] == [cases.BATCHES] * WORLD
        assert [index for step in zip(*each, strict=True) for part in step for index in part] == list(sampler)
        assert [dealt[rank::WORLD] for rank in range(WORLD)] == each and len(dealt) == len(whole)


def test_trainings_with_a_trainer_share_their_processes_and_slow_peers_train_once() -> None:
    groups = groups_of(quick=False, seeds=range(3))
    runs = [run for ones in groups.values() for run in ones]
    asked = [run for run in cases.runs_of(quick=False, seeds=range(3)) if run.peer != "hivemind" or run.seed == 0]
    assert sorted(map(key, runs)) == sorted(map(key, asked))
    together = [run.peer for run in groups["1:1:1/2:1/4, seed 2: under Lightning"]]
    assert {"stock DDP", "static split, weighted", "ours: pipeline"} < set(together) and "hivemind" not in together
    assert "fast devices only" not in together and "DDP, plain loop" not in together
    assert all(len(ones) == 1 for name, ones in groups.items() if not name.endswith("under Lightning"))
    assert [run.seed for run in runs if run.peer == "hivemind"] == [0, 0]  # of each cluster


def test_an_unweighted_mean_of_unequal_parts_is_as_noisy_as_fewer_samples() -> None:
    assert effective_samples((1, 3)) == pytest.approx(3.0)
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(40_000, 8, generator=generator)
    means = (draws[:, :2].mean(1) + draws[:, 2:].mean(1)) / 2  # parts of 2 and 6
    assert float(1.0 / means.var()) == pytest.approx(effective_samples((2, 6)), rel=0.03)


# ---- the emulated device of a loop by hand -------------------------------------------------------------------


class Recorder:
    """Stands for a `Throttle`: keeps what it is told."""

    told: list[str] = []  # noqa: RUF012

    def __init__(self, *_: Any) -> None:
        self.told.clear()

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.told.append(f"{name}{arguments}")


def test_a_loop_by_hand_tells_a_throttle_what_the_callback_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "Throttle", Recorder)
    net = nn.Linear(2, 1)
    one = device.Device(net, CLUSTERS[0], seed=0, rank=1)
    with one.batch(7, 3):
        loss = net(torch.ones(3, 2)).mean()
        with one.backward(loss):
            loss.backward()
    begin = ["begin(7, 3)", "begin_work()", "before_backward()", "backward_began()"]
    assert Recorder.told == [*begin, *["gradient_came()"] * 2, "after_backward()", "end()"]


# ---- how far a training has come -----------------------------------------------------------------------------


def test_the_distance_is_to_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "DISTANCE_AFTER", 4)
    net = task.net_of(1)
    start, same = task.Curve(), task.Curve()
    start.close(4, net.parameters())
    assert task.distance(start, 1, 44) == pytest.approx(1.0)
    optimizer, schedule = task.recipe(net.parameters(), 44)
    images, labels = task.datasets()[0].tensors
    for update in range(4):
        same.look(update, net.parameters())
        rows: Any = task.order_of(1, 0)[update * 64 : (update + 1) * 64]
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(images[rows]), labels[rows]).backward()
        optimizer.step()
        schedule.step()
    assert same.points == []
    same.look(4, net.parameters())
    assert task.distance(same, 1, 44) == pytest.approx(0.0, abs=1e-6)
    assert task.distance(task.Curve(), 1, 44) is None
    ((updates, _, loss, accuracy),) = task.judged(same)
    assert updates == 4 and 2.0 < loss < 2.5 and 0.0 <= accuracy < 0.5


def result(target_s: float | None, *, fit_s: float = 10.0, samples: int = 16) -> dict[str, Any]:
    loss = 0.5 if target_s is None else 0.2
    curve = [[4, 1.0, 0.9, 0.5], [8, target_s or 5.0, loss, 0.8], [12, fit_s, loss + 0.01, 0.9]]
    rank = {"fit_s": fit_s, "updates": 12, "samples": [samples] * 12, "taken": 1.01}
    return {"ranks": [{**rank, "curve": curve, "distance": 0.25}, *[rank] * 3]}


def results(by_peer: dict[str, list[dict[str, Any]]]) -> tuple[dict[str, dict[str, Any]], list[Run]]:
    pairs = [
        (Run(peer=peer, cluster=CLUSTERS[0].name, seed=seed, updates=12), one)
        for peer, ones in by_peer.items()
        for seed, one in enumerate(ones)
    ]
    return {key(run): one for run, one in pairs}, [run for run, _ in pairs]


def test_rows_are_medians_and_ratios_of_the_same_seed() -> None:
    everything, runs = results({
        "stock DDP": [result(8.0), result(4.0), result(6.0)],
        "ours: balanced": [result(2.0), result(3.0), result(1.5)],
        "post-localSGD": [result(2.0), result(None), {"failed": "RuntimeError: no"}],
        "hivemind": [{"failed": "not installed"}] * 3,
    })
    rows = {row["peer"]: row for row in rows_of(everything, runs)}
    assert list(rows) == ["stock DDP", "post-localSGD", "ours: balanced"]  # in the order of PEERS
    ours = rows["ours: balanced"]
    assert (ours["target_s"], ours["target_to_ddp"], ours["target_to_plain"]) == (2.0, 0.25, None)
    assert (ours["reached"], ours["seeds"], ours["samples"], ours["per_update"]) == (3, 3, 768, 64.0)
    assert (ours["loss"], ours["accuracy"], ours["distance"]) == (pytest.approx(0.21), 0.9, 0.25)
    late = rows["post-localSGD"]
    assert (late["reached"], late["seeds"], late["target_s"], late["target_to_ddp"]) == (1, 2, None, None)
    assert failures(everything, runs) == {"post-localSGD": "RuntimeError: no", "hivemind": "not installed"}
    text = table(list(rows.values())).splitlines()
    assert len(text) == 5 and all(line.count(" | ") == text[0].count(" | ") for line in text)
    names = {figure["name"] for figure in figures_of(list(rows.values()))}
    assert "1:1:1/2:1/4, ours: balanced: that time to stock DDP's" in names
    assert not any("post-localSGD: that time" in name for name in names)
