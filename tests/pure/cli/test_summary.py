"""Summaries and tables: against NumPy, by hand, and as drawn literals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.cli.summary import comparison_table, mean_global_batch, rank_table, summarise_ranks
from lightning_hetero.record.run import run_of
from tests.pure.report.kit import Told, events_of, opened, run_with

measured = st.tuples(st.integers(0, 64), st.floats(1e-4, 10.0), st.floats(0.0, 10.0))  # samples, compute_s, wait_s
traces = st.integers(1, 4).flatmap(lambda world: st.lists(st.tuples(*[measured] * world), min_size=1, max_size=12))


@given(traces)
def test_figures_are_numpys_over_the_last_steps(trace: list[tuple[Told, ...]]) -> None:
    ranks = summarise_ranks(run_with(trace))
    last = np.array(trace[len(trace) // 2 :])
    assert [r.rank for r in ranks] == list(range(len(trace[0]))) and {r.steps for r in ranks} == {len(last)}
    for summary, own in zip(ranks, last.transpose(1, 0, 2), strict=True):
        assert summary.samples == pytest.approx(own[:, 0].mean())
        assert (summary.compute_s, summary.wait_s) == pytest.approx(tuple(np.median(own[:, 1:], axis=0)))
        speeds = [b / c for b, c, _ in own if b > 0]
        assert summary.samples_per_s == (pytest.approx(np.median(speeds)) if speeds else None)
    samples = last[..., 0].sum(axis=0)
    assert [r.share for r in ranks] == pytest.approx(list(samples / max(1, samples.sum())))


def test_contributions_to_a_step_add_up_and_a_step_without_the_rank_has_no_samples() -> None:
    events = events_of([[(9, 0.3, 0.1), (4, 0.4, 0.2)]] * 4)
    more = [replace(e, data={"samples": 3, "compute_s": 0.1, "wait_s": 0.1, "fill_in": True}) for e in events
            if e.kind == "step" and e.rank == 0]  # fmt: skip
    kept = [event for event in events if not (event.kind == "step" and event.rank == 1 and event.step in (1, 3))]
    run = run_of([*kept, *more])
    fast, slow = summarise_ranks(run)
    assert (fast.steps, slow.steps, fast.samples, slow.samples) == (2, 2, 12.0, 2.0)
    assert (fast.share, slow.share) == pytest.approx((12 / 14, 2 / 14))
    assert (fast.compute_s, fast.wait_s, fast.samples_per_s) == pytest.approx((0.4, 0.2, 30.0))
    assert (slow.compute_s, slow.wait_s, slow.samples_per_s) == pytest.approx((0.4, 0.2, 10.0))  # where it took part
    assert mean_global_batch(run) == pytest.approx((16 + 12 + 16 + 12) / 4)


def test_a_trace_without_own_work_has_no_summary() -> None:
    run = run_of([opened(0, 1)])
    assert summarise_ranks(run) == [] and mean_global_batch(run) == 0.0


def plain(*steps: Sequence[Told]) -> list[dict[str, Any]]:
    return [asdict(rank) for rank in summarise_ranks(run_with(steps))]


def test_the_table_of_a_job_as_drawn() -> None:
    assert rank_table(plain(*[[(48, 0.1, 0.0), (16, 0.08, 0.02)]] * 4)) == "\n".join(
        [
            "rank  samples/s  samples  share %  compute ms  wait ms",
            "----  ---------  -------  -------  ----------  -------",
            "   0      480.0     48.0     75.0       100.0      0.0",
            "   1      200.0     16.0     25.0        80.0     20.0",
        ]
    )


def test_the_table_of_several_jobs_as_drawn() -> None:
    metric = {"name": "val_acc", "mode": "max", "value": 0.975}
    results = [
        {"job": 0, "strategy": "ddp", "scenario": "swap", "fit_s": 20.0, "samples_per_s": 80.0,
         "metric": metric, "ranks": plain([(16, 0.1, 0.3), (16, 0.4, 0.0)])},
        {"job": 1, "strategy": "hetero_balanced", "scenario": "swap", "fit_s": 8.0, "samples_per_s": 200.0,
         "metric": metric, "ranks": plain([(24, 0.1, 0.0), (8, 0.1, 0.0)])},
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
    job = {"strategy": "ddp", "fit_s": 1.0}
    jobs = [{**job, "job": i, "overrides": ["seed=1", "strategy=ddp", f"model.lr={i}"]} for i in (1, 2)]
    header, _, first, second = comparison_table(jobs).splitlines()
    assert (header.split()[3], first.split()[3], second.split()[3]) == ("overrides", "model.lr=1", "model.lr=2")
    same = [{**job, "overrides": ["seed=1", f"strategy={job['job']}"]} for job in jobs]
    assert "overrides" not in comparison_table(same)
