"""Runs of every engine, and odd ones, made by hand; which views each has data for."""

from __future__ import annotations

from lightning_hetero.record.run import RecordedRun, run_of
from lightning_hetero.types import Event
from tests.pure.report.kit import decision, opened, run_with
from tests.pure.report.stages_kit import pipeline_run


def stale_run() -> RecordedRun:
    counts = {
        "updates": 40, "staleness": {"0": 300, "1": 15, "2": 5}, "discarded": {"late": 8}, "reissued": {"died": 4},
        "queue": 1, "longest_queue": 3, "apply_s": 0.4, "longest_apply_s": 0.05,
    }  # fmt: skip
    server = Event(kind="server", rank=0, epoch=0, step=39, t_s=0.0, data=counts)
    steps = [[(6, 1.0, 0.2), (2, 0.9, 0.3)]] * 40
    return run_with(steps, [server], engine="stale", policy="flexible", bound=2)


def balanced_run() -> RecordedRun:
    before, after = [(8, 1.0, 2.0), (8, 3.0, 0.0)], [(11, 1.4, 0.5), (5, 1.9, 0.0)]
    queues = [
        Event(kind="queue", rank=0, epoch=0, step=n, t_s=0.0, data={"queues": {"money": 0.1 * n}}) for n in range(40)
    ]
    told = decision(4, (11, 5), predicted_gain=0.3, reason='rebalanced <script>"')
    return run_with([before] * 6 + [after] * 34, [told, *queues], engine="balanced")


RUNS = {
    "ddp": run_with([[(15, 1.5, 1.55), (15, 3.0, 0.05)]] * 80),
    "balanced": balanced_run(),
    "stale": stale_run(),
    "pipeline": pipeline_run((1.0, 0.5), [[(2, 4.0, 20.0), (0, 8.0, 16.0)]] * 5),
    "many ranks": run_with([[(4, 1.0 + 0.1 * (r % 7), 0.7 - 0.1 * (r % 7)) for r in range(24)]] * 12),
    "one rank": run_with([[(8, 1.0, 0.0)]] * 3),
    "one step": run_with([[(8, 1.0, 0.5), (8, 1.5, 0.0)]]),
    "no work measured": run_of([opened(0, 2), opened(1, 2)]),
}
SHOWN = {
    "ddp": {"timeline", "spent", "stages", "what-if", "scores"},
    "balanced": {"timeline", "spent", "stages", "what-if", "shares", "scores", "budget"},
    "stale": {"timeline", "spent", "stages", "what-if", "scores", "staleness"},
    "pipeline": {"timeline", "spent", "stages", "what-if", "pipeline"},
    "many ranks": {"timeline", "spent", "stages", "what-if", "scores"},
    "one rank": {"spent"},
    "one step": {"timeline", "spent", "stages", "scores"},
    "no work measured": set[str](),
}
