"""A run as a trace in Chrome's JSON format, which Perfetto reads (layer P).

One process per rank with a thread of its work, waiting and exchange; behind them one of the whole run, with changes of
shares or plan as instants, shares and queues as counters. Numbers of processes and threads begin with 1: Perfetto takes
0 for the idle process of the kernel.
"""

from __future__ import annotations

import math
from typing import Any

from lightning_hetero.record.ledger import spent_in
from lightning_hetero.record.run import RecordedRun

_MOST_TURNS = 20_000  # the last ones of a long run: the viewer reads it into memory
_US = 1e6


def perfetto_of(run: RecordedRun) -> dict[str, Any]:
    """Returns the JSON object; times in microseconds."""
    steps = run.steps[-max(1, _MOST_TURNS // run.ranks) :]
    events: list[dict[str, Any]] = []

    def note(kind: str, name: str, process: int, **more: Any) -> None:
        events.append({"ph": kind, "name": name, "pid": process + 1, "tid": 1, **more})

    whole = run.ranks  # the process behind those of the ranks
    for process in range(run.ranks + 1):
        name, thread = f"rank {process} {run.devices.get(process, '')}".strip(), "steps"
        if process == whole:
            name, thread = "whole run", "changes"
        note("M", "process_name", process, args={"name": name})
        note("M", "thread_name", process, args={"name": thread})
    begins_us: dict[int, float] = {}
    over_s = dict.fromkeys(range(run.ranks), 0.0)  # when a rank's last slice ended: slices may not overlap
    for number, (step, spent) in enumerate(zip(steps, spent_in(run, steps), strict=True), len(run.steps) - len(steps)):
        for rank, turn in step.turns.items():
            own = spent[rank]
            idle_s = min(own.idle_s, turn.wait_s)  # what the host saw: not what is idle on a GPU's stream
            waits_s = {"waiting": idle_s, "idle as planned": own.rest_s, "exchange": turn.wait_s - idle_s - own.rest_s}
            for part, name, from_s, to_s in turn.slices(waits_s):
                counted = {} if math.isnan(part.work) else {"work": part.work}
                told = {"epoch": step.epoch, "step": step.index, "samples": part.samples, **counted}
                from_s = max(from_s, over_s[rank])
                if to_s > from_s:
                    more = {"args": told} if name == "work" else {}
                    note("X", name, rank, ts=from_s * _US, dur=(to_s - from_s) * _US, **more)
                    over_s[rank] = to_s
        begins_us[number] = _US * min(turn.begin_s for turn in step.turns.values())
        shares = {f"rank {rank}": turn.samples for rank, turn in step.turns.items()}
        note("C", "samples", whole, ts=begins_us[number], args=shares)
    for number, values in run.queues:
        if number in begins_us:
            note("C", "batches' budget overspent", whole, ts=begins_us[number], args=dict(values))
    for change in run.changes:
        if change.step in begins_us:
            name = change.reason or change.kind or "change"
            note("i", name, whole, s="g", ts=begins_us[change.step], args={"shares": list(change.shares)})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
