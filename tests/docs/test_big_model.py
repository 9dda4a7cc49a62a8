"""docs/how_to/big_model.md: its table is what its arithmetic says; what is whole of a sharded model at a time."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.docs.kit import DOCS, blocks_of, rows, section

PAGE = DOCS / "how_to" / "big_model.md"
TITLE = "How large a model fits"


def test_the_table_is_the_arithmetic() -> None:
    (code,) = [block.code for block in blocks_of(PAGE, PAGE.read_text()) if "def sharded(" in block.code]
    fits: dict[str, Any] = {}
    exec(code, fits)
    table = [row for row in rows(section(PAGE, TITLE)) if "+" in row[0]]
    assert len(table) == 3
    for named, *found in table:
        cards = [int(size) for size in named.split("+")]
        auto, sharded, pipeline = (fits[name](cards) for name in ("zero", "sharded", "pipeline"))
        said = fits["ddp"](cards), fits["zero"](cards, cards), auto, sharded, pipeline
        assert found == [f"{value:.2f}" for value in said], named


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def test_four_copies_of_a_block_are_whole_at_a_time() -> None:
    """Beyond a rank's weights and gradients; one block's gradients are not there before it is."""
    ranks, blocks = 4, 16
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        mesh = init_device_mesh("cpu", (ranks,))
        with FakeTensorMode():
            module = nn.Sequential(*(Block(256) for _ in range(blocks)))
            parameters = sum(p.numel() for p in module.parameters())
            for one in (*module, module):
                fully_shard(one, mesh=mesh)
            tracker = FSDPMemTracker(module)
            x = torch.randn(1, 256)
            tracker.track_inputs((x,))
            with tracker:
                module(x).sum().backward()
        peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    finally:
        dist.destroy_process_group()
    whole = (peak - 8 * parameters / ranks) / (4 * parameters / blocks)
    assert 3 < whole <= 4.1
