"""A run as a trace in Chrome's JSON format, which Perfetto reads (layer P).

One process per rank with a track of its work, exchange and idling; changes of shares or plan as instants, shares and
queues as counters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, TypeVar

from lightning_hetero.report.run import RecordedRun
from lightning_hetero.report.spent import least_wait_s, spent_in

T = TypeVar("T")

_MOST_TURNS = 20_000  # the last ones of a long run: the viewer reads it into memory
_US = 1e6


def perfetto_of(run: RecordedRun) -> dict[str, Any]:
    """Returns the JSON object; times in microseconds."""
    steps = run.steps[-max(1, _MOST_TURNS // run.ranks) :]
    least_s = least_wait_s(run)
    events: list[dict[str, Any]] = []
    for rank in range(run.ranks):
        name = f"rank {rank} {run.devices.get(rank, '')}".strip()
        events.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": name}})
    offset = len(run.steps) - len(steps)
    queues, changes = _by_step(run.queues), _by_step((change.step, change) for change in run.changes)
    for number, step in enumerate(steps, start=offset):
        for rank, spent in spent_in(run, step, least_s).items():
            turn = step.turns[rank]
            at_s = turn.end_s - turn.wait_s - turn.compute_s
            arguments = {"epoch": step.epoch, "step": step.index, "samples": turn.samples}
            if not math.isnan(turn.work):
                arguments["work"] = turn.work
            # What the host saw of waiting; idling on a GPU's stream is not seen there.
            idle_s = min(spent.idle_s, turn.wait_s)
            slices = (("work", turn.compute_s), ("idle", idle_s), ("exchange", turn.wait_s - idle_s))
            for name, seconds in slices:
                if seconds > 0.0:
                    found: dict[str, Any] = {"ph": "X", "name": name, "pid": rank, "tid": 0}
                    found |= {"ts": at_s * _US, "dur": seconds * _US}
                    events.append(found | {"args": arguments} if name == "work" else found)
                at_s += max(0.0, seconds)
        begin_us = _US * min(t.end_s - t.wait_s - t.compute_s for t in step.turns.values())
        shares = {f"rank {rank}": turn.samples for rank, turn in step.turns.items()}
        events.append({"ph": "C", "name": "samples", "pid": 0, "ts": begin_us, "args": shares})
        events += [
            {"ph": "C", "name": "batches' budget overspent", "pid": 0, "ts": begin_us, "args": dict(values)}
            for values in queues.get(number, ())
        ]
        events += [
            {
                "ph": "i", "s": "g", "name": change.reason or change.kind or "change", "pid": 0, "tid": 0,
                "ts": begin_us, "args": {"shares": list(change.shares)},
            }
            for change in changes.get(number, ())
        ]  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _by_step(numbered: Iterable[tuple[int, T]]) -> dict[int, list[T]]:
    found: dict[int, list[T]] = {}
    for number, value in numbered:
        found.setdefault(number, []).append(value)
    return found
