"""The stopwatch in modules that `fully_shard` has sharded: waiting for their collectives is no work of a rank's."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed._composable import checkpoint_activation
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import StragglerMonitor
from lightning_hetero.measure import kinds
from lightning_hetero.measure.device import device_of
from lightning_hetero.measure.step_clock import StepProbe, when_backward_ends
from tests.ranks.harness import run_ranks
from tests.ranks.kit import rank_trainer

# ---- exact: seconds pass where a test says so ------------------------------------------------------------------

# As torch calls them now, and as it did.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

FORWARD_S, BACKWARD_S = 1.0, 2.0  # of a layer
GATHER_S, SCATTER_S = 100.0, 1000.0


class Clock:
    now_s = 0.0


@torch.library.custom_op("hetero_test::spend", mutates_args=())
def spend(x: Tensor, now_s: float, then_s: float) -> Tensor:
    """Takes a time in forward and another in backward; compiled code has it as one operation."""
    Clock.now_s += now_s
    return x.clone()


@spend.register_fake
def _(x: Tensor, now_s: float, then_s: float) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Tensor, float, float], output: Tensor) -> None:
    ctx.then_s = inputs[2]


spend.register_autograd(lambda ctx, grad: (spend(grad, ctx.then_s, 0.0), None, None), setup_context=_keep)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return spend(self.linear(x), FORWARD_S, BACKWARD_S).sin()  # kept for backward, so computed again up to here


class Gather:
    """The collective, with a peer that is late."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        Clock.now_s += GATHER_S
        all_gather(output_tensor, input_tensor, group=group)


class Scatter(Gather):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> None:  # type: ignore[override]  # noqa: E501
        Clock.now_s += SCATTER_S
        reduce_scatter(output_tensor, input_tensor, group=group, op=op)


def sharded(*modules: Any, **options: Any) -> None:
    for module in modules:
        fully_shard(module, **options)
        for one in module if isinstance(module, list) else [module]:
            one.set_custom_all_gather(Gather())
            one.set_custom_reduce_scatter(Scatter())


class Chain(nn.Module):
    """Layers one after the other, with work between them that nobody has sharded."""

    def __init__(self, layers: list[nn.Module], call: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.call = call or (lambda layer, x: layer(x))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.call(layer, spend(x, 0.25, 0.5))
        return x


def chain(call: Callable[..., Any] | None = None, **options: Any) -> nn.Module:
    module = Chain([Layer() for _ in range(3)], call)
    sharded(*module.layers, module, **options)
    return module


def backward(probe: StepProbe, loss: Tensor, *, own: bool = False) -> None:
    """As `BalancedRun` stamps it; ``own``: of the loss as the module has returned it."""
    loss = loss if own else loss * 1.0

    def ended() -> None:
        probe.backward_ended()
        probe.close()

    when_backward_ends(loss, ended)
    loss.backward()
    probe.exchanged()


def steps(module: nn.Module, run: Callable[[StepProbe], None], times: int = 2) -> list[tuple[float, float, float]]:
    """Returns own time, waiting and what has passed, of each step."""
    probe, rows = StepProbe(device_of("cpu")), []
    probe.attach(module)
    for _ in range(times):
        begin_s = Clock.now_s
        probe.arm()
        probe.start()
        run(probe)
        both = probe.take_both()
        assert both is not None
        rows.append((*both, Clock.now_s - begin_s))
    return rows


def step(module: nn.Module, *args: Any, **kwargs: Any) -> list[tuple[float, float, float]]:
    return steps(module, lambda probe: backward(probe, module(*args, **kwargs).sum()))


X = torch.ones(2, 4)
LAYER_S = FORWARD_S + BACKWARD_S
BETWEEN_S = 3 * 0.25 + 2 * 0.5  # the input of the first needs no gradient
CHAIN_S = 3 * LAYER_S + BETWEEN_S
Case = tuple[list[tuple[float, float, float]], float]
CASES: dict[str, Callable[[], Case]] = {}


def case(make: Callable[[], Case]) -> Callable[[], Case]:
    CASES[make.__name__] = make
    return make


@case
def layers() -> Case:
    module = chain()
    return step(module, X), CHAIN_S


@case
def inputs_that_need_a_gradient() -> Case:
    module = chain()
    return step(module, X.clone().requires_grad_()), CHAIN_S + 0.5


@case
def loss_of_the_root() -> Case:
    """FSDP's last callback is queued before the one on the loss."""

    class Loss(Chain):
        def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            return {"loss": super().forward(x).sum()}

    module = Loss([Layer(), Layer()])
    first = module.layers[0]  # its gradients are scattered in that callback
    sharded(*module.layers, module)
    assert isinstance(first, FSDPModule)
    rows = steps(module, lambda probe: backward(probe, module(X)["loss"], own=True))
    return rows, 2 * LAYER_S + 2 * 0.25 + 0.5


@case
def pieces() -> Case:
    """Backward passes of the step's own, whose ends nobody stamps; one more has the gradients."""
    module = chain()

    def run(probe: StepProbe) -> None:
        for _ in range(2):
            module(X).sum().backward()
            with probe.paused():  # for the other ranks' word
                Clock.now_s += 7.0
            Clock.now_s += 0.125
        backward(probe, torch.zeros(1, requires_grad=True).sum())

    return steps(module, run), 2 * CHAIN_S + 2 * 0.125


@case
def parameters_of_the_root() -> Case:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.block, self.last = Layer(), Layer(), Layer()

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.block(self.first(x)))

    module = Root()
    sharded(module.block, module)
    return step(module, X), 3 * LAYER_S


@case
def kept_after_forward() -> Case:
    return step(chain(reshard_after_forward=False), X), CHAIN_S


@case
def accumulation() -> Case:
    """Windows of three: the gradients of the last batch are scattered."""
    module: Any = chain()
    batches = iter(range(6))

    def run(probe: StepProbe) -> None:
        last = next(batches) % 3 == 2
        module.set_requires_gradient_sync(last)
        module.set_is_last_backward(last)
        backward(probe, module(X).sum())

    return steps(module, run, 6), CHAIN_S


@case
def checkpoint_inside() -> Case:
    module = Chain([checkpoint_wrapper(Layer()) for _ in range(3)])
    sharded(*module.layers, module)
    return step(module, X), CHAIN_S + 3 * FORWARD_S


@case
def checkpoint_composed() -> Case:
    layers: list[nn.Module] = [Layer() for _ in range(3)]
    module = Chain(layers)
    for layer in layers:
        checkpoint_activation.checkpoint(layer)  # type: ignore[attr-defined]
    sharded(*layers, module)
    return step(module, X), CHAIN_S + 3 * FORWARD_S


@case
def checkpoint_outside() -> Case:
    return step(chain(lambda layer, x: checkpoint(layer, x, use_reentrant=False)), X), CHAIN_S + 3 * FORWARD_S


@case
def checkpoint_of_several() -> Case:
    """Gathered again in the middle of a backward."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair = nn.Sequential(Layer(), Layer())

        def forward(self, x: Tensor) -> Tensor:
            return spend(checkpoint(self.pair, spend(x, 0.25, 0.5), use_reentrant=False), 0.25, 0.5)

    first, two = Layer(), Two()
    module = nn.Sequential(first, two)
    sharded(first, *two.pair, module)
    return step(module, X), 3 * LAYER_S + 2 * 0.75 + 2 * FORWARD_S


@case
def checkpoint_reentrant() -> Case:
    module = chain(lambda layer, x: checkpoint(layer, x, use_reentrant=True))
    return step(module, X.clone().requires_grad_()), CHAIN_S + 0.5 + 3 * FORWARD_S


@case
def used_twice() -> Case:
    return step(chain(lambda layer, x: layer(layer(x))), X), 6 * LAYER_S + BETWEEN_S


@dataclass
class Pair:
    a: Tensor
    b: Tensor
    name: str = "pair"


class Many(nn.Module):
    """Arguments and outputs in all forms; one is passed on, and used behind the module."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, log: list[int], *, pair: Pair, more: dict[str, Any]) -> tuple[Any, ...]:
        log.append(1)
        y = spend(self.linear(x + more["z"][0]), FORWARD_S, BACKWARD_S)
        return x, {"y": y, "n": 1}, Pair(pair.a + pair.b, y * 2.0), None


@case
def many_inputs_and_outputs() -> Case:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Many(), Many()

        def forward(self, x: Tensor) -> Tensor:
            x, log = spend(x, 0.25, 0.5), []
            for layer in (self.first, self.second):
                passed, told, pair, _ = layer(x, log, pair=Pair(x, x * 2.0), more={"z": (x, "w")})
                x = spend(spend(passed, 0.25, 0.5) + told["y"] + pair.a + pair.b, 0.25, 0.5)
            assert log == [1, 1]
            return x

    module = Root()
    sharded(module.first, module.second, module)
    return step(module, X.clone().requires_grad_()), 2 * LAYER_S + 5 * 0.75


@case
def only_a_dataclass() -> Case:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, pair: Pair) -> Pair:
            return Pair(spend(self.linear(pair.a), FORWARD_S, BACKWARD_S), pair.b * 1.0)

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Takes(), Takes()])

        def forward(self, x: Tensor) -> Tensor:
            pair = Pair(x, x)
            for layer in self.layers:
                pair = layer(Pair(spend(pair.a, 0.25, 0.5), pair.b))
            return pair.a + pair.b

    module = Root()
    sharded(*module.layers, module)
    return step(module, X), 2 * LAYER_S + 2 * 0.25 + 0.5


@case
def one_group_of_two() -> Case:
    """The second module of a group finds its parameters there, and scatters nothing."""
    module = Chain([Layer(), Layer(), Layer()])
    sharded([module.layers[1], module.layers[2]], module)
    return step(module, X), CHAIN_S


@case
def casts() -> Case:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float64)
    return step(chain(lambda layer, x: layer(x), mp_policy=policy), X), CHAIN_S


@case
def shortcut() -> Case:
    """The gradient of an input is complete when other work, which counts, is done."""

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.block = Layer(), Layer()

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            beside = spend(x, 0.25, 0.5)  # built first, so differentiated last
            return self.block(x) + beside

    module = Root()
    sharded(module.block, module)
    return step(module, X), 2 * LAYER_S + 0.75


@case
def validation_between() -> Case:
    module = chain()

    def run(probe: StepProbe) -> None:
        with torch.no_grad():
            module(X)  # a part of the step, e.g. of a teacher
        backward(probe, module(X).sum())
        with torch.no_grad():
            module(X)

    rows = steps(module, run)
    return [(own, wait, own + wait) for own, wait, _ in rows], CHAIN_S + 3 * FORWARD_S + 3 * 0.25


@case
def tensor_parallel() -> Case:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return spend(self.down(self.up(x)), FORWARD_S, BACKWARD_S)

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "tensor"))
    module = Chain([Block(), Block(), Layer()])
    plan: Any = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in module.layers[:2]:
        parallelize_module(block, mesh["tensor"], plan)
    parallelize_module(module.layers[2], mesh["tensor"], {"linear": ColwiseParallel()})
    sharded(*module.layers[:2], module.layers[2].linear, module, mesh=mesh["data"])
    return step(module, X), CHAIN_S


@case
def compiled_before() -> Case:
    """One graph for each layer, as without the stopwatch: hooks run beside it."""
    module = Chain([Layer(), Layer()])
    for layer in module.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    sharded(*module.layers, module)
    return step(module, X), 2 * LAYER_S + 2 * 0.25 + 0.5


@case
def compiled_inside() -> Case:
    module = Chain([torch.compile(Layer(), backend="eager", fullgraph=True) for _ in range(2)])  # type: ignore[misc]
    sharded(*module.layers, module)
    return step(module, X), 2 * LAYER_S + 2 * 0.25 + 0.5


@case
def waiting_in_parts() -> Case:
    """A module of the user's that waits beside sharded ones, its waiting told as theirs is."""

    class Waits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return spend(x, 40.0, 50.0)

    module = nn.Sequential(Layer(), Waits(), Layer())
    sharded(module[0], module[2], module)
    probe = StepProbe(device_of("cpu"), waiting=[Waits])
    with mock.patch(f"{__name__}.StepProbe", lambda device: probe):
        return step(module, X), 2 * LAYER_S


def on_a_scripted_clock(rank: int, world: int, names: list[str]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    clock = SimpleNamespace(perf_counter=lambda: Clock.now_s)
    with mock.patch.object(kinds, "time", clock):
        for name in names:
            torch.manual_seed(1)
            try:
                results[name] = CASES[name]()
            except Exception:  # of all ranks alike
                results[name] = traceback.format_exc()
    return results


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    return run_ranks(2, on_a_scripted_clock, list(CASES))[0]


@pytest.mark.parametrize("name", CASES)
def test_waiting_is_left_out_to_the_second(seen: dict[str, Any], name: str) -> None:
    if name in ("many_inputs_and_outputs", "only_a_dataclass") and not hasattr(FSDPModule, "reset_iter_state"):
        pytest.skip("FSDP before torch 2.13 copies lists of arguments, and passes over dataclasses")
    assert not isinstance(seen[name], str), seen[name]
    rows, own_s = seen[name]
    assert len(rows) > 1
    for own, wait, passed in rows:
        assert own == pytest.approx(own_s), rows
        assert wait >= GATHER_S and own + wait == pytest.approx(passed), rows


def gradients(rank: int, world: int) -> list[list[Tensor]]:
    """Without the stopwatch, and under it."""
    found = []
    for attached in (False, True):
        torch.manual_seed(1)
        module = chain(lambda layer, x: checkpoint(layer, x, use_reentrant=False) + x)
        probe = StepProbe(device_of("cpu"))
        if attached:
            probe.attach(module)
        probe.arm()
        probe.start()
        backward(probe, module(X * (rank + 1)).sum())
        found.append([cast(Any, p.grad).full_tensor() for p in module.parameters()])
    return found


def test_gradients_are_the_same_under_the_stopwatch() -> None:
    for without, under in run_ranks(2, gradients):
        assert len(without) == 6 and all(torch.equal(a, b) for a, b in zip(without, under, strict=True))


class Stock(LightningModule):
    """Sharded by its own `configure_model`; nobody calls the module as a whole."""

    def configure_model(self) -> None:
        self.net = chain(mesh=cast(Any, self.device_mesh)["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def under_stock_lightning(rank: int, world: int) -> list[tuple[float, float]]:
    strategy, monitor = ModelParallelStrategy(world, 1, process_group_backend="gloo"), StragglerMonitor()
    trainer = rank_trainer(rank, world, strategy, max_epochs=1, callbacks=[monitor])
    with mock.patch.object(kinds, "time", SimpleNamespace(perf_counter=lambda: Clock.now_s)):
        trainer.fit(Stock(), DataLoader(TensorDataset(torch.ones(12, 4)), 2))
    return [(event.data["compute_s"], event.data["wait_s"]) for event in monitor.step_events()]


def test_stragglers_are_seen_under_stock_lightning() -> None:
    for rows in run_ranks(2, under_stock_lightning):
        assert rows == [pytest.approx((CHAIN_S, 6 * GATHER_S + 3 * SCATTER_S))] * 3


# ---- real: ranks of different speed, by a host's clock that sees none ------------------------------------------
# The only place where real time decides: what each rank has really slept, in a step that nothing else has disturbed.

SPEEDS = (1.0, 1.0, 0.5, 0.25)
SLEEP_S = 0.02, 0.04  # of a block at speed 1
TRIES = 25  # steps, of which one is enough: a busy machine disturbs most of them
slept: list[float] = []
Row = tuple[float, float, float, float]  # of a rank: own time, what was slept, waiting, and what the host's clock says


def sleep_s(seconds: float) -> None:
    begin_s = time.perf_counter()
    time.sleep(seconds)
    slept.append(time.perf_counter() - begin_s)


class _Sleeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, speed: float) -> Tensor:
        ctx.speed = speed
        sleep_s(SLEEP_S[0] / speed)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        sleep_s(SLEEP_S[1] / ctx.speed)
        return grad, None


class Block(nn.Module):
    def __init__(self, speed: float) -> None:
        super().__init__()
        self.linear, self.speed = nn.Linear(16, 16), speed

    def forward(self, x: Tensor) -> Tensor:
        return _Sleeps.apply(self.linear(x), self.speed)


def of_different_speed(rank: int, world: int) -> list[Row]:
    """Returns the rows of all ranks in the first step of which they are true, or in the last one."""
    blocks = [Block(SPEEDS[rank]) for _ in range(4)]
    module = nn.Sequential(*blocks)
    for one in (*blocks, module):
        fully_shard(one)
    probe, rows = StepProbe(device_of("cpu")), cast(list[Row], [None] * world)
    probe.attach(module)
    for _ in range(TRIES):
        slept.clear()
        dist.barrier()
        begin_s = time.perf_counter()
        probe.arm()
        probe.start()
        backward(probe, module(torch.ones(2, 16)).sum())
        host_s = time.perf_counter() - begin_s
        own_s, wait_s = probe.take_both() or (0.0, 0.0)
        dist.all_gather_object(rows, (own_s, sum(slept), wait_s, host_s))
        with contextlib.suppress(AssertionError):
            check(rows)
            break
    return rows


def check(rows: list[Row]) -> None:
    for speed, (own_s, slept_s, wait_s, host_s) in zip(SPEEDS, rows, strict=True):
        assert slept_s >= 4 * sum(SLEEP_S) / speed
        assert own_s == pytest.approx(slept_s, rel=0.05), rows
        assert own_s + wait_s == pytest.approx(host_s, rel=0.02), rows
    assert [rows[0][0] / own_s for own_s, *_ in rows] == pytest.approx(SPEEDS, rel=0.1)
    hosts = [host_s for *_, host_s in rows]
    assert max(hosts) < 1.05 * min(hosts)


def test_ranks_of_different_speed_are_seen_where_the_host_sees_none() -> None:
    check(run_ranks(4, of_different_speed)[0])
