"""Summaries and tables: against NumPy, by invariants, and as drawn literals."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.cli.summary import (
    RankSummary,
    comparison_table,
    mean_global_batch,
    rank_table,
    summarise_ranks,
)
from lightning_hetero.types import Event


def step(rank: int, index: int, samples: float, compute_s: float, wait_s: float = 0.0) -> Event:
    data = {"samples": samples, "compute_s": compute_s, "wait_s": wait_s}
    return Event(
        kind="step", rank=rank, epoch=index // 5, step=index % 5, t_s=float(index), data=data
    )


measured = st.tuples(
    st.integers(0, 64), st.floats(1e-4, 10.0), st.floats(0.0, 10.0)
)  # samples, compute_s, wait_s
traces = st.integers(1, 4).flatmap(
    lambda world: st.integers(1, 12).flatmap(
        lambda steps: st.lists(
            st.lists(measured, min_size=steps, max_size=steps), min_size=world, max_size=world
        )
    )
)


@given(traces, st.randoms(use_true_random=False))
def test_figures_are_numpys_over_the_last_steps_in_any_order(trace, random) -> None:
    events = [
        step(r, i, *values) for r, steps in enumerate(trace) for i, values in enumerate(steps)
    ]
    random.shuffle(events)
    ranks = summarise_ranks(events)
    assert [r.rank for r in ranks] == list(range(len(trace)))
    means = []
    for summary, steps in zip(ranks, trace, strict=True):
        last = np.array(steps[len(steps) - summary.steps :])
        assert abs(summary.steps - 0.5 * len(steps)) < 1
        means.append(last[:, 0].mean())
        assert summary.compute_s == pytest.approx(np.median(last[:, 1]))
        assert summary.wait_s == pytest.approx(np.median(last[:, 2]))
        speeds = [b / c for b, c, _ in last if b > 0]
        assert summary.samples_per_s == (pytest.approx(np.median(speeds)) if speeds else None)
    expected = np.array(means) / np.sum(means) if np.sum(means) > 0 else np.zeros(len(means))
    assert [r.share for r in ranks] == pytest.approx(list(expected))


def test_other_events_and_incomplete_steps_are_skipped() -> None:
    events = [
        Event(kind="decision", rank=0, epoch=0, step=0, t_s=0.0, data={"shares": [1, 2]}),
        Event(kind="step", rank=1, epoch=0, step=0, t_s=0.0, data={"loss": 1.0}),
        step(0, 0, 8, 0.5),
    ]
    (only,) = summarise_ranks(events)
    assert only == RankSummary(
        rank=0, steps=1, samples=8, share=1.0, samples_per_s=16.0, compute_s=0.5, wait_s=0.0
    )
    assert summarise_ranks([]) == []


def passed(rank: int, index: int) -> Event:
    return Event(kind="passed", rank=rank, epoch=index // 5, step=index % 5, t_s=float(index), data={"behind": 0})


def test_several_events_of_a_step_add_up_and_a_step_without_the_rank_has_no_samples() -> None:
    events = [
        *(step(0, i, 9, 0.3, 0.1) for i in range(4)),
        *(step(0, i, 3, 0.1, 0.1) for i in range(4)),  # a fill-in in each
        step(1, 0, 99, 9.0),  # not in the last half
        passed(1, 1),
        step(1, 2, 4, 0.4, 0.2),
        passed(1, 3),
    ]
    for ordered in (events, events[::-1]):
        fast, slow = summarise_ranks(ordered)
        assert (fast.steps, slow.steps) == (2, 2)
        assert (fast.samples, slow.samples) == (12.0, 2.0)
        assert fast.share == pytest.approx(12 / 14) and slow.share == pytest.approx(2 / 14)
        assert fast.compute_s == pytest.approx(0.4) and fast.wait_s == pytest.approx(0.2)
        assert fast.samples_per_s == pytest.approx(30.0)
        # times are those of the steps it took part in
        assert (slow.compute_s, slow.wait_s, slow.samples_per_s) == (0.4, 0.2, pytest.approx(10.0))


def test_the_global_batch_is_what_all_ranks_trained_per_step() -> None:
    assert mean_global_batch([]) == 0.0
    lost = [step(0, i, 6, 0.1) for i in range(4)] + [step(1, i, 2, 0.1) for i in range(2)]
    assert mean_global_batch(lost) == pytest.approx((8 + 8 + 6 + 6) / 4)  # rank 1 died
    assert mean_global_batch([step(0, 0, 6, 0.1), step(0, 0, 2, 0.1), passed(1, 0)]) == 8.0


def test_the_table_of_a_job_as_drawn() -> None:
    events = [step(0, i, 48, 0.1) for i in range(4)] + [
        step(1, i, 16, 0.08, 0.02) for i in range(4)
    ]
    assert rank_table([asdict(rank) for rank in summarise_ranks(events)]) == "\n".join(
        [
            "rank  samples/s  samples  share %  compute ms  wait ms",
            "----  ---------  -------  -------  ----------  -------",
            "   0      480.0     48.0     75.0       100.0      0.0",
            "   1      200.0     16.0     25.0        80.0     20.0",
        ]
    )


def test_the_table_of_several_jobs_as_drawn() -> None:
    waiting = summarise_ranks([step(0, 0, 16, 0.1, 0.3), step(1, 0, 16, 0.4)])
    even = summarise_ranks([step(0, 0, 24, 0.1), step(1, 0, 8, 0.1)])
    metric = {"name": "val_acc", "mode": "max", "value": 0.975}
    results = [
        {"job": 0, "strategy": "ddp", "scenario": "swap", "fit_s": 20.0, "samples_per_s": 80.0,
         "metric": metric, "ranks": list(map(asdict, waiting))},
        {"job": 1, "strategy": "hetero_balanced", "scenario": "swap", "fit_s": 8.0, "samples_per_s": 200.0,
         "metric": metric, "ranks": list(map(asdict, even))},
        {"job": 2, "strategy": "ddp", "fit_s": None, "metric": None, "ranks": []},
    ]  # fmt: skip
    assert comparison_table(results) == "\n".join(
        [
            "job  strategy         scenario  fit s  speed-up  samples/s  val_acc  shares %  waiting %",
            "---  ---------------  --------  -----  --------  ---------  -------  --------  ---------",
            "  0  ddp              swap      20.00     1.00x       80.0   0.9750  50/50          37.5",
            "  1  hetero_balanced  swap       8.00     2.50x      200.0   0.9750  75/25           0.0",
            "  2  ddp              -             -         -          -        -  -                 -",
        ]
    )


def test_overrides_are_shown_where_jobs_differ_by_more_than_strategy_and_scenario() -> None:
    jobs = [
        {
            "job": i,
            "strategy": "ddp",
            "overrides": ["seed=1", "strategy=ddp", f"model.lr={lr}"],
            "fit_s": 1.0,
        }
        for i, lr in enumerate([0.1, 0.2])
    ]
    header, _, first, second = comparison_table(jobs).splitlines()
    assert header.split()[3] == "overrides"
    assert first.split()[3] == "model.lr=0.1"
    assert second.split()[3] == "model.lr=0.2"
    same = [{**job, "overrides": ["seed=1", f"strategy={i}"]} for i, job in enumerate(jobs)]
    assert "overrides" not in comparison_table(same)
