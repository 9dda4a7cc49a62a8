"""A group of one rank runs training steps straight: it computes, draws and times what a pipeline's way does."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lightning_hetero.pipeline.decide.schedule import Kind
from lightning_hetero.pipeline.runtime.execute.pace import BusyTime
from lightning_hetero.pipeline.runtime.execute.stage_runner import MicroBatch, RunnerSettings, StageRunner
from lightning_hetero.pipeline.runtime.execute.straight import StraightExecution
from lightning_hetero.pipeline.runtime.step.cut import BackboneCut
from lightning_hetero.transport.failures import FailureBoard
from lightning_hetero.transport.run_store import RunStore
from lightning_hetero.types import GroupPlan
from tests.ranks.pipeline.models import schedule_of

pytestmark = pytest.mark.ranks

SIZES = (3, 2)
GROUP = GroupPlan(ranks=(0,), cuts=(0, 4), samples=5, micro_batches=SIZES, depths=(1,))


class Failures(FailureBoard):
    """Of a run of one rank: keeps what is reported."""

    def __init__(self) -> None:
        super().__init__(RunStore(dist.HashStore(), b""), 0)
        self.errors: list[BaseException] = []

    def report(self, error: BaseException) -> None:
        self.errors.append(error)


class Drawing(nn.Linear):
    """Draws from all streams; `random` decides whether it does anything, as for dropped layers."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.hooked = 0
        self.register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.hooked += 1

    def forward(self, x: Tensor) -> Tensor:
        y = functional.dropout(super().forward(x), 0.3) * float(np.random.rand())
        return x + y if random.random() < 0.8 else x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(4, 6)
        self.layers = nn.Sequential(*(Drawing() for _ in range(4)))
        self.head = nn.Linear(6, 1)
        self.double()


Around = Callable[[nn.Module, Tensor], Tensor]


def plain(backbone: nn.Module, x: Tensor) -> Tensor:
    return backbone(x)


def checkpointed(backbone: nn.Module, x: Tensor) -> Tensor:
    output = checkpoint(backbone, x, use_reentrant=False)
    assert isinstance(output, Tensor)
    return output


def step(net: Net, x: Tensor, around: Around, drawn: list[Any]) -> Any:
    h = functional.dropout(net.embed(x), 0.2) * (0.5 + random.random()) * (0.5 + np.random.rand())
    y = around(net.layers, h)
    drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
    return {"loss": functional.dropout(net.head(y + h), 0.2).square().mean(), "size": len(x)}


def runner_of(net: Net, failures: Failures, calls: int = 1, **options: Any) -> StageRunner:
    settings = RunnerSettings(rank=0, device=torch.device("cpu"), seed=7, failures=failures, **options)
    return StageRunner(
        settings, list(net.layers), group=GROUP, cut=BackboneCut(net.layers), schedule=schedule_of(1, calls),
        calls=calls,
    )


def batches(net: Net, number: int, around: Around, drawn: list[Any]) -> list[MicroBatch]:
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    return [
        MicroBatch(
            body=lambda part=part: step(net, part, around, drawn), samples=len(part), weight=len(part) / 5, number=i
        )
        for i, part in enumerate(x.split(SIZES))
    ]


def trained(*, straight: bool, around: Around = plain, **options: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """Trains on three batches, all but the first one straight if wanted: else each has a runner of its own."""
    net, failures, drawn, results = Net(), Failures(), [], []
    runner = runner_of(net, failures, **options)
    gradients: list[Any] = []
    for number in range(3):
        if not straight:
            runner = runner_of(net, failures, **options)
        results.append(runner.train(number, batches(net, number, around, drawn)))
        gradients.append([None if p.grad is None else p.grad.clone() for p in net.parameters()])
    assert not failures.errors
    return results, drawn, gradients


@pytest.mark.parametrize("checkpoint_layers", [False, True])
def test_it_computes_and_draws_what_the_way_of_a_pipeline_does(checkpoint_layers: bool) -> None:
    ways = [trained(straight=straight, checkpoint_layers=checkpoint_layers) for straight in (False, True)]
    (results, drawn, gradients), (results_2, drawn_2, gradients_2) = ways
    assert results == results_2 and drawn == drawn_2 and len({*drawn}) == 6
    for one, other in zip(gradients, gradients_2, strict=True):
        for a, b in zip(one, other, strict=True):
            assert a is not None and b is not None and torch.allclose(a, b, rtol=1e-13, atol=1e-15)


def test_a_backbone_that_the_step_checkpoints_is_computed_again_as_it_was() -> None:
    """A pipeline refuses hooks around the whole backbone; what it computes is what the plain step does."""
    net, failures, drawn = Net(), Failures(), []
    runner = runner_of(net, failures)
    runner.train(0, batches(net, 0, plain, drawn))
    found = runner.train(1, batches(net, 1, checkpointed, drawn))
    again = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    results, _, gradients = trained(straight=True)
    assert found == results[1]
    for a, b in zip(again, gradients[1], strict=True):
        assert torch.allclose(a, b, rtol=1e-13, atol=1e-15)


def test_the_callers_streams_go_on_as_they_were_and_hooks_run_once() -> None:
    net, failures, drawn = Net(), Failures(), []
    runner = runner_of(net, failures)
    runner.train(0, batches(net, 0, plain, drawn))
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    before = random.random(), float(np.random.rand()), float(torch.rand(()))
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    hooked = [layer.hooked for layer in net.layers]
    runner.train(1, batches(net, 1, plain, drawn))
    assert before == (random.random(), float(np.random.rand()), float(torch.rand(())))
    assert [layer.hooked for layer in net.layers] == [times + len(SIZES) for times in hooked]
    assert "forward" not in net.layers.__dict__


@pytest.mark.parametrize("calls", [0, 2])
def test_a_step_that_does_not_call_the_backbone_once_is_an_error(calls: int) -> None:
    def around(backbone: nn.Module, x: Tensor) -> Tensor:
        for _ in range(calls):
            x = backbone(x)
        return x

    net, failures = Net(), Failures()
    runner = runner_of(net, failures)
    runner.train(0, batches(net, 0, plain, []))
    with pytest.raises(RuntimeError, match=rf"micro-batch 0 called the backbone {calls} times, expected 1"):
        runner.train(1, batches(net, 1, around, []))
    assert len(failures.errors) == 1 and "forward" not in net.layers.__dict__
    assert net.layers(torch.zeros(1, 6, dtype=torch.float64)).shape == (1, 6), "the backbone is itself again"


def test_the_first_step_goes_the_way_of_a_pipeline_and_several_calls_always_do() -> None:
    net, failures, seen = Net(), Failures(), []
    run = StraightExecution.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StraightExecution, "run", lambda self: (seen.append(1), run(self)))
        runner = runner_of(net, failures)
        for number in range(3):
            runner.train(number, batches(net, number, plain, []))
        assert len(seen) == 2
        twice = runner_of(net, failures, calls=2)
        for number in range(2):
            twice.train(number, batches(net, number, lambda backbone, x: backbone(backbone(x)), []))
        assert len(seen) == 2


class Pace(BusyTime):
    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[Kind, int, int]] = []

    def computed(self, kind: Kind, stage: int, samples: int, elapsed_s: float) -> None:
        assert elapsed_s > 0.0
        self.told.append((kind, stage, samples))


def test_the_pace_and_the_last_backward_are_told() -> None:
    net, failures, pace = Net(), Failures(), Pace()
    runner = runner_of(net, failures, pace=pace)
    runner.train(0, batches(net, 0, plain, []))
    pace.told.clear()
    runner.train(1, batches(net, 1, plain, []), before_last_backward=lambda: pace.told.append((Kind.SEND, 0, 0)))
    each = [(Kind.FORWARD, 0), (Kind.HEAD, 1), (Kind.BACKWARD, 0)]
    wanted = [(kind, stage, size) for size in SIZES for kind, stage in each]
    assert pace.told == [*wanted[:-1], (Kind.SEND, 0, 0), wanted[-1]]
