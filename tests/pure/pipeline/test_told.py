"""What ranks tell one another of a batch survives the sum over ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_hetero.controller.messages import LinkTime
from lightning_hetero.pipeline.decide.replanning import BatchReport, reporting_group
from lightning_hetero.types import GroupPlan

GROUPS = [
    GroupPlan(ranks=(2, 0), cuts=(0, 1, 4), samples=8, micro_batches=(4, 4), depths=(2, 2)),
    GroupPlan(ranks=(1,), cuts=(0, 4), samples=8, micro_batches=(8,), depths=()),
]


def link(source: int, target: int) -> LinkTime:
    return LinkTime(
        source=source, target=target, messages=source + 1, size_bytes=1e6 * (target + 1), seconds=0.25 * (source + 1)
    )


def test_everything_comes_out_as_it_was_put_in() -> None:
    # The batch lasts 0.7: rank 2 sends its message last, at 0.6, and the exchange took it 0.1 in the batch before.
    work = [(8.0, 0.5, 0.0, 0.2), (8.0, 0.25, 0.25, 0.2), (8.0, 0.4, 0.2, 0.1), (0.0, 0.0, 0.0, 0.7)]
    waits_s, dummy_s = (0.2, 0.45, 0.3, 0.7), (0.0, 0.0, 0.0, 0.002)  # rank 3 rests
    links = [[link(2, 0), link(3, 0)], [], [link(0, 2)], []]
    layers = {0: (1, [0.1, 0.2, 0.3]), 2: (0, [0.4])}
    told: list[BatchReport] = []
    for r in range(4):
        first, layer_s = layers.get(r, (0, []))
        told.append(
            BatchReport.of_rank(
                r, 4, 4, work[r], rest_s=dummy_s[r], links=links[r], first_layer=first, layer_s=layer_s
            )
        )
    assert {len(each.numbers) for each in told} == {BatchReport.size(4, 4)}
    whole = replace(told[0], numbers=[sum(column) for column in zip(*(t.numbers for t in told), strict=True)])
    assert [(n, compute_s) for n, compute_s, _ in whole.work] == [(round(n), compute_s) for n, compute_s, *_ in work]
    assert [wait_s for *_, wait_s in whole.work] == pytest.approx(waits_s)
    assert whole.rest_s == {3: 0.002}
    assert whole.links == [link(2, 0), link(3, 0), link(0, 2)]
    assert whole.layer_s(GROUPS[0]) == {2: [0.4], 0: [0.1, 0.2, 0.3]}
    silent = BatchReport.of_rank(1, 4, 4, work[1])
    assert silent.links == [] and silent.layer_s(GROUPS[1]) == {}


def test_only_work_travels_where_nobody_decides() -> None:
    told = BatchReport.of_rank(1, 2, 0, (4.0, 1.0, 2.0, 3.0), links=[link(0, 1)], layer_s=[1.0])
    assert list(told.numbers) == [0.0, 0.0, 0.0, 0.0, 0.0, 4.0, 1.0, 2.0, 3.0, 0.0]
    assert told.rest_s == {}
    assert told.links == [] and told.layer_s(GROUPS[1]) == {}


@pytest.mark.parametrize("batch", range(4))
def test_groups_tell_of_layers_in_turn(batch: int) -> None:
    assert reporting_group(batch, GROUPS) == batch % 2
