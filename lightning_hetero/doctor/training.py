"""Checks of the probe, of the configuration and of gradients, the verdict, and all checks in order (layer P)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_hetero.cluster.units import rate_text, tasks_per_node
from lightning_hetero.doctor import host
from lightning_hetero.doctor.facts import Facts, Finding, Parity, failing, fine, warning
from lightning_hetero.plan.estimate import strategy_name

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
    host.versions, host.device_order, host.same_names, host.instances, host.architectures, host.bfloat16, host.memory,
    host.shared_memory, host.backends, host.rendezvous, host.cores, speeds, links, world_size, parity,
    verdict,
)  # fmt: skip
"""In the order in which people read them."""


def examine(facts: Facts) -> Sequence[Finding]:
    """Returns all findings, in the order of the checks."""
    return [finding for check in CHECKS for finding in check(facts)]
