"""The pictures of the part *budget*, for ``docs/pictures``."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.joint import budget
from benchmarks.joint.pictures import Line, chart


def budget_pictures(raw: Mapping[str, Mapping[str, list[float]]]) -> dict[str, str]:
    """Returns name of the file -> SVG, of what `budget.measure` has returned."""
    limits, allowed = raw["limits"], budget.bounds(raw)
    best_s, vs = limits["best_s"][0], budget.VS
    times = [Line(name=name, x=vs, y=[s / best_s for s in raw[name]["time_s"]]) for name in budget.BANKS]
    allowed_s = Line(name="bound T* + O(1/V)", x=vs, y=[s / best_s for s in allowed["time_s"]], dashed=True)
    spent = [Line(name=name, x=vs, y=raw[name]["spent"]) for name in budget.BANKS]
    queues = [Line(name=name, x=vs, y=raw[name]["queue"]) for name in budget.BANKS]
    longest = Line(name="bound O(V)", x=vs, y=allowed["queue"], dashed=True)
    return {
        "budget_time.svg": chart(
            [*times, allowed_s], title="Mean time of a batch over T*", x="V", y="time / T*", most=2.0
        ),
        "budget_cost.svg": chart(spent, title="What is spent", x="V", y="cost / budget"),
        "budget_queue.svg": chart([*queues, longest], title="Mean queue", x="V", y="batches' budgets", log_y=True),
    }
