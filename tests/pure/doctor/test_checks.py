"""Checks, on facts made up: what is found of each, how grave it is, and what to do."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest

from lightning_hetero.cluster.spec import cluster_from_plain
from lightning_hetero.doctor import checks
from lightning_hetero.doctor.facts import (
    DeviceFacts,
    Facts,
    GpuFacts,
    HostFacts,
    ModuleFacts,
    Package,
    Parity,
    failing,
    findings_text,
    warning,
    worst,
)

pytestmark = pytest.mark.pure
GIB = 2.0**30
_GROUPS = {"host": HostFacts, "gpus": GpuFacts, "module": ModuleFacts}


def changed(facts: Facts, **flat: Any) -> Facts:
    """Returns the facts with some changed, by flat names, each put where it belongs."""
    for group, kind in _GROUPS.items():
        own = {name: flat.pop(name) for name in {field.name for field in fields(kind)} & set(flat)}
        facts = replace(facts, **{group: replace(getattr(facts, group), **own)})
    return replace(facts, **flat)


def gpu(name: str, major: int, minor: int, *, free: float = 10.0) -> DeviceFacts:
    return DeviceFacts(name=name, capability=(major, minor), mem_bytes=10 * GIB, free_bytes=free * GIB)


NEW, MIDDLE, OLD = gpu("RTX 4090", 8, 9), gpu("RTX 3080", 8, 6), gpu("RTX 2080", 7, 5)
MIG, ARC = gpu("H100 MIG 1g.10gb", 9, 0), replace(gpu("Arc", 0, 0), capability=None)
LINK = {"bandwidth": "12 GB/s"}
BOX = changed(
    Facts(),
    devices=(NEW, MIDDLE, OLD),
    links_by="nccl",
    cuda="12.8",
    arch_list=("sm_75", "sm_80", "sm_86", "sm_90"),
    cores=16,
    shm_bytes=64 * GIB,
    shm_free_bytes=60 * GIB,
    backends=("gloo", "nccl"),
    environ={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
    cluster=cluster_from_plain({"devices": [{"speed": v} for v in (1.0, 0.5, 0.25)], "link": LINK}),
)
SLOW_LINK = {"devices": [{"count": 3}], "link": LINK, "links": [{"between": [0, 2], "bandwidth": "1 GB/s"}]}
CHOSEN = {"verdict": "strategy=hetero_balanced: 2 times", "python": "trainer = 1", "engine": "balanced"}


def package(name: str, installed: str | None, wanted: str, *, fits: bool = False) -> dict[str, Any]:
    return {"packages": (Package(name=name, installed=installed, wanted=wanted, fits=fits),)}


def gradients(*found: tuple[Any, ...], **more: Any) -> dict[str, Any]:
    parts = [Parity(engine=engine, error=error, problem="".join(problem)) for engine, error, *problem in found]
    return {"parity": tuple(parts), **more}


def environ(**values: str) -> dict[str, Any]:
    return {"environ": values}


# A check, what is changed of a good machine, the gravest level, and what its findings say or advise; "-": nothing.
ROWS: list[tuple[Any, dict[str, Any], str, list[str]]] = [
    (checks.versions, package("torch", "2.4.0", ">=2.5"), "fail",
     ["torch 2.4.0, needed is >=2.5", "install 'torch>=2.5'"]),
    (checks.versions, package("numpy", None, ""), "fail", ["numpy not installed, needed is any version"]),
    (checks.versions, package("torch", "2.13", ">=2.5", fits=True), "ok", ["torch 2.13"]),
    (checks.device_order, environ(), "warn", ["rank 0: RTX 4090, rank 1: RTX 3080", "PCI_BUS_ID"]),
    (checks.device_order, {"devices": (MIDDLE,) * 2, **environ()}, "ok", []),
    (checks.device_order, {"devices": ()}, "ok", ["processes on 16 cores"]),
    (checks.device_order, {"devices": (), "problem": "no driver"}, "fail", ["no driver"]),
    (checks.same_names, environ(CUDA_VISIBLE_DEVICES="0,1,0"), "fail", ["names 0 twice"]),
    (checks.same_names, environ(LOCAL_WORLD_SIZE="4"), "warn",
     ["of 4 ranks on this node this one sees 3 GPUs", "gloo"]),
    (checks.same_names, {"devices": (), **environ(LOCAL_WORLD_SIZE="4")}, "-", []),
    (checks.bfloat16, {"devices": (NEW, replace(OLD, computes_bfloat16=False))}, "warn",
     ["rank 1 (RTX 2080): bfloat16 is emulated", "'16-mixed'"]),
    (checks.instances, {"devices": (MIG,) * 2}, "warn", ["rank 1 (H100 MIG 1g.10gb)"]),
    (checks.architectures, {"cuda": None, "devices": (ARC,)}, "-", []),
    (checks.architectures, {"cuda": None}, "fail", ["one for CPUs"]),
    (checks.architectures, {"devices": ()}, "-", []),
    (checks.architectures, {"devices": (gpu("GTX 1070", 6, 1),)}, "fail", ["an older wheel"]),
    (checks.architectures, {"devices": (gpu("B200", 10, 0),)}, "fail", ["a newer wheel"]),
    (checks.architectures, {"arch_list": ("sm_75", "sm_80", "sm_86")}, "ok", ["has code for sm_75, sm_86, sm_89"]),
    (checks.architectures, {"arch_list": ("sm_80", "sm_86", "sm_90")}, "fail",
     ["RTX 2080, sm_75)", "12.8 has no code"]),
    (checks.architectures, {"arch_list": ("sm_75", "sm_80", "compute_80")}, "ok", []),
    (checks.architectures, {"arch_list": ("sm_86", "sm_89", "compute_70")}, "warn",
     ["sm_75): the wheel has only PTX"]),
    (checks.architectures, {"arch_list": ("sm_75", "sm_86a")}, "ok", []),
    (checks.architectures, {"arch_list": ()}, "fail", ["(none)"]),
    (checks.memory, {"devices": (replace(NEW, free_bytes=None), MIDDLE)}, "ok", ["free by rank: not known, 10 GiB"]),
    (checks.memory, {"devices": (gpu("RTX 4090", 8, 9, free=4.0),)}, "warn", ["6 GiB of 10 GiB are taken"]),
    (checks.shared_memory, {"shm_bytes": 2.0**26, "shm_free_bytes": 2.0**26}, "warn",
     ["64 MiB of 64 MiB free", "--shm-size=1g"]),
    (checks.shared_memory, {}, "ok", []),
    (checks.shared_memory, {"shm_bytes": None}, "warn", ["there is no /dev/shm"]),
    (checks.backends, {"backends": ("nccl",)}, "fail", []),
    (checks.backends, {"backends": ("gloo",)}, "warn", []),
    (checks.backends, {"backends": ("gloo",), "devices": ()}, "ok", []),
    (checks.cores, {"cores": 2}, "warn", []),
    (checks.cores, {"cores": 2, "devices_wanted": 2}, "ok", []),
    (checks.rendezvous, {"unresolved": "node0"}, "fail", ["MASTER_ADDR=node0 cannot be resolved"]),
    (checks.rendezvous, {"taken_port": "29500"}, "fail", ["MASTER_PORT=29500 is in use"]),
    (checks.rendezvous, {"interfaces": ("lo", "eth0"), **environ(GLOO_SOCKET_IFNAME="ib0")}, "fail",
     ["names ib0, which this machine has not"]),
    (checks.rendezvous, environ(WORLD_SIZE="4"), "fail", ["WORLD_SIZE=4 and no MASTER_ADDR"]),
    (checks.rendezvous, {"interfaces": ("eth0",), **environ(
        GLOO_SOCKET_IFNAME="eth0", NCCL_SOCKET_IFNAME="^docker", TORCHELASTIC_RUN_ID="a")}, "ok", ["torchrun"]),
    (checks.speeds, {}, "ok", ["stock DDP waits for 42 % of the device-seconds", "lightning-hetero-plan"]),
    (checks.speeds, {"cluster": None, "probe_problem": "the probe failed"}, "warn", ["the probe failed"]),
    (checks.links, {"cluster": cluster_from_plain(SLOW_LINK)}, "warn", ["from rank 0", "1 GB/s to 12 GB/s"]),
    (checks.links, {"cluster": cluster_from_plain({"devices": [{}]})}, "-", []),
    (checks.world_size, {}, "ok", ["devices: all there are, nodes: 1"]),
    (checks.world_size, {"devices": (NEW,), "devices_wanted": 2}, "fail",
     ["devices=2, but this machine shows 1 GPUs"]),
    (checks.world_size, {"devices_wanted": 2, **environ(LOCAL_WORLD_SIZE="4")}, "fail", ["torchrun has started 4"]),
    (checks.world_size, {"devices": (), "devices_wanted": 6, "nodes_wanted": 2,
                           **environ(LOCAL_WORLD_SIZE="6", WORLD_SIZE="8")}, "warn",
     ["WORLD_SIZE=8, but num_nodes=2 nodes of 6 make 12"]),
    (checks.world_size, {"devices": (), "devices_wanted": 4, **environ(SLURM_TASKS_PER_NODE="6,1(x2)")}, "fail",
     ["SLURM has 6/1/1 tasks per node"]),
    (checks.world_size, {"devices": (), "devices_wanted": 6, **environ(SLURM_TASKS_PER_NODE="6,1(x2)")}, "ok",
     ["6 per node"]),
    (checks.parity, {}, "-", []),
    (checks.parity, gradients(("one process", 0.0), ("ddp", 1e-15), ("stale", 1e-15)), "ok", ["ten steps equal"]),
    (checks.parity, gradients(("one process", 0.0), ("balanced", 0.5)), "fail",
     ["by 5.0e-01", "loss_reduction='sum'"]),
    (checks.parity, gradients(("one process", 0.0), ("pipeline", math.nan, "TypeError: no")), "warn",
     ["TypeError: no"]),
    (checks.parity, gradients(("ddp", math.nan, "no")), "fail", ["no"]),
    (checks.parity, gradients(("balanced", math.nan)), "fail", []),
    (checks.parity, gradients(("one process", 0.3), ("balanced", 0.3)), "warn", ["draws random numbers"]),
    (checks.parity, gradients(("one process", math.nan, "KeyError: 'x'")), "fail", ["KeyError: 'x'"]),
    (checks.verdict, {}, "-", []),
    (checks.verdict, gradients(("balanced", 1e-15), **CHOSEN), "ok", ["to train this way:\n\ntrainer = 1"]),
    (checks.verdict, gradients(("balanced", 0.5), **CHOSEN), "warn", ["gradients above"]),
    (checks.verdict, {"verdict": "strategy=ddp: fine", "engine": "ddp"}, "ok", ["strategy=ddp: fine"]),
]  # fmt: skip


@pytest.mark.parametrize(("check", "facts", "level", "words"), ROWS)
def test_what_a_check_finds(check: Any, facts: dict[str, Any], level: str, words: list[str]) -> None:
    findings = check(changed(BOX, **facts))
    assert (worst(findings) if findings else "-") == level
    said = findings_text(findings)
    assert all(word in said for word in words), said
    assert all(finding.advice for finding in findings if finding.level != "ok"), said


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
def test_a_good_machine_has_no_complaint_and_every_complaint_says_what_to_do(check: Any) -> None:
    assert {finding.level for finding in check(BOX)} <= {"ok"}
    devices = (gpu("old", 3, 0, free=1.0), gpu("new", 9, 0))
    bad = changed(Facts(), devices=devices, environ={"WORLD_SIZE": "2"})
    assert all(finding.advice for finding in check(bad) if finding.level != "ok")


def test_the_gravest_level_counts_and_checks_run_in_order() -> None:
    assert worst([]) == "ok"
    found = [warning("a", "t", "do"), failing("b", "u", "")]
    assert worst(found) == "fail" and findings_text(found) == "warn  a: t\n      -> do\nfail  b: u"
    facts = changed(BOX, **gradients(("one process", 0.0), ("ddp", 1e-15), verdict="x"))
    assert checks.examine(facts) == [finding for check in checks.CHECKS for finding in check(facts)]
