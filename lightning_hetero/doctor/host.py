"""Checks of the host and of how ranks would meet: each a small function of `Facts` (layer P)."""

from __future__ import annotations

from lightning_hetero.cluster.units import bytes_text
from lightning_hetero.doctor.facts import Facts
from lightning_hetero.doctor.finding import Finding, failing, fine, warning

_SHM_LEAST = 256 * 2.0**20  # Docker's default is 64 MiB


def versions(facts: Facts) -> list[Finding]:
    """Packages that are needed, in versions that are known to work."""
    wrong = [package for package in facts.host.packages if not package.fits]
    known = ", ".join(f"{p.name} {p.installed}" for p in facts.host.packages if p.installed)
    return [
        failing(
            "versions",
            f"{package.name} {package.installed or 'not installed'}, needed is {package.wanted or 'any version'}",
            f"pip install '{package.name}{package.wanted}'",
        )
        for package in wrong
    ] or [fine("versions", known)]


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
