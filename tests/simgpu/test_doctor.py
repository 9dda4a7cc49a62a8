"""The doctor on a machine with simulated GPUs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from lightning_hetero.cli import doctor, machine
from lightning_hetero.doctor.checks import examine
from tests.simgpu.harness import run_sim_ranks
from tests.simgpu.sim.cuda import cap


def found(rank: int, world: int) -> tuple[list[dict[str, Any]], list[tuple[int, int] | None]]:
    cap(0, 0)  # a full card
    facts = machine.find_out(doctor._parser().parse_args(["--no-probe"]))
    return [asdict(finding) for finding in examine(facts)], [device.capability for device in facts.gpus.devices]


def test_cards_are_named_and_a_full_one_is_no_error() -> None:
    ((findings, capabilities),) = run_sim_ranks(1, found, gpus=2)
    by_check = {one["check"]: one for one in findings}
    order = by_check["device order"]["text"]
    names = [part.partition(": ")[2] for part in order.partition(": CUDA's")[0].split(", ")]
    assert len(names) == 2 and all(names)
    old = [rank for rank, capability in enumerate(capabilities) if capability is not None and capability < (8, 0)]
    assert old, "one of the simulated cards is to be without bfloat16"
    assert by_check["bfloat16"]["text"].startswith(f"rank {old[0]} ({names[old[0]]}): bfloat16 is emulated")
    assert by_check["memory"]["text"] == "free by rank: not known, not known"  # there is no nvidia-smi
