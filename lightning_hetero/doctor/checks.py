"""Checks of the probe, of the configuration and of gradients, the verdict, and all checks in order (layer P).

Checks of the host and of how ranks would meet: each a small function of `Facts`.

Checks of the GPUs: each a small function of `Facts`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

from lightning_hetero.cluster.units import bytes_text, rate_text, tasks_per_node
from lightning_hetero.doctor.facts import DeviceFacts, Facts, Finding, Parity, failing, fine, warning
from lightning_hetero.plan.estimate import strategy_name

_SHM_LEAST = 256 * 2.0**20  # Docker's default is 64 MiB


def versions(facts: Facts) -> list[Finding]:
    """Packages that are needed, in versions that are known to work."""
    wrong = [package for package in facts.host.packages if not package.fits]
    known = ", ".join(f"{p.name} {p.installed}" for p in facts.host.packages if p.installed)
    needed = [f"{p.name} {p.installed or 'not installed'}, needed is {p.wanted or 'any version'}" for p in wrong]
    advice = [f"pip install '{p.name}{p.wanted}'" for p in wrong]
    return [failing("versions", *one) for one in zip(needed, advice, strict=True)] or [fine("versions", known)]


def shared_memory(facts: Facts) -> list[Finding]:
    """Whether ``/dev/shm`` holds the batches of loaders with workers."""
    check, whole, free = "shared memory", facts.host.shm_bytes, facts.host.shm_free_bytes
    if whole is None or free is None:
        return [warning(check, "there is no /dev/shm: loaders with workers fail", "mount a tmpfs there")]
    text = f"{bytes_text(free)} of {bytes_text(whole)} free in /dev/shm"
    if free >= _SHM_LEAST:
        return [fine(check, text)]
    text += f"; loaders with workers want {bytes_text(_SHM_LEAST)} or more"
    return [warning(check, text, "docker run --shm-size=1g (Kubernetes: an emptyDir of medium Memory at /dev/shm)")]


def backends(facts: Facts) -> list[Finding]:
    """Whether ranks can talk."""
    check, names = "backends", facts.host.backends
    if "gloo" not in names:
        has = ", ".join(names) or "none"
        text = f"torch.distributed has no gloo, which all engines measure with (it has {has})"
        return [failing(check, text, "install an official wheel of torch")]
    if len(facts.gpus.devices) > 1 and "nccl" not in names:
        text = "several GPUs and no NCCL: gradients travel through host memory"
        return [warning(check, text, "install a CUDA wheel of torch on Linux")]
    return [fine(check, ", ".join(names))]


def rendezvous(facts: Facts) -> list[Finding]:
    """Whether ranks will find one another."""
    check, environ, there = "rendezvous", facts.environ, facts.host.interfaces
    found: list[Finding] = []
    if (address := facts.host.unresolved) is not None:
        advice = "give a host name or an address that every node reaches"
        found.append(failing(check, f"MASTER_ADDR={address} cannot be resolved", advice))
    if (port := facts.host.taken_port) is not None:
        advice = "give another one, or end what listens there (a run that was not ended?)"
        found.append(failing(check, f"MASTER_PORT={port} is in use on this machine, or no port", advice))
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        # NCCL takes names by their beginning, gloo as they are: the milder rule for both.
        missing = [part for part in _named(environ.get(name, "")) if not any(at.startswith(part) for at in there)]
        if missing and there:
            text = f"{name}={environ[name]} names {', '.join(missing)}, which this machine has not"
            found.append(failing(check, text, f"choose of {', '.join(there)}"))
    if int(environ.get("WORLD_SIZE", "1") or 1) > 1 and "MASTER_ADDR" not in environ:
        text = f"WORLD_SIZE={environ['WORLD_SIZE']} and no MASTER_ADDR"
        found.append(failing(check, text, "start ranks with torchrun or srun, which say where they meet"))
    launcher = (
        "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "SLURM" if "SLURM_JOB_ID" in environ else "Lightning"
    )
    return found or [fine(check, f"ranks are started by {launcher}")]


def _named(value: str) -> list[str]:
    """Returns the interfaces that a variable names; none where it names what is not to be used."""
    return [part.strip() for part in value.lstrip("=").split(",") if part.strip() and not value.startswith("^")]


def cores(facts: Facts) -> list[Finding]:
    """Whether each process on CPUs has its own cores."""
    ranks, there = facts.devices_wanted or len(facts.gpus.devices) or 1, facts.host.cores
    if ranks <= there:
        return [fine("cores", f"{there} for {ranks} ranks")]
    text = f"{ranks} ranks share {there} cores: what they measure of each other's speed wanders"
    return [warning("cores", text, "start fewer ranks, or give the container more cores")]


def device_order(facts: Facts) -> list[Finding]:
    """Which rank gets which device."""
    check, devices = "device order", facts.gpus.devices
    if facts.gpus.problem:
        advice = "look at nvidia-smi, the driver and CUDA_VISIBLE_DEVICES; --accelerator cpu leaves GPUs out"
        return [failing(check, f"torch does not get at the GPUs: {facts.gpus.problem}", advice)]
    if not devices:
        return [fine(check, f"no GPU: ranks are processes on {facts.host.cores} cores")]
    order = ", ".join(f"rank {rank}: {device.name}" for rank, device in enumerate(devices))
    if len({device.name for device in devices}) > 1 and facts.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        advice = "export CUDA_DEVICE_ORDER=PCI_BUS_ID, so that CUDA_VISIBLE_DEVICES means what nvidia-smi shows"
        return [warning(check, f"{order}: CUDA's order, fastest first, is not that of nvidia-smi", advice)]
    return [fine(check, order)]


def same_names(facts: Facts) -> list[Finding]:
    """Whether a device was given to two ranks."""
    check, found = "device order", list[Finding]()
    visible = facts.environ.get("CUDA_VISIBLE_DEVICES", "")
    repeated = [name for name, count in Counter(filter(None, visible.split(","))).items() if count > 1]
    if repeated:
        text = f"CUDA_VISIBLE_DEVICES={visible} names {', '.join(repeated)} twice"
        found.append(failing(check, text, "name each device once"))
    local, seen = int(facts.environ.get("LOCAL_WORLD_SIZE", "0") or 0), len(facts.gpus.devices)
    if local > seen > 0:
        text = f"of {local} ranks on this node this one sees {seen} GPUs: NCCL joins no two ranks on one"
        advice = (
            "fine if each rank sees another GPU; else start as many as there are GPUs, or share them with"
            " process_group_backend='gloo', see docs/reference/gpu.md"
        )
        found.append(warning(check, text, advice))
    return found


def instances(facts: Facts) -> list[Finding]:
    """Whether cards are divided into instances."""
    divided = [f"rank {rank} ({one.name})" for rank, one in enumerate(facts.gpus.devices) if " MIG " in one.name]
    text = f"{', '.join(divided)}: an instance of a divided card; a process sees one, and NCCL joins no two of a card"
    advice = (
        "start a process for each instance with CUDA_VISIBLE_DEVICES=MIG-..., and set process_group_backend='gloo'; or"
        " switch MIG off"
    )
    return [warning("MIG", text, advice)] if divided else []


def architectures(facts: Facts) -> list[Finding]:
    """Whether torch's wheel holds code for every card."""
    check = "CUDA architectures"
    cards = [(rank, device, device.capability) for rank, device in enumerate(facts.gpus.devices) if device.capability]
    if not cards:
        return []
    if facts.gpus.cuda is None:
        advice = "install a CUDA wheel of torch, see pytorch.org"
        return [failing(check, "there are GPUs, and torch's wheel is one for CPUs", advice)]
    bad = [found for rank, device, version in cards if (found := _lacking(rank, device, version, facts)) is not None]
    kinds = ", ".join(sorted({f"sm_{a}{b}" for _, _, (a, b) in cards}))
    return bad or [fine(check, f"the wheel for CUDA {facts.gpus.cuda} has code for {kinds}")]


def _lacking(rank: int, device: DeviceFacts, capability: tuple[int, int], facts: Facts) -> Finding | None:
    """Returns what the wheel lacks for a card; None: nothing."""
    check, (major, minor), listed = "CUDA architectures", capability, facts.gpus.arch_list
    binary = [(int(m[1]), int(m[2])) for a in listed if (m := re.fullmatch(r"sm_(\d+)(\d)[af]?", a))]
    source = [(int(m[1]), int(m[2])) for a in listed if (m := re.fullmatch(r"compute_(\d+)(\d)[af]?", a))]
    name = f"rank {rank} ({device.name}, sm_{major}{minor})"
    if any(a == major and b <= minor for a, b in binary):
        return None
    if any(arch <= capability for arch in source):
        advice = "expect a slow first step, or install a wheel of torch that lists this architecture"
        return warning(check, f"{name}: the wheel has only PTX for it, which is compiled at the first use", advice)
    newer = all(capability > arch for arch in binary)
    wheel = "a newer wheel" if newer else "an older wheel, built for CUDA 12.6 or 11.8,"
    text = f"{name}: the wheel for CUDA {facts.gpus.cuda} has no code for it ({' '.join(listed) or 'none'})"
    return failing(
        check, text, f"install {wheel} of torch that has it, or leave the card out with CUDA_VISIBLE_DEVICES"
    )


def bfloat16(facts: Facts) -> list[Finding]:
    """Whether a card only emulates bfloat16."""
    without = [f"rank {rank} ({d.name})" for rank, d in enumerate(facts.gpus.devices) if not d.computes_bfloat16]
    text = f"{', '.join(without)}: bfloat16 is emulated there, many times slower, and all ranks wait for it"
    advice = "train with precision='16-mixed' or '32-true', not with bf16"
    return [warning("bfloat16", text, advice)] if without else []


def memory(facts: Facts) -> list[Finding]:
    """How much memory training may use."""
    found: list[Finding] = []
    for rank, device in enumerate(facts.gpus.devices):
        if device.free_bytes is not None and device.free_bytes < 0.8 * device.mem_bytes:
            held, whole = bytes_text(device.mem_bytes - device.free_bytes), bytes_text(device.mem_bytes)
            text = f"rank {rank} ({device.name}): {held} of {whole} are taken already"
            advice = "nvidia-smi shows by whom; plans count with what is free, less a reserve"
            found.append(warning("memory", text, advice))
    free = ["not known" if d.free_bytes is None else bytes_text(d.free_bytes) for d in facts.gpus.devices]
    return found or ([fine("memory", f"free by rank: {', '.join(free)}")] if free else [])


_SPREAD = 1.05  # fastest over slowest, from which on devices are unequal: the probe's own tolerance
_SLOW_LINK = 4.0  # fastest over slowest
_EXACT = 1e-9  # relative, in float64
_ALONE = "one process"
PLAN_COMMAND = "lightning-hetero-plan module=my_package.model:Model datamodule=my_package.data:Data"


def speeds(facts: Facts) -> list[Finding]:
    """How unequal the devices are."""
    check, cluster = "relative speeds", facts.cluster
    if cluster is None:
        why = facts.probe_problem or "the devices were not probed"
        return [warning(check, why, "fix the problems above, then run the doctor again")]
    values = [device.speed for device in cluster.devices]
    shown = ", ".join(f"rank {r} {d.speed:.2f}" for r, d in enumerate(cluster.devices[:16]))
    if max(values) <= _SPREAD * min(values):
        return [fine(check, f"{shown}: equal within the probe's tolerance")]
    waited = 100.0 * (1.0 - sum(min(values) / value for value in values) / len(values))
    text = f"{shown}: with equal shares stock DDP waits for {waited:.0f} % of the device-seconds"
    return [fine(check, text, f"{PLAN_COMMAND} says what each engine would gain")]


def links(facts: Facts) -> list[Finding]:
    """Whether some links are far slower than others."""
    check, cluster = "links", facts.cluster
    if cluster is None or len(cluster.devices) < 2:
        return []
    n = len(cluster.devices)
    rates = {(a, b): cluster.links[a][b].bandwidth_bytes_per_s for a in range(n) for b in range(n) if a != b}
    (a, b), fastest = min(rates, key=rates.__getitem__), max(rates.values())
    text = f"{rate_text(rates[a, b])} to {rate_text(fastest)}{facts.links_by and f', by {facts.links_by}'}"
    if fastest <= _SLOW_LINK * rates[a, b]:
        return [fine(check, text)]
    ends = f"from rank {a} ({cluster.devices[a].name}) to rank {b} ({cluster.devices[b].name})"
    advice = "hetero_pipeline plans with it; across machines choose the interface (NCCL_SOCKET_IFNAME)"
    return [warning(check, f"{text}; the slowest is {ends}", advice)]


def world_size(facts: Facts) -> list[Finding]:
    """Whether the Trainer asks for the ranks that there are."""
    check, environ = "world size", facts.environ
    wanted, nodes, seen = facts.devices_wanted, facts.nodes_wanted or 1, len(facts.gpus.devices)
    if wanted is None:
        return [fine(check, f"devices: all there are, nodes: {nodes}")]
    found: list[Finding] = []
    if wanted > seen > 0:
        advice = "lower devices, or look at CUDA_VISIBLE_DEVICES; a GPU for two ranks takes gloo, docs/reference/gpu.md"
        found.append(failing(check, f"devices={wanted}, but this machine shows {seen} GPUs", advice))
    local, world = environ.get("LOCAL_WORLD_SIZE"), environ.get("WORLD_SIZE")
    if local is not None and int(local) != wanted:
        advice = 'leave devices="auto", or start as many processes as devices'
        text = f"devices={wanted}, but torchrun has started {local} processes on this node"
        found.append(failing(check, text, advice))
    if world is not None and local is not None and int(world) != int(local) * nodes:
        text = f"WORLD_SIZE={world}, but num_nodes={nodes} nodes of {local} make {int(local) * nodes}"
        advice = "nodes of unequal size need one of our strategies and num_nodes left out, see docs/reference/nodes.md"
        found.append(warning(check, text, advice))
    tasks = tasks_per_node(environ.get("SLURM_TASKS_PER_NODE", ""))
    if tasks and wanted not in tasks:
        text = f"devices={wanted}, but SLURM has {'/'.join(map(str, tasks))} tasks per node"
        advice = "set --ntasks-per-node to the devices of a node, see docs/reference/nodes.md"
        found.append(failing(check, text, advice))
    return found or [fine(check, f"devices: {wanted} per node, nodes: {nodes}")]


def parity(facts: Facts) -> list[Finding]:
    """Whether every engine's gradients are those of a single process."""
    alone = next((one for one in facts.module.parity if one.engine == _ALONE), None)
    if alone is not None and alone.problem:
        advice = "it must train on one device first: run it with Trainer(devices=1)"
        return [failing("gradients", f"one process: {alone.problem}", advice)]
    if alone is not None and alone.error > _EXACT:
        text = f"two runs of one process differ by {alone.error:.1e}: the step draws random numbers"
        advice = "engines cannot be compared with it; give the module a way to switch these off"
        return [warning("gradients", text, advice)]
    return [_parity_of(one) for one in facts.module.parity if one.engine != _ALONE]


def _parity_of(one: Parity) -> Finding:
    check = f"gradients, {strategy_name(one.engine)}"
    if one.problem:
        say = warning if one.engine != "ddp" else failing
        return say(check, one.problem, "the message says what the engine cannot do with this module; others may")
    if not math.isnan(one.error) and one.error <= _EXACT:
        return fine(check, f"ten steps equal one process's, to {one.error:.0e}")
    advice = (
        "a loss that is a sum needs loss_reduction='sum', one per token batch_weight=; one that compares samples"
        " with each other (contrastive, batch statistics) has other gradients on any number of devices but one"
    )
    return failing(check, f"differ from one process by {one.error:.1e}, relative", advice)


def verdict(facts: Facts) -> list[Finding]:
    """Which engine to take, and what it should gain."""
    module = facts.module
    if not module.verdict:
        return []
    if any(one.engine == module.engine and (one.problem or not one.error <= _EXACT) for one in module.parity):
        advice = "the planner's choice is by time alone: see its gradients above before using it"
        return [warning("verdict", module.verdict, advice)]
    return [fine("verdict", module.verdict, module.python and f"to train this way:\n\n{module.python}")]


CHECKS = (
    versions, device_order, same_names, instances, architectures, bfloat16, memory, shared_memory, backends, rendezvous,
    cores, speeds, links, world_size, parity, verdict,
)  # fmt: skip
"""In the order in which people read them."""


def examine(facts: Facts) -> Sequence[Finding]:
    """Returns all findings, in the order of the checks."""
    return [finding for check in CHECKS for finding in check(facts)]
