"""A run as a trace in Chrome's JSON format, which Perfetto reads (layer P).

One process per rank with a track of its work, exchange and idling; changes of shares or plan as instants, shares and
queues as counters.
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

    def note(kind: str, name: str, rank: int, **more: Any) -> None:
        events.append({"ph": kind, "name": name, "pid": rank, "tid": 0, **more})

    for rank in range(run.ranks):
        note("M", "process_name", rank, args={"name": f"rank {rank} {run.devices.get(rank, '')}".strip()})
    begins_us: dict[int, float] = {}
    for number, (step, spent) in enumerate(zip(steps, spent_in(run, steps), strict=True), len(run.steps) - len(steps)):
        for rank, turn in step.turns.items():
            counted = {} if math.isnan(turn.work) else {"work": turn.work}
            told = {"epoch": step.epoch, "step": step.index, "samples": turn.samples, **counted}
            # What the host saw of waiting; idling on a GPU's stream is not seen there.
            idle_s, at_s = min(spent[rank].idle_s, turn.wait_s), turn.begin_s
            for name, seconds in (("work", turn.compute_s), ("idle", idle_s), ("exchange", turn.wait_s - idle_s)):
                if seconds > 0.0:
                    more = {"args": told} if name == "work" else {}
                    note("X", name, rank, ts=at_s * _US, dur=seconds * _US, **more)
                at_s += max(0.0, seconds)
        begins_us[number] = _US * min(turn.begin_s for turn in step.turns.values())
        shares = {f"rank {rank}": turn.samples for rank, turn in step.turns.items()}
        note("C", "samples", 0, ts=begins_us[number], args=shares)
    for number, values in run.queues:
        if number in begins_us:
            note("C", "batches' budget overspent", 0, ts=begins_us[number], args=dict(values))
    for change in run.changes:
        if change.step in begins_us:
            name = change.reason or change.kind or "change"
            note("i", name, 0, s="g", ts=begins_us[change.step], args={"shares": list(change.shares)})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
