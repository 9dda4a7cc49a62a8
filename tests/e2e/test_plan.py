"""``lightning-hetero-plan`` as a user runs it: a module is measured, JSON is written, errors are one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.programs import left_in, run

pytestmark = pytest.mark.timeout(300)
DIGITS = ("module=lightning_hetero.demo:DigitsCNN", "datamodule=lightning_hetero.demo:DigitsData")


def test_a_module_is_measured_and_planned_for_a_cluster(tmp_path: Path) -> None:
    command = ["-m", "lightning_hetero.cli.plan", "cluster=two_fast_two_slow", *DIGITS, "out=plan.json"]
    done = run(command, tmp_path, timeout_s=120.0)
    assert done.returncode == 0, done.stderr
    assert "DigitsCNN measured here, as 9 layers" in done.stdout
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["global_batch"] == 64 and len(found["estimates"]) == 4 and found["engine"] in found["verdict"]
    able = [estimate for estimate in found["estimates"] if estimate["ok"]]
    assert all(e["python"] for e in able)
    assert all(d["memory_bytes"] > 0 for e in found["estimates"] for d in e["devices"] if d["work_s"] > 0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plan.json"] and left_in(tmp_path) == []


def test_this_machine_is_probed_and_a_mistake_is_one_line(tmp_path: Path) -> None:
    formula = "formula={kind: layers, layers: 2, params: 1e5, flops_per_sample: 1e8, flops_per_s: 1e10}"
    done = run(
        ["-m", "lightning_hetero.cli.plan", formula, "global_batch=16", "accelerator=cpu"], tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "cpu:0" in done.stdout and "cpu:1" in done.stdout
    wrong = run(["-m", "lightning_hetero.cli.plan", formula, "cluster=equal4"], tmp_path)
    assert wrong.returncode == 1 and wrong.stderr.strip().startswith("lightning-hetero-plan: global_batch=null")
    assert "Traceback" not in wrong.stderr
    unknown = run(["-m", "lightning_hetero.cli.plan", formula, "clutser=equal4"], tmp_path)
    assert unknown.returncode == 1 and unknown.stderr == (
        "lightning-hetero-plan: Could not override 'clutser'; lightning-hetero-plan --help lists the keys\n"
    )
    assert left_in(tmp_path) == []
