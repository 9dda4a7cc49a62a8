"""What was found out about a machine, by concern, as plain values that a test can make up (layer P).

A judgement on one thing, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from lightning_hetero.types import Cluster


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """A package that is needed.

    Attributes:
        name: as on the index.
        installed: its version; None: it is not there.
        wanted: the versions that will do, e.g. ``">=2.6,<3"``.
        fits: whether the installed one is among them.
    """

    name: str
    installed: str | None
    wanted: str
    fits: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFacts:
    """The machine without its GPUs.

    Attributes:
        packages: needed ones.
        cores: processors that this process may use.
        shm_bytes, shm_free_bytes: of ``/dev/shm``; None: it does not exist.
        backends: of torch.distributed that are there.
        interfaces: of the network.
        unresolved: MASTER_ADDR, if it does not resolve; else None.
        taken_port: MASTER_PORT, if this machine cannot listen there; else None.
    """

    packages: tuple[Package, ...] = ()
    cores: int = 1
    shm_bytes: float | None = None
    shm_free_bytes: float | None = None
    backends: tuple[str, ...] = ("gloo",)
    interfaces: tuple[str, ...] = ()
    unresolved: str | None = None
    taken_port: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFacts:
    """A GPU.

    Attributes:
        name: e.g. ``"NVIDIA GeForce RTX 3080"``.
        capability: of CUDA, e.g. (8, 6); None: it is no card of NVIDIA's.
        mem_bytes: of its memory.
        free_bytes: of it; None: nothing tells.
        computes_bfloat16: and does not emulate it.
    """

    name: str
    capability: tuple[int, int] | None
    mem_bytes: float
    free_bytes: float | None = None
    computes_bfloat16: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuFacts:
    """GPUs and torch's wheel.

    Attributes:
        devices: in the order in which ranks get them.
        problem: why torch does not tell of them.
        cuda: version of CUDA that torch's wheel was built for; None: a wheel for CPUs.
        arch_list: architectures in the wheel, e.g. ``("sm_80", "compute_90")``.
    """

    devices: tuple[DeviceFacts, ...] = ()
    problem: str = ""
    cuda: str | None = None
    arch_list: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Parity:
    """Gradients of an engine on two processes compared with those of one.

    Attributes:
        engine: its name; ``"one process"``: a second run of the single process.
        error: largest difference of the mean gradient, relative to its largest value; NaN: it could not be had.
        problem: why not.
    """

    engine: str
    error: float
    problem: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleFacts:
    """What is known of a module, if one was given.

    Attributes:
        parity: gradients.
        verdict: of the planner; empty: it was not asked.
        engine: that it chose; empty: stock DDP, or none.
        python: what to write instead of the user's Trainer, for that engine.
    """

    parity: tuple[Parity, ...] = ()
    verdict: str = ""
    engine: str = ""
    python: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """All that is looked at. What was not asked for is left at its default.

    Attributes:
        host, gpus, module: by concern.
        environ: variables that decide about ranks, rendezvous and devices.
        cluster: of the probe; None: it was not made.
        links_by: backend that its links were measured with.
        probe_problem: why not.
        devices_wanted, nodes_wanted: of the Trainer; None: not said.
    """

    host: HostFacts = HostFacts()
    gpus: GpuFacts = GpuFacts()
    module: ModuleFacts = ModuleFacts()
    environ: Mapping[str, str] = field(default_factory=dict[str, str])
    cluster: Cluster | None = None
    links_by: str = ""
    probe_problem: str = ""
    devices_wanted: int | None = None
    nodes_wanted: int | None = None


Level = Literal["ok", "warn", "fail"]
_ORDER: tuple[Level, ...] = ("ok", "warn", "fail")


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding.

    Attributes:
        level: ``"ok"``; ``"warn"``: something will be slower or missing; ``"fail"``: something will not train.
        check: what was looked at, e.g. ``"shared memory"``.
        text: what was found.
        advice: what to do; empty where nothing need be done.
    """

    level: Level
    check: str
    text: str
    advice: str = ""


fine, warning, failing = (partial(Finding, level) for level in _ORDER)
"""Make a finding of each level, of what was looked at, what was found, and advice."""


def worst(findings: Iterable[Finding]) -> Level:
    """Returns the gravest level of all; ``"ok"`` of none."""
    return _ORDER[max((_ORDER.index(finding.level) for finding in findings), default=0)]


def findings_text(findings: Sequence[Finding]) -> str:
    """Returns the findings as lines for people, in the order given.

    >>> print(findings_text([warning("fork", "not available", "use Linux")]))
    warn  fork: not available
          -> use Linux
    """
    lines: list[str] = []
    for finding in findings:
        lines.append(f"{finding.level:<4}  {finding.check}: {finding.text}")
        if finding.advice:
            lines.append(f"      -> {finding.advice}")
    return "\n".join(lines)
