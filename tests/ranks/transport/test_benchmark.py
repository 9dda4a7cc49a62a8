"""The arithmetic of benchmarks/transport: what its server sums, what its figures say."""

from __future__ import annotations

import pytest
import torch

from benchmarks.report import FIELDS
from benchmarks.transport import processes
from benchmarks.transport.__main__ import FLOATS, TRANSPORTS, figures


@pytest.mark.parametrize("batches", [(4,), (1, 3), (2, 2), (1, 1, 2), (3, 0, 1)])
def test_slots_are_summed_however_they_come(batches: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "PARAMETER_FLOATS", 16)
    layout = processes.layout_of(40)
    assert [entry.numel for entry in layout.parameters] == [16, 16, 8]
    summer, gradients = processes.Summer(layout), slice(*processes.span(layout))
    slots = [torch.zeros(layout.slot_bytes, dtype=torch.uint8) for _ in range(4)]
    for version in (1, 2):
        for rank, slot in enumerate(slots):
            slot[gradients].view(torch.float32).copy_(torch.arange(40.0) * version * 10**rank)
        rest = iter(slots)
        for size in batches:
            for _ in range(size):
                summer.take(next(rest))
            summer.sum_up()
        assert summer.taken == 4
        assert torch.equal(summer.area.view(torch.float32)[:40], torch.arange(40.0) * version * 1111)
        summer.begin()
    summer.close()


@pytest.mark.parametrize(("ours_s", "holds"), [(0.049, True), (0.051, False)])
def test_the_goal_is_judged_by_the_median_of_paired_ratios(ours_s: float, holds: bool) -> None:
    ours = {kind: [ours_s, 9.0, 2 * ours_s] for kind in TRANSPORTS}
    raw = {size: {"all_reduce": [0.1, 0.1, 0.2], **ours} for size in FLOATS}
    raw["request"] = {kind: [2e-5, 9e-5, 1e-5] for kind in TRANSPORTS}
    rows = figures(raw)
    assert all(set(row) == set(FIELDS) for row in rows)
    judged = [row for row in rows if row["holds"] is not None]
    assert [(row["value"], row["holds"]) for row in judged] == [(10 * ours_s, holds)]
    assert judged[0]["name"].startswith("25M, shared memory")
    asked = [row for row in rows if row["name"].startswith("request")]
    assert [(row["value"], row["unit"]) for row in asked] == [(20.0, "us")] * 2
