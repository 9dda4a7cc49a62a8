"""``lightning-hetero-plan``: what each engine would give, before anybody trains (layer A).

What is asked is in ``conf/plan.yaml``, with examples. Torch is imported where a module or this machine is measured.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import hydra
from omegaconf import DictConfig, OmegaConf

from lightning_hetero.checked import real
from lightning_hetero.cli.command import CONF, start
from lightning_hetero.cli.report import format_table, read_run
from lightning_hetero.cluster.spec import cluster_from_plain
from lightning_hetero.cluster.units import bytes_text, describe_cluster
from lightning_hetero.plan.estimate import EngineName, Estimate
from lightning_hetero.plan.formula import model_from_formula
from lightning_hetero.plan.paste import snippet
from lightning_hetero.plan.planner import LEFT_OUT, Plan, plan
from lightning_hetero.plan.setup import Setup, setup_from_run
from lightning_hetero.types import Cluster

_FEW = 16  # devices up to which each has a line


def read_setup(given: Mapping[str, Any]) -> tuple[Setup, list[str]]:
    """Returns what is asked, from the keys of ``conf/plan.yaml``, and what to say about how it was found.

    Raises:
        TypeError, ValueError: a value that cannot be, or what is needed is not given; with what to do.
        FileNotFoundError: there is no such run.
        RuntimeError: the module's step, or a rank of the probe, fails.
    """
    sources = [name for name in ("module", "formula", "run") if given.get(name) is not None]
    if len(sources) != 1:
        raise ValueError(
            f"give one of module, formula and run, here are {sources or 'none of them'}: module=pkg.mod:Model is"
            " measured, formula={kind: transformer, ...} is computed, run=FOLDER was recorded"
        )
    if given.get("run") is not None:
        run = read_run(str(given["run"]), run=given.get("run_id")).run
        setup, notes = setup_from_run(run, global_batch=given.get("global_batch")), [f"as recorded in {given['run']}"]
    else:
        setup, notes = _modelled(given)
    if (exchange_s := given.get("exchange_s")) is not None:
        setup = replace(setup, exchange_s=real("exchange_s", exchange_s))
    return replace(setup, min_samples=given.get("min_samples")), notes


def _modelled(given: Mapping[str, Any]) -> tuple[Setup, list[str]]:
    notes: list[str] = []
    spans: tuple[tuple[int, int], ...] = ()
    per_device: int | None = None
    if given.get("module") is not None:
        from lightning_hetero.cli.loading import load_data, load_module, profile_module

        module, data = load_module(given["module"]), load_data(given.get("datamodule"), name="datamodule")
        profile = profile_module(
            module, data, backbone=given.get("backbone"), accelerator=str(given.get("accelerator", "auto")),
            precision=given.get("precision", "32-true"),
        )  # fmt: skip
        model, spans, per_device = profile.model, profile.spans, profile.batch_size
        notes.append(f"{type(module).__name__} measured here, as {len(model.layers)} layers")
        if profile.undivided:
            notes.append(f"one layer only: {profile.undivided}")
    else:
        model = model_from_formula(given["formula"])
        state_bytes = math.fsum(part.state_bytes for part in model.parts)
        notes.append(f"costs by formula: {len(model.layers)} layers, {bytes_text(state_bytes)} of state")
    cluster, measured = _cluster(given)
    notes += measured
    batch = given.get("global_batch")
    if batch is None and per_device is None:
        raise ValueError("global_batch=null: no loader tells it; give the samples of one update, e.g. global_batch=256")
    batch = batch if batch is not None else cast("int", per_device) * len(cluster.devices)
    return Setup(cluster=cluster, model=model, global_batch=batch, spans=spans), notes


def _cluster(given: Mapping[str, Any]) -> tuple[Cluster, list[str]]:
    spec = (given.get("cluster") or {}).get("spec") or "probe"
    if isinstance(spec, Mapping):
        return cluster_from_plain(cast("Mapping[str, Any]", spec)), []
    if spec != "probe":
        from lightning_hetero.pipeline.fit.planning import read_cluster

        return cast("Cluster", read_cluster(spec)), [f"devices as described in {spec}"]
    from lightning_hetero.base.checks import trained_dtype
    from lightning_hetero.cli.ranks import probe_machine

    cluster, backend = probe_machine(
        devices=given.get("devices"), accelerator=str(given.get("accelerator", "auto")),
        dtype=trained_dtype(given.get("precision", "32-true")),
    )  # fmt: skip
    return cluster, [f"links measured here, by {backend}"]


def answer(setup: Setup, given: Mapping[str, Any]) -> Plan:
    """Returns the plan.

    Raises:
        ValueError: an unknown engine.
    """
    engines = given.get("engines") or ()
    names = [str(name).removeprefix("hetero_") for name in ([engines] if isinstance(engines, str) else engines)]
    return plan(setup, cast("list[EngineName]", names))


def to_paste(found: Estimate, given: Mapping[str, Any]) -> str | None:
    """Returns the set-up of an engine as Python; None: it cannot train.

    Args:
        found: the engine.
        given: what was asked, the keys of ``conf/plan.yaml``.
    """
    if not found.ok:
        return None
    usual = {"accelerator": "auto", "precision": "32-true"}
    trainer = {name: given[name] for name in usual if given.get(name) not in (None, usual[name])}
    layers = {"backbone": given["backbone"]} if found.engine == "pipeline" and given.get("backbone") else {}
    return snippet(found, trainer, **layers)


# ---- text -----------------------------------------------------------------------------------------------------------


def plan_tables(found: Plan, paste: str | None = None) -> str:
    """Returns the whole answer as text; ``paste`` is how to train as the verdict says."""
    setup = found.setup
    parts = [describe_cluster(setup.cluster) if setup.ranks <= _FEW else f"{setup.ranks} devices", _ranking(found)]
    parts += [_details(setup, estimate) for estimate in found.estimates]
    parts.append(f"{found.verdict}\n{LEFT_OUT}")
    if paste is not None:
        parts.append(f"To train this way, with your own module:\n\n{paste}")
    return "\n\n".join(parts)


def _ranking(found: Plan) -> str:
    header = ["engine", "ms per update", "bound", "samples/s", "idle %", "exchange ms"]
    rows: list[list[str]] = []
    for e in found.estimates:
        row = [e.strategy, "cannot train this", "-", "-", "-", "-"]
        if e.ok:
            numbers = (1e3 * e.step_s, 1e3 * e.bound_s, e.samples_per_s, 100.0 * e.idle, 1e3 * e.exchange_s)
            row = [e.strategy, *(f"{number:.4g}" for number in numbers)]
        rows.append(row)
    return format_table(header, rows)


def _details(setup: Setup, estimate: Estimate) -> str:
    lines = [f"{estimate.strategy}:", *(f"  {reason}" for reason in estimate.reasons)]
    if estimate.ok and setup.ranks <= _FEW:
        for rank, device in enumerate(setup.cluster.devices):
            memory = estimate.memory_bytes[rank]
            held = f", {bytes_text(memory)} of {bytes_text(device.mem_bytes)}" if memory else ""
            samples, work_ms = estimate.shares[rank], 1e3 * estimate.work_s[rank]
            lines.append(f"  {setup.name(rank)}: {samples:.4g} samples, {work_ms:.4g} ms of work{held}")
    return "\n".join(lines)


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="plan")
def main(cfg: DictConfig) -> None:
    """Answers what is asked on the command line."""
    given = cast("dict[str, Any]", OmegaConf.to_container(cfg, resolve=True))
    try:
        setup, notes = read_setup(given)
        found = answer(setup, given)
        paste = to_paste(found.chosen, given) if found.chosen is not None else None
        if given.get("out") is not None:
            plain = found.as_plain()
            for one, name in zip(plain["estimates"], found.estimates, strict=True):
                one["python"] = to_paste(name, given)
            Path(str(given["out"])).write_text(json.dumps(plain, indent=1) + "\n")
    except (TypeError, ValueError, OSError, RuntimeError) as error:
        sys.exit(f"lightning-hetero-plan: {error}")
    print("\n".join([*notes, plan_tables(found, paste)]), flush=True)


if __name__ == "__main__":
    start("plan")
