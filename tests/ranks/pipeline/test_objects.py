"""Objects between ranks: what is packed comes out again, and one file of the package unpickles what has come."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import lightning_hetero
from lightning_hetero.transport.objects import packed, unpacked


def test_values_and_shared_memory_come_out_again() -> None:
    assert unpacked(packed({"a": (1, "x", None)})) == {"a": (1, "x", None)}
    weight = torch.arange(6.0).view(2, 3)
    found = unpacked(packed({"a": weight, "b": weight.t(), "n": 3}, tensors=True))
    assert torch.equal(found["a"], weight) and found["b"].stride() == (1, 3) and found["n"] == 3
    assert found["a"].data_ptr() == found["b"].data_ptr()


def test_only_one_file_unpickles() -> None:
    root = Path(lightning_hetero.__file__).parent
    sign = re.compile(r"pickle\.loads?\(|Unpickler|weights_only=False")
    found = {str(path.relative_to(root)) for path in root.rglob("*.py") if sign.search(path.read_text())}
    assert found <= {"transport/objects.py", "cli/machine.py"}  # the latter reads the file that its own process wrote
