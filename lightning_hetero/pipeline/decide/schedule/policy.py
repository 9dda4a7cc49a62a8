"""How a schedule is generated: how much may be in flight, and what goes first. Known schedules are settings of these.

| policy | in flight | first | source |
|---|---|---|---|
| `per_link` (default) | per-link depth | head, forward, backward* | ours |
| `thrifty` | cumulative depth + 1 | head, forward, backward* | ours |
| `blocking` (default without overlap) | S - i, one more if the output loops back | head, forward, backward* | ours |
| `one_f_one_b` | S - i | backward | PipeDream-Flush (Narayanan et al., ICML 2021) |
| `interleaved` | a warm-up, then one forward, one backward | in turns | Megatron-LM (Narayanan et al., SC 2021) |
| `gpipe` | everything | every forward before any backward | GPipe, 2019 |
| `sequential` | one | | plain gradient accumulation |

* Forward only, the forward goes before the head: nothing waits for the head but the next micro-batch's place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lightning_hetero.pipeline.decide.schedule.times import PipelineTimes
from lightning_hetero.solvers.chain.depth import cumulative_depth, per_link_depth, textbook_depth

__all__ = [
    "POLICIES",
    "SchedulePolicy",
    "blocking",
    "gpipe",
    "interleaved",
    "one_f_one_b",
    "per_link",
    "sequential",
    "thrifty",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulePolicy:
    """Settings of the generator.

    Attributes:
        depths: most micro-batches in flight, per stage; at least 1. Forward only, stage 0's alone counts.
        priority: of what a device could do next, the first kind wins; a permutation of ``"HFB"``.
        forwards_first: no backward on a stage before its last forward.
        warm_up: per device; if given, a device does so many forwards, then one forward and one backward by turns, and
            waits where the next one is not ready. Among its stages it goes in rounds of as many micro-batches as
            there are devices. Only heads come in between, first. Else (empty) a device never waits while anything is
            ready and allowed.

    Raises:
        ValueError: a depth below 1, a warm-up below 0, or a priority that is no permutation.
    """

    depths: tuple[int, ...]
    priority: str = "HFB"
    forwards_first: bool = False
    warm_up: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, values, least in (("depths", self.depths, 1), ("warm_up", self.warm_up, 0)):
            for i, value in enumerate(values):
                if type(value) is not int or value < least:
                    raise ValueError(
                        f"SchedulePolicy.{name}[{i}]={value!r} must be a whole number >= {least} (micro-batches)"
                    )
        if sorted(self.priority) != ["B", "F", "H"]:
            raise ValueError(
                f"SchedulePolicy.priority={self.priority!r} must name H, F and B once each, the first to go first"
            )


def per_link(times: PipelineTimes) -> SchedulePolicy:
    """Every stage and every link's round trip has its micro-batches in flight; feed the stages behind first."""
    return SchedulePolicy(depths=_per_link(times), priority=_feed_first(times))


def thrifty(times: PipelineTimes) -> SchedulePolicy:
    """Fewer in flight, for short memory: a few per cent slower as a rule, and never more than `per_link` keeps."""
    busy_s = [0.0] * (times.stages + 1)
    for step, row in zip(times.route(), times.seconds, strict=True):
        if not step.is_message:
            busy_s[step.stage] += _mean(row)
    *stage_s, head_s = busy_s
    link_s, loop_s = _links(times)
    least = cumulative_depth(
        times.bottleneck_s, stage_s, link_s, loop_s, head_s, times.micro_batches, extra=1
    )
    return SchedulePolicy(depths=tuple(map(min, least, _per_link(times))), priority=_feed_first(times))


def blocking(times: PipelineTimes) -> SchedulePolicy:
    """Where devices wait for their own transfers, a link is part of two stages and needs nothing in flight."""
    more = times.loop_back and times.stages > 1
    depths = textbook_depth(times.stages + more, times.micro_batches)
    return SchedulePolicy(depths=depths[: times.stages], priority=_feed_first(times))


def one_f_one_b(times: PipelineTimes) -> SchedulePolicy:
    """The textbook's: made for a chain with free links, where it needs the least memory for full speed."""
    return SchedulePolicy(depths=textbook_depth(times.stages, times.micro_batches), priority="BHF")


def interleaved(times: PipelineTimes) -> SchedulePolicy:
    """Megatron-LM's schedule for several stages per device, dealt out by turns: ``devices = (0, 1, 0, 1)``.

    Made for equal stages and free links.

    Raises:
        ValueError: stages not dealt out by turns, or micro-batches not a multiple of the devices (it would hang).
    """
    devices = max(times.devices) + 1
    stages_each = times.stages // devices
    if times.devices != tuple(range(devices)) * stages_each:
        raise ValueError(f"interleaved needs stages dealt out by turns, 0 1 2 0 1 2, got devices {times.devices}")
    if stages_each > 1 and times.micro_batches % devices:
        raise ValueError(
            f"interleaved needs micro-batches in multiples of the {devices} devices, got {times.micro_batches}"
        )
    warm_up = tuple(2 * (devices - d - 1) + (stages_each - 1) * devices for d in range(devices))
    if stages_each == 1:
        warm_up = tuple(devices - d - 1 for d in range(devices))
    return SchedulePolicy(depths=(times.micro_batches,) * times.stages, warm_up=warm_up)


def gpipe(times: PipelineTimes) -> SchedulePolicy:
    """All forwards, then all backwards."""
    return SchedulePolicy(depths=(times.micro_batches,) * times.stages, priority="HFB", forwards_first=True)


def sequential(times: PipelineTimes) -> SchedulePolicy:
    """One micro-batch at a time."""
    return SchedulePolicy(depths=(1,) * times.stages)


POLICIES: Mapping[str, Callable[[PipelineTimes], SchedulePolicy]] = {
    "per_link": per_link,
    "thrifty": thrifty,
    "blocking": blocking,
    "one_f_one_b": one_f_one_b,
    "interleaved": interleaved,
    "gpipe": gpipe,
    "sequential": sequential,
}
"""The known policies by name, for settings in words."""


def _feed_first(times: PipelineTimes) -> str:
    return "HFB" if times.backward else "FHB"


def _per_link(times: PipelineTimes) -> tuple[int, ...]:
    link_s, loop_s = _links(times)
    return per_link_depth(times.bottleneck_s, link_s, loop_s, times.micro_batches)


def _links(times: PipelineTimes) -> tuple[list[float], float]:
    """Returns the mean one-way time of each link and of the loop [s]; none between stages on one device."""
    one_way = [0.0] * times.stages
    for step, row in zip(times.route(), times.seconds, strict=True):
        if step.is_message:
            one_way[step.cut] += _mean(row) / 2.0
    return one_way[:-1], one_way[-1]


def _mean(row: tuple[float, ...]) -> float:
    return sum(row) / len(row)
