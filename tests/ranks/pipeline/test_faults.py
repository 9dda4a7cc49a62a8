"""Whatever fails, every rank ends, with the cause; nothing stays open behind it."""

from __future__ import annotations

import copy
import os
import re
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hetero.pipeline.runtime.execute.stage_runner import MicroBatch
from lightning_hetero.transport.failures import FailureBoard
from lightning_hetero.transport.run_store import RunStore
from lightning_hetero.types import GroupPlan
from tests.ranks.harness import process_context, run_ranks
from tests.ranks.pipeline import models
from tests.ranks.pipeline.models import LAYERS, Case, Net, make_runner, plan

SIZES = (2, 1, 3)
GROUP = plan([((0, 1, 2), (0, 2, 4, LAYERS), SIZES)])[0]


class Broken(nn.Module):
    """Does what it is told with the third micro-batch, forward or backward."""

    def __init__(self, job: Callable[[Tensor], Any], *, backward: bool = False) -> None:
        super().__init__()
        self.job, self.backward = job, backward
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        if self.backward and x.requires_grad:
            x.register_hook(self.job)
        return self.job(x) if self.calls == 3 and not self.backward else x


def divide(x: Tensor) -> Tensor:
    raise ZeroDivisionError(f"at {len(x)} samples")


def die(x: Tensor) -> Tensor:
    os.kill(os.getpid(), signal.SIGKILL)
    return x


def run(
    rank: int,
    name: str,
    *,
    calls: int = 1,
    step: Callable[[Net, models.Batch], Any] = models.plain,
    layers: dict[int, nn.Module] | None = None,
    sizes: Sequence[int] = SIZES,
    wire: Any = None,
    group: GroupPlan = GROUP,
) -> str:
    """Trains one batch; returns how it ended."""
    case = Case(step, calls=calls)
    net = case.net()
    for i, layer in copy.deepcopy(layers or {}).items():  # ranks run several tests; each begins to count anew
        net.backbone[i] = layer
    closed: list[int] = []

    def body(i: int, part: models.Batch) -> Any:
        try:
            return step(net, part)
        finally:
            closed.append(i)

    wire = dist.new_group(backend="gloo") if wire is None else wire
    if rank not in group.ranks:
        return ""
    before = set(threading.enumerate())
    runner = make_runner(case, net, group, rank, name, wire=wire)
    state = torch.get_rng_state()
    parts = list(zip(*(part.split(list(SIZES)) for part in case.batch(0, sum(SIZES))), strict=True))
    batches = [
        MicroBatch(body=lambda i=i, part=part: body(i, part), samples=len(part[0]), weight=1.0, number=i)
        for i, part in enumerate(parts)
    ]
    try:
        runner.train(0, batches) if rank == group.ranks[0] else runner.serve(0, sizes)
        end = ""
    except Exception as error:
        end = f"{type(error).__name__}: {error}"
        with pytest.raises(RuntimeError, match="this stage runner has failed: make a new one"):
            runner.serve(0, [])
    runner.close()
    assert torch.equal(state, torch.get_rng_state()) and torch.is_grad_enabled()
    assert len(closed) == len(set(closed))  # each body that began has ended, once
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    # gloo may never end a send that broke; the clock belongs to the process, the board to the run
    assert not [one for one in left if not one.startswith(("pipeline-send", "awake-clock", "failure-board"))]
    return end


def never(net: Net, batch: models.Batch) -> Any:
    return {"loss": net.head(net.embed(batch[0])).sum()}


def no_loss(net: Net, batch: models.Batch) -> Any:
    return {"loss": net.backbone(net.embed(batch[0]))}


def failing(net: Net, batch: models.Batch) -> Any:
    y = net.backbone(net.embed(batch[0]))
    return {"loss": y.sum() / (len(batch[0]) - 1 or divide(y))}


def forgetful(net: Net, batch: models.Batch) -> Any:
    if len(batch[0]) > 1:
        return models.twice(net, batch)
    return models.plain(net, batch)


def as_dict(x: Tensor) -> Any:
    return {"x": x}


# Name: what is given to `run`, the rank that fails, with what, and what the others say of it.
SCENARIOS: dict[str, tuple[dict[str, Any], int, str]] = {
    "middle stage": ({"layers": {3: Broken(divide)}}, 1, "ZeroDivisionError: at 3 samples"),
    "last stage, backward": ({"layers": {5: Broken(divide, backward=True)}}, 2, "ZeroDivisionError: at 2 samples"),
    "leader's layer": ({"layers": {0: Broken(divide)}}, 0, "ZeroDivisionError: at 3 samples"),
    "leader's body": ({"step": failing}, 0, "ZeroDivisionError: at 1 samples"),
    "never called": ({"step": never}, 0, "RuntimeError: .*micro-batch 0 called the backbone 0 times, expected 1"),
    "called too often": ({"step": models.twice}, 0, "RuntimeError: .*called the backbone at least 2 times, expected 1"),
    "called too rarely": (
        {"step": forgetful, "calls": 2},
        0,
        "RuntimeError: .*micro-batch 1 called the backbone 1 times, expected 2",
    ),
    "no loss": ({"step": no_loss}, 0, r"TypeError: the loss .* one element, got shape \(2, 6\)"),
    "dict between stages": ({"layers": {3: Broken(as_dict)}}, 1, "TypeError: a layer .* returned a dict at the border"),
}


def all_scenarios(rank: int, world_size: int) -> dict[str, str]:
    ends = {name: run(rank, name, **options) for name, (options, _, _) in SCENARIOS.items()}
    other = SIZES if rank == 0 else (*SIZES, 1)
    ends["other micro-batches"] = run(rank, "other micro-batches", sizes=other)
    return ends


def test_every_rank_ends_with_the_cause() -> None:
    by_rank = run_ranks(3, all_scenarios)
    for name, (_, failed, cause) in SCENARIOS.items():
        for rank, ends in enumerate(by_rank):
            wanted = cause if rank == failed else f"RuntimeError: rank {failed} failed: {cause}"
            assert re.match(wanted, ends[name]), (name, rank, ends[name])
    for ends in by_rank:
        assert "do not follow the same schedule" in ends["other micro-batches"]


def watched(rank: int, folder: str) -> None:
    """A process of its own: the harness would end the others soon after the death of one."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", Path(folder, "store").as_uri(), rank=rank, world_size=4)
    dist.barrier()
    group = plan([((3, 1, 2, 0), (0, 1, 2, 4, LAYERS), SIZES)])[0]
    end = run(rank, "killed", layers={3: Broken(die)}, wire=dist.group.WORLD, group=group)
    Path(folder, f"end-{rank}").write_text(end)
    os._exit(0)  # not through gloo's destructors, which may wait for the dead


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    processes = [process_context().Process(target=watched, args=(rank, str(tmp_path))) for rank in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60.0)
        process.kill()
        process.join()
        process.close()
    ends = {path.name: path.read_text() for path in tmp_path.glob("end-*")}
    assert sorted(ends) == ["end-0", "end-1", "end-3"]
    assert all("rank 2 is gone without a word" in end for end in ends.values()), ends
    assert any(end.startswith("RuntimeError: rank 2 is gone") for end in ends.values()), ends


class Silent:
    """A store whose host is stopped: torch's calls wait for its answer without end."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.woken = threading.Event()

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*_: Any) -> None:
            self.asked.append(name)
            self.woken.wait()

        return call


def test_a_store_whose_host_is_silent_holds_nobody() -> None:
    store: Any = Silent()
    board = FailureBoard(RunStore(store, b"", answer_s=0.1), 1, patience_s=0.05)
    try:
        with pytest.raises(RuntimeError, match=r"the run's store has not answered for 0.1 s: .*stopped, or this rank"):
            board.check()
        assert "store has not answered" in str(board.lost(0, "it sent nothing"))
        board.report(RuntimeError("it sent nothing"))
        assert board.reported
        assert board.meet("saved", 2, 30.0) == ["", ""]
        board.leave(patience_s=30.0)
        assert store.asked == ["check"]  # nobody else, who would wait behind this one
    finally:
        store.woken.set()
