"""Checks of the configuration and of gradients, and the verdict (layer P)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_hetero.cluster.units import tasks_per_node
from lightning_hetero.doctor.facts import Facts, Parity
from lightning_hetero.doctor.finding import Finding
from lightning_hetero.doctor.machine import MACHINE_CHECKS

__all__ = ["CHECKS", "examine"]

_EXACT = 1e-9  # relative, in float64
_ALONE = "one process"


def world_size(facts: Facts) -> list[Finding]:
    """Whether the Trainer asks for the ranks that there are."""
    check, environ = "world size", facts.environ
    wanted, nodes = facts.devices_wanted, facts.nodes_wanted or 1
    found: list[Finding] = []
    if wanted is not None and facts.devices and wanted > len(facts.devices):
        text = f"devices={wanted}, but this machine shows {len(facts.devices)} GPUs"
        advice = "lower devices, or look at CUDA_VISIBLE_DEVICES; a GPU for two ranks takes gloo, docs/reference/gpu.md"
        found.append(Finding(check=check, level="fail", text=text, advice=advice))
    local = environ.get("LOCAL_WORLD_SIZE")
    if local is not None and wanted is not None and int(local) != wanted:
        text = f"devices={wanted}, but torchrun has started {local} processes on this node"
        advice = 'leave devices="auto", or start as many processes as devices'
        found.append(Finding(check=check, level="fail", text=text, advice=advice))
    world = environ.get("WORLD_SIZE")
    if world is not None and local is not None and wanted is not None and int(world) != int(local) * nodes:
        text = f"WORLD_SIZE={world}, but num_nodes={nodes} nodes of {local} make {int(local) * nodes}"
        advice = "nodes of unequal size need one of our strategies and num_nodes left out, see docs/reference/nodes.md"
        found.append(Finding(check=check, level="warn", text=text, advice=advice))
    tasks = tasks_per_node(environ.get("SLURM_TASKS_PER_NODE", ""))
    if tasks and wanted is not None and wanted not in tasks:
        text = f"devices={wanted}, but SLURM has {'/'.join(map(str, tasks))} tasks per node"
        advice = "set --ntasks-per-node to the devices of a node, see docs/reference/nodes.md"
        found.append(Finding(check=check, level="fail", text=text, advice=advice))
    if found:
        return found
    said = "all there are" if wanted is None else f"{wanted} per node"
    return [Finding(check=check, level="ok", text=f"devices: {said}, nodes: {nodes}")]


def parity(facts: Facts) -> list[Finding]:
    """Whether every engine's gradients are those of a single process."""
    if not facts.parity:
        return []
    alone = next((one for one in facts.parity if one.engine == _ALONE), None)
    if alone is not None and alone.problem:
        advice = "it must train on one device first: run it with Trainer(devices=1)"
        return [Finding(check="gradients", level="fail", text=f"one process: {alone.problem}", advice=advice)]
    if alone is not None and alone.error > _EXACT:
        return [
            Finding(
                check="gradients",
                level="warn",
                text=f"two runs of one process differ by {alone.error:.1e}: the step draws random numbers of its own",
                advice="engines cannot be compared with it; give the module a way to switch these off",
            )
        ]
    return [_parity_of(one) for one in facts.parity if one.engine != _ALONE]


def _parity_of(one: Parity) -> Finding:
    check = f"gradients, {one.engine}"
    if one.problem:
        level = "warn" if one.engine != "ddp" else "fail"
        advice = "the message says what the engine cannot do with this module; others may"
        return Finding(check=check, level=level, text=one.problem, advice=advice)
    if math.isnan(one.error) or one.error > _EXACT:
        advice = (
            "a loss that is a sum needs loss_reduction='sum', one per token batch_weight=; one that compares samples"
            " with each other (contrastive, batch statistics) has other gradients on any number of devices but one"
        )
        text = f"differ from one process by {one.error:.1e}, relative"
        return Finding(check=check, level="fail", text=text, advice=advice)
    return Finding(check=check, level="ok", text=f"ten steps equal one process's, to {one.error:.0e}")


def verdict(facts: Facts) -> list[Finding]:
    """Which engine to take, and what it should gain."""
    if not facts.verdict:
        return []
    broken = [one for one in facts.parity if one.engine == facts.engine and (one.problem or not one.error <= _EXACT)]
    if broken:
        advice = "the planner's choice is by time alone: see its gradients above before using it"
        return [Finding(check="verdict", level="warn", text=facts.verdict, advice=advice)]
    if facts.gain > 1.0 and facts.engine not in ("", "ddp"):
        advice = f"Trainer(strategy='hetero_{facts.engine}'); lightning-hetero-plan shows the others"
        return [Finding(check="verdict", level="ok", text=facts.verdict, advice=advice)]
    return [Finding(check="verdict", level="ok", text=facts.verdict)]


CHECKS = (*MACHINE_CHECKS, world_size, parity, verdict)


def examine(facts: Facts) -> Sequence[Finding]:
    """Returns all findings, in the order of the checks."""
    return [finding for check in CHECKS for finding in check(facts)]
