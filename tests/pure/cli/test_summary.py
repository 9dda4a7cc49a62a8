"""Tables, as drawn literals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lightning_hetero.cli.report import comparison_table, rank_table
from lightning_hetero.record.ledger import ledger_of
from tests.pure.report.kit import Told, run_with


def plain(*steps: Sequence[Told]) -> list[dict[str, Any]]:
    return [asdict(rank) for rank in ledger_of(run_with(steps)).figures]


def test_the_table_of_a_job_as_drawn() -> None:
    assert rank_table(plain(*[[(48, 0.1, 0.01), (16, 0.08, 0.03)]] * 4)) == "\n".join(
        [
            "rank  samples/s  samples  share %  work ms  exchange ms  waiting ms",
            "----  ---------  -------  -------  -------  -----------  ----------",
            "   0      480.0     48.0     75.0    100.0         10.0         0.0",
            "   1      200.0     16.0     25.0     80.0         10.0        20.0",
        ]
    )


def test_the_table_of_several_jobs_as_drawn() -> None:
    metric = {"name": "val_acc", "mode": "max", "value": 0.975}
    results = [
        {"job": 0, "strategy": "ddp", "scenario": "swap", "fit_s": 20.0, "samples_per_s": 80.0,
         "metric": metric, "waiting": 0.375, "ranks": plain([(16, 0.1, 0.3), (16, 0.4, 0.0)])},
        {"job": 1, "strategy": "hetero_balanced", "scenario": "swap", "fit_s": 8.0, "samples_per_s": 200.0,
         "metric": metric, "waiting": 0.0, "ranks": plain([(24, 0.1, 0.0), (8, 0.1, 0.0)])},
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
