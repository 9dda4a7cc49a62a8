"""Checks of the machine: each a small function of `Facts` (layer P)."""

from __future__ import annotations

import re
from collections import Counter

from lightning_hetero.cluster.units import bytes_text, rate_text
from lightning_hetero.doctor.facts import DeviceFacts, Facts
from lightning_hetero.doctor.finding import Finding

__all__ = ["MACHINE_CHECKS"]

_SHM_LEAST = 256 * 2.0**20  # Docker's default is 64 MiB
_SLOTS = 3.0  # of the parameters' size, per rank of a node, that the stale engine keeps there
_SPREAD = 1.05  # fastest over slowest, from which on devices are unequal: the probe's own tolerance
_SLOW_LINK = 4.0  # fastest over slowest


def versions(facts: Facts) -> list[Finding]:
    """Packages that are needed, in versions that are known to work."""
    found: list[Finding] = []
    for package in facts.packages:
        have = package.installed or "not installed"
        if package.fits:
            continue
        pip = f"pip install '{package.name}{package.wanted}'"
        text = f"{package.name} {have}, needed is {package.wanted or 'any version'}"
        found.append(Finding(check="versions", level="fail", text=text, advice=pip))
    if not any(finding.level == "fail" for finding in found):
        known = ", ".join(f"{p.name} {p.installed}" for p in facts.packages if p.installed)
        found.insert(0, Finding(check="versions", level="ok", text=known))
    return found


def device_order(facts: Facts) -> list[Finding]:
    """Which rank gets which device."""
    check = "device order"
    if facts.devices_problem:
        text = f"torch does not get at the GPUs: {facts.devices_problem}"
        advice = "look at nvidia-smi, the driver and CUDA_VISIBLE_DEVICES; --accelerator cpu leaves GPUs out"
        return [Finding(check=check, level="fail", text=text, advice=advice)]
    if not facts.devices:
        text = f"no GPU: ranks are processes on {facts.cores} cores"
        return [Finding(check=check, level="ok", text=text)]
    order = ", ".join(f"rank {rank}: {device.name}" for rank, device in enumerate(facts.devices))
    unequal = len({device.name for device in facts.devices}) > 1
    if unequal and facts.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        return [
            Finding(
                check=check,
                level="warn",
                text=f"{order}: CUDA's order, fastest first, is not that of nvidia-smi",
                advice="export CUDA_DEVICE_ORDER=PCI_BUS_ID, so that CUDA_VISIBLE_DEVICES means what nvidia-smi shows",
            )
        ]
    return [Finding(check=check, level="ok", text=order)]


def architectures(facts: Facts) -> list[Finding]:
    """Whether torch's wheel holds code for every card."""
    check = "CUDA architectures"
    cards = [(rank, device, device.capability) for rank, device in enumerate(facts.devices) if device.capability]
    if not cards:
        return []
    if facts.cuda is None:
        text = "there are GPUs, and torch's wheel is one for CPUs"
        return [
            Finding(check=check, level="fail", text=text, advice="install a CUDA wheel of torch, see pytorch.org")
        ]
    found = [_architecture(rank, device, version, facts) for rank, device, version in cards]
    bad = [finding for finding in found if finding.level != "ok"]
    if bad:
        return bad
    kinds = ", ".join(sorted({f"sm_{a}{b}" for _, _, (a, b) in cards}))
    return [Finding(check=check, level="ok", text=f"the wheel for CUDA {facts.cuda} has code for {kinds}")]


def _architecture(rank: int, device: DeviceFacts, capability: tuple[int, int], facts: Facts) -> Finding:
    check, (major, minor) = "CUDA architectures", capability
    binary = [(int(m[1]), int(m[2])) for a in facts.arch_list if (m := re.fullmatch(r"sm_(\d+)(\d)[af]?", a))]
    source = [(int(m[1]), int(m[2])) for a in facts.arch_list if (m := re.fullmatch(r"compute_(\d+)(\d)[af]?", a))]
    name = f"rank {rank} ({device.name}, sm_{major}{minor})"
    if any(a == major and b <= minor for a, b in binary):
        return Finding(check=check, level="ok", text=f"{name}: the wheel has code for it")
    if any((a, b) <= (major, minor) for a, b in source):
        return Finding(
            check=check,
            level="warn",
            text=f"{name}: the wheel has only PTX for it, which is compiled at the first use",
            advice="expect a slow first step, or install a wheel of torch that lists this architecture",
        )
    has = " ".join(facts.arch_list) or "none"
    newer = all((major, minor) > arch for arch in binary) if binary else True
    wheel = "a newer wheel" if newer else "an older wheel, built for CUDA 12.6 or 11.8,"
    return Finding(
        check=check,
        level="fail",
        text=f"{name}: the wheel for CUDA {facts.cuda} has no code for it ({has})",
        advice=f"install {wheel} of torch that has it, or leave the card out with CUDA_VISIBLE_DEVICES",
    )


def bfloat16(facts: Facts) -> list[Finding]:
    """Whether a card only emulates bfloat16."""
    without = [f"rank {rank} ({d.name})" for rank, d in enumerate(facts.devices) if not d.computes_bfloat16]
    if not without:
        return []
    text = f"{', '.join(without)}: bfloat16 is emulated there, many times slower, and all ranks wait for it"
    advice = "train with precision='16-mixed' or '32-true', not with bf16"
    return [Finding(check="bfloat16", level="warn", text=text, advice=advice)]


def instances(facts: Facts) -> list[Finding]:
    """Whether cards are divided into instances."""
    divided = [f"rank {rank} ({device.name})" for rank, device in enumerate(facts.devices) if " MIG " in device.name]
    if not divided:
        return []
    text = f"{', '.join(divided)}: an instance of a divided card; a process sees one, and NCCL joins no two of a card"
    advice = (
        "start a process for each instance with CUDA_VISIBLE_DEVICES=MIG-..., and set process_group_backend='gloo'; or"
        " switch MIG off"
    )
    return [Finding(check="MIG", level="warn", text=text, advice=advice)]


def shared_memory(facts: Facts) -> list[Finding]:
    """Whether ``/dev/shm`` holds the stale engine's slots, and loaders' batches."""
    check = "shared memory"
    if facts.shm_bytes is None or facts.shm_free_bytes is None:
        text = "there is no /dev/shm: hetero_stale uses a temporary folder"
        return [
            Finding(check=check, level="warn", text=text, advice="mount a tmpfs there if that folder is on a disk")
        ]
    ranks = facts.devices_wanted or len(facts.devices) or (len(facts.cluster.devices) if facts.cluster else 1)
    need = max(_SHM_LEAST, _SLOTS * facts.param_bytes * ranks)
    text = f"{bytes_text(facts.shm_free_bytes)} of {bytes_text(facts.shm_bytes)} free in /dev/shm"
    if facts.shm_free_bytes >= need:
        return [Finding(check=check, level="ok", text=text)]
    return [
        Finding(
            check=check,
            level="warn",
            text=f"{text}; hetero_stale on {ranks} ranks here, and loaders with workers, want {bytes_text(need)}",
            advice=f"docker run --shm-size={_gib(need)}g (Kubernetes: an emptyDir of medium Memory at /dev/shm)",
        )
    ]


def _gib(size_bytes: float) -> int:
    return max(1, -(-int(size_bytes) // 2**30))


def fork(facts: Facts) -> list[Finding]:
    """Whether the stale engine's server can be forked."""
    if "fork" in facts.start_methods:
        return [Finding(check="fork", level="ok", text="processes can be forked")]
    return [
        Finding(
            check="fork",
            level="warn",
            text=f"{facts.system} forks no processes: hetero_stale has no server here",
            advice="use hetero_balanced or hetero_pipeline, or Linux",
        )
    ]


def backends(facts: Facts) -> list[Finding]:
    """Whether ranks can talk."""
    check = "backends"
    if "gloo" not in facts.backends:
        has = ", ".join(facts.backends) or "none"
        text = f"torch.distributed has no gloo, which all engines measure with (it has {has})"
        return [Finding(check=check, level="fail", text=text, advice="install an official wheel of torch")]
    if len(facts.devices) > 1 and "nccl" not in facts.backends:
        text = "several GPUs and no NCCL: gradients travel through host memory"
        return [Finding(check=check, level="warn", text=text, advice="install a CUDA wheel of torch on Linux")]
    return [Finding(check=check, level="ok", text=", ".join(facts.backends))]


def rendezvous(facts: Facts) -> list[Finding]:
    """Whether ranks will find one another."""
    check, environ = "rendezvous", facts.environ
    found: list[Finding] = []
    for address, resolves in facts.addresses.items():
        if not resolves:
            text = f"MASTER_ADDR={address} cannot be resolved"
            advice = "give a host name or an address that every node reaches"
            found.append(Finding(check=check, level="fail", text=text, advice=advice))
    for port, free in facts.free_ports.items():
        if not free:
            text = f"MASTER_PORT={port} is in use on this machine, or no port"
            advice = "give another one, or end what listens there (a run that was not ended?)"
            found.append(Finding(check=check, level="fail", text=text, advice=advice))
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        missing = [part for part in _interfaces(environ.get(name, "")) if not _has(facts, part)]
        if missing and facts.interfaces:
            text = f"{name}={environ[name]} names {', '.join(missing)}, which this machine has not"
            advice = f"choose of {', '.join(facts.interfaces)}"
            found.append(Finding(check=check, level="fail", text=text, advice=advice))
    many = int(environ.get("WORLD_SIZE", "1") or 1) > 1
    if many and "MASTER_ADDR" not in environ:
        text = f"WORLD_SIZE={environ['WORLD_SIZE']} and no MASTER_ADDR"
        advice = "start ranks with torchrun or srun, which say where they meet"
        found.append(Finding(check=check, level="fail", text=text, advice=advice))
    launcher = (
        "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "SLURM" if "SLURM_JOB_ID" in environ else "Lightning"
    )
    return found or [Finding(check=check, level="ok", text=f"ranks are started by {launcher}")]


def _interfaces(value: str) -> list[str]:
    return [part.strip() for part in value.lstrip("=").split(",") if part.strip() and not value.startswith("^")]


def _has(facts: Facts, name: str) -> bool:
    """NCCL takes names by their beginning, gloo as they are: the milder rule for both."""
    return any(interface.startswith(name) for interface in facts.interfaces)


def speeds(facts: Facts) -> list[Finding]:
    """How unequal the devices are."""
    check, cluster = "relative speeds", facts.cluster
    if cluster is None:
        why = facts.probe_problem or "the devices were not probed"
        return [
            Finding(check=check, level="warn", text=why, advice="mend what stands above, then run the doctor again")
        ]
    values = [device.speed for device in cluster.devices]
    shown = ", ".join(f"rank {r} {d.speed:.2f}" for r, d in enumerate(cluster.devices[:16]))
    if max(values) > _SPREAD * min(values):
        waited = 100.0 * (1.0 - sum(min(values) / value for value in values) / len(values))
        text = f"{shown}: with equal shares stock DDP waits for {waited:.0f} % of the device-seconds"
        advice = "lightning-hetero-plan says what each engine would gain"
        return [Finding(check=check, level="ok", text=text, advice=advice)]
    return [Finding(check=check, level="ok", text=f"{shown}: equal within the probe's tolerance")]


def memory(facts: Facts) -> list[Finding]:
    """How much memory training may use."""
    found: list[Finding] = []
    for rank, device in enumerate(facts.devices):
        if device.free_bytes is not None and device.free_bytes < 0.8 * device.mem_bytes:
            held = bytes_text(device.mem_bytes - device.free_bytes)
            found.append(
                Finding(
                    check="memory",
                    level="warn",
                    text=f"rank {rank} ({device.name}): {held} of {bytes_text(device.mem_bytes)} are taken already",
                    advice="nvidia-smi shows by whom; plans count with what is free, less a reserve",
                )
            )
    if not found and facts.devices:
        free = ", ".join("not known" if d.free_bytes is None else bytes_text(d.free_bytes) for d in facts.devices)
        found.append(Finding(check="memory", level="ok", text=f"free by rank: {free}"))
    return found


def links(facts: Facts) -> list[Finding]:
    """Whether some links are far slower than others."""
    check, cluster = "links", facts.cluster
    if cluster is None or len(cluster.devices) < 2:
        return []
    n = len(cluster.devices)
    rates = {(a, b): cluster.links[a][b].bandwidth_bytes_per_s for a in range(n) for b in range(n) if a != b}
    slowest, fastest = min(rates, key=rates.__getitem__), max(rates.values())
    text = f"{rate_text(rates[slowest])} to {rate_text(fastest)}{facts.links_by and f', by {facts.links_by}'}"
    if fastest > _SLOW_LINK * rates[slowest]:
        a, b = slowest
        ends = f"from rank {a} ({cluster.devices[a].name}) to rank {b} ({cluster.devices[b].name})"
        return [
            Finding(
                check=check,
                level="warn",
                text=f"{text}; the slowest is {ends}",
                advice="hetero_pipeline plans with it; across machines choose the interface (NCCL_SOCKET_IFNAME)",
            )
        ]
    return [Finding(check=check, level="ok", text=text)]


def cores(facts: Facts) -> list[Finding]:
    """Whether processes on CPUs have cores of their own."""
    ranks = facts.devices_wanted or len(facts.devices) or 1
    if ranks <= facts.cores:
        return [Finding(check="cores", level="ok", text=f"{facts.cores} for {ranks} ranks")]
    return [
        Finding(
            check="cores",
            level="warn",
            text=f"{ranks} ranks share {facts.cores} cores: what they measure of each other's speed wanders",
            advice="start fewer ranks, or give the container more cores",
        )
    ]


def same_names(facts: Facts) -> list[Finding]:
    """Whether a device was given to two ranks."""
    check, found = "device order", list[Finding]()
    visible = facts.environ.get("CUDA_VISIBLE_DEVICES", "")
    repeated = [name for name, count in Counter(filter(None, visible.split(","))).items() if count > 1]
    if repeated:
        text = f"CUDA_VISIBLE_DEVICES={visible} names {', '.join(repeated)} twice"
        found.append(Finding(check=check, level="fail", text=text, advice="name each device once"))
    local = int(facts.environ.get("LOCAL_WORLD_SIZE", "0") or 0)
    if local > len(facts.devices) > 0:
        text = f"of {local} ranks on this node this one sees {len(facts.devices)} GPUs: NCCL joins no two ranks on one"
        advice = (
            "fine if each rank sees another GPU; else start as many as there are GPUs, or share them with"
            " process_group_backend='gloo', see docs/reference/gpu.md"
        )
        found.append(Finding(check=check, level="warn", text=text, advice=advice))
    return found


MACHINE_CHECKS = (
    versions, device_order, same_names, instances, architectures, bfloat16, memory, shared_memory, fork, backends,
    rendezvous, cores, speeds, links,
)  # fmt: skip
"""In the order in which people read them."""
