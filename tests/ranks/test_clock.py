"""The stopwatch measures a rank's own work: by a scripted clock, and against a peer that is really slow."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lightning_hetero.cluster.clock import HostStopwatch, StepProbe, when_backward_ends
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Toy, balanced, rank_trainer, regression

# ---- scripted clock ------------------------------------------------------------------------------------------


class FakeClock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds


class _Passing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pass_s: Callable[[float], None], backward_s: float) -> Tensor:
        ctx.spend = (pass_s, backward_s)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        pass_s, backward_s = ctx.spend
        pass_s(backward_s)
        return grad, None, None


class Spends(nn.Module):
    """Takes a given time in forward and in backward."""

    def __init__(self, clock: FakeClock, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.clock, self.forward_s, self.backward_s = clock, forward_s, backward_s
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        self.clock.pass_s(self.forward_s)
        return _Passing.apply(x * self.scale, self.clock.pass_s, self.backward_s)


class Waits(Spends):
    """The same time, but spent waiting for peers."""


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def probe(clock: FakeClock) -> StepProbe:
    return StepProbe(torch.device("cpu"), waiting=[Waits], clock=clock)


def ended(probe: StepProbe) -> None:
    probe.backward_ended()
    probe.close()


def step(probe: StepProbe, clock: FakeClock, module: nn.Module, host_s: float = 0.0, wait_s: float = 0.0) -> None:
    """One automatic step as `BalancedRun` stamps it."""
    probe.arm(host_s)
    loss = module(torch.ones(2, 1)).sum()
    when_backward_ends(loss, lambda: ended(probe))
    loss.backward()
    clock.pass_s(wait_s)
    probe.exchanged()


def test_host_stopwatch(clock: FakeClock) -> None:
    watch = HostStopwatch(clock)
    assert watch.take() is None
    watch.pause()  # before any resume: nothing
    for seconds in (1.0, 2.0):
        watch.resume()
        watch.resume()  # again: still one interval
        assert watch.running
        clock.pass_s(seconds)
        watch.pause()
        watch.pause()
        assert not watch.running
        clock.pass_s(50.0)
    watch.close()
    watch.resume()
    clock.pass_s(4.0)
    watch.close()  # ends the interval too
    assert [watch.take(), watch.take(), watch.take()] == [3.0, 4.0, None]


def test_abandoned_step_is_forgotten_and_closed_ones_are_not(clock: FakeClock) -> None:
    watch = HostStopwatch(clock)
    watch.resume()
    clock.pass_s(1.0)
    watch.close()
    watch.resume()
    clock.pass_s(10.0)
    watch.reset()
    assert not watch.running
    watch.resume()
    clock.pass_s(2.0)
    watch.close()
    assert [watch.take(), watch.take(), watch.take()] == [1.0, 2.0, None]


def test_step_is_fetch_forward_and_backward(probe: StepProbe, clock: FakeClock) -> None:
    module = Spends(clock, forward_s=1.0, backward_s=2.0)
    probe.attach(module)
    module(torch.ones(1, 1))  # validation: not armed
    step(probe, clock, module, host_s=0.25, wait_s=7.0)
    assert probe.take() == pytest.approx(3.25)
    assert probe.wait_s == pytest.approx(7.0)
    assert probe.take() is None


def test_optimizer_belongs_to_the_next_step(probe: StepProbe, clock: FakeClock) -> None:
    module = Spends(clock, 1.0, 2.0)
    probe.attach(module)
    step(probe, clock, module)
    probe.add(0.5)
    assert probe.take() == pytest.approx(3.0)
    step(probe, clock, module, host_s=0.25)
    assert probe.take() == pytest.approx(3.75)
    step(probe, clock, module)
    assert probe.take() == pytest.approx(3.0)


def test_time_before_forward_is_not_counted(probe: StepProbe, clock: FakeClock) -> None:
    """DDP broadcasts buffers before the module's forward; a second forward inside the step starts nothing anew."""
    module = Spends(clock, 1.0, 2.0)
    probe.attach(module)
    probe.arm()
    clock.pass_s(30.0)
    x = module(torch.ones(1, 1))
    loss = module(x).sum()
    when_backward_ends(loss, probe.backward_ended)
    loss.backward()
    clock.pass_s(30.0)
    probe.close()
    assert probe.take() == pytest.approx(6.0)


def test_waiting_modules_are_left_out(probe: StepProbe, clock: FakeClock) -> None:
    """In forward and backward; what stands behind may work in place, as ReLU does behind batch norm."""
    waits = Waits(clock, 40.0, 50.0)
    module = nn.Sequential(Spends(clock, 1.0, 2.0), waits, nn.ReLU(inplace=True), Spends(clock, 4.0, 8.0))
    probe.attach(module)
    step(probe, clock, module)
    assert probe.take() == pytest.approx(15.0)
    probe.detach()
    step(probe, clock, module)  # without its hooks the probe is blind
    assert probe.take() is None


def test_waiting_module_beside_a_shortcut(probe: StepProbe, clock: FakeClock) -> None:
    """The clock runs again as soon as the waiting module is done, not when all gradients of its input are there."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.waits, self.beside = Spends(clock, 1, 2), Waits(clock, 40, 50), Spends(clock, 4, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            beside = self.beside(x)  # built first, so differentiated last
            return self.waits(x) + beside

    module = Residual()
    probe.attach(module)
    step(probe, clock, module)
    assert probe.take() == pytest.approx(15.0)


def test_gradients_are_the_same_under_the_probe(probe: StepProbe, clock: FakeClock) -> None:
    grads = []
    for attached in (False, True):
        module = nn.Sequential(nn.Linear(1, 3), Waits(clock, 1, 1), nn.ReLU(inplace=True), nn.Linear(3, 1))
        with torch.no_grad():
            for p in module.parameters():
                p.fill_(0.3)
        if attached:
            probe.attach(module)
        step(probe, clock, module)
        grads.append([p.grad for p in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_pauses_nest(probe: StepProbe, clock: FakeClock) -> None:
    probe.arm()
    probe.start()
    clock.pass_s(1.0)
    with probe.paused():
        clock.pass_s(10.0)
        with probe.paused():
            clock.pass_s(10.0)
        clock.pass_s(10.0)
    clock.pass_s(2.0)
    probe.backward_ended()
    with probe.paused():  # a pause of a stopped watch starts nothing
        clock.pass_s(10.0)
    clock.pass_s(10.0)
    probe.close()
    assert probe.take() == pytest.approx(3.0)


def test_two_backward_passes(probe: StepProbe, clock: FakeClock) -> None:
    """Manual optimization: each exchange is left out, and what follows it counts."""
    module = Spends(clock, 1.0, 2.0)
    probe.attach(module)
    probe.arm()
    for _ in range(2):
        loss = module(torch.ones(1, 1)).sum()
        when_backward_ends(loss, probe.backward_ended)
        loss.backward()
        clock.pass_s(20.0)
        probe.exchanged()
        probe.resume()
        clock.pass_s(0.5)  # optimizer
    probe.close()
    assert probe.take() == pytest.approx(7.0)
    assert probe.wait_s == pytest.approx(40.0)


def test_closure_run_twice_counts_once(probe: StepProbe, clock: FakeClock) -> None:
    module = Spends(clock, 1.0, 2.0)
    probe.attach(module)
    step(probe, clock, module)
    loss = module(torch.ones(2, 1)).sum()
    when_backward_ends(loss, lambda: ended(probe))
    loss.backward()
    probe.exchanged()
    assert probe.take() == pytest.approx(3.0)
    assert probe.take() is None


def test_abandoned_steps(probe: StepProbe, clock: FakeClock) -> None:
    """A step skipped before forward, or broken off in backward, leaves no time in the next one."""
    module = Spends(clock, 1.0, 2.0)
    probe.attach(module)
    probe.arm(host_s=100.0)  # never started
    probe.arm(host_s=100.0)
    module(torch.ones(1, 1))  # started, never finished
    step(probe, clock, module, host_s=0.25)
    assert probe.take() == pytest.approx(3.25)
    assert probe.take() is None


class Late(HostStopwatch):
    """Gives a step's time one step later, as CUDA events do."""

    def take(self) -> float | None:
        return super().take() if len(self._done) > 1 else None


def test_step_read_late_keeps_its_own_host_time(clock: FakeClock) -> None:
    probe = StepProbe(torch.device("cpu"), clock=clock)
    probe._watch = Late(clock)
    module = Spends(clock, 1.0, 2.0)
    probe.attach(module)
    step(probe, clock, module, host_s=0.25)
    assert probe.take() is None
    probe.arm(host_s=100.0)
    module(torch.ones(1, 1))  # abandoned; the step before is still to be read
    step(probe, clock, module, host_s=0.75)
    assert probe.take() == pytest.approx(3.25)
    step(probe, clock, module)
    assert probe.take() == pytest.approx(3.75)


# ---- the end of a backward pass, pinned to the installed torch ------------------------------------------------


def test_callback_comes_after_the_last_gradient_and_once_per_backward() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    complete: list[bool] = []
    loss = module(torch.ones(3, 2)).sum()
    when_backward_ends(loss, lambda: complete.append(all(p.grad is not None for p in module.parameters())))
    assert complete == []
    loss.backward(retain_graph=True)
    assert complete == [True], f"torch {torch.__version__}: queue_callback has changed"
    loss.backward()
    assert complete == [True, True]


def before_the_exchange(rank: int, world: int) -> dict[str, int]:
    """Rank 1 holds its gradients back until rank 0's callback says so: it must not wait for the exchange."""
    side = dist.new_group(backend="gloo")
    calls: dict[str, int] = {}
    for name in ("plain", "static", "unused", "no_sync"):
        torch.manual_seed(1)
        kwargs = {"static_graph": name == "static", "find_unused_parameters": name == "unused"}
        model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)), **kwargs)
        calls[name] = 0
        for _ in range(2):
            with model.no_sync() if name == "no_sync" else model.join(enable=False):
                out = model(torch.ones(2, 3))
                loss = out.sum() * 2.0
                word = torch.zeros(1)

                def ended(name: str = name, word: Tensor = word) -> None:
                    calls[name] += 1
                    if rank == 0:
                        dist.send(word, dst=1, group=side)

                def held_back(grad: Tensor, word: Tensor = word) -> None:
                    if rank == 1:
                        dist.recv(word, src=0, group=side)

                out.register_hook(held_back)
                when_backward_ends(loss, ended)
                loss.backward()
    return calls


def test_callback_comes_before_ddp_waits_for_the_exchange() -> None:
    """No clock decides: were the callback later, the ranks would wait for each other until the time-out."""
    expected = {"plain": 2, "static": 2, "unused": 2, "no_sync": 2}
    assert run_ranks(2, before_the_exchange, timeout_s=30) == [expected, expected]


# ---- a peer that is really slow ------------------------------------------------------------------------------
# The only place where real time decides; the margin is a factor of three and the quietest step counts.

DELAY_S = 0.3
OWN_S = 0.1


class _SlowGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, delay_s: float) -> Tensor:
        ctx.delay_s = delay_s
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        time.sleep(ctx.delay_s)
        return grad, None


class Peer(Toy):
    """Rank 1 is slow in forward or in backward; BatchNorm has buffers, which DDP broadcasts before forward."""

    def __init__(self, where: str, logs: bool = False) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(16, dtype=torch.float64)
        self.net = nn.Sequential(self.net[0], norm, nn.ReLU(inplace=True), self.net[2])
        self.where, self.logs = where, logs

    def delay_s(self, where: str) -> float:
        return DELAY_S if self.global_rank == 1 and self.where == where else 0.0

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        time.sleep(self.delay_s("forward"))
        hidden = _SlowGradient.apply(self.net[:3](x), self.delay_s("backward"))
        return nn.functional.mse_loss(self.net[3](hidden), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if self.logs:  # each of these waits for the slow rank
            self.log("loss", loss, sync_dist=True, on_step=True)
            self.all_gather(loss.detach())
            self.trainer.strategy.barrier()
        return loss

    def on_after_backward(self) -> None:
        if self.logs:  # counted with the optimizer's time
            time.sleep(self.delay_s("forward"))
            self.log("after", 1.0, sync_dist=True, on_step=True)


class ManualPeer(Peer):
    """Two backward passes per step."""

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()


class Meeting(nn.Module):
    """Waits for the peers in forward and in backward, as SyncBatchNorm does."""

    def forward(self, x: Tensor) -> Tensor:
        return _Meet.apply(x)


class _Meet(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.barrier()
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        dist.barrier()
        return grad


class MeetingPeer(Peer):
    """Slow before its ranks meet in forward, or before they meet in backward."""

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.meeting = Meeting()

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        hidden = self.net[:3](x)
        time.sleep(self.delay_s("forward"))
        hidden = _SlowGradient.apply(self.meeting(hidden), self.delay_s("backward"))
        return nn.functional.mse_loss(self.net[3](hidden), y)


def timed(rank: int, world: int, cases: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]) -> list[Any]:
    """Returns, per case, (compute_s, wait_s) of every step but the first."""
    results = []
    for make, arguments, options in cases:
        strategy = balanced(policy=None, rebalance=False, **options)
        trainer = rank_trainer(rank, world, strategy, max_epochs=1, limit_train_batches=4)
        rows: list[tuple[float, float]] = []
        module = make(*arguments)
        take = lambda *_, s=strategy, r=rows: r.extend(  # noqa: E731
            (e.data["compute_s"], e.data["wait_s"]) for e in s.step_events() if e.kind == "step"
        )
        module.on_train_batch_end = take
        trainer.fit(module, DataLoader(regression(64), batch_size=8))
        assert len(rows) == 4
        results.append(rows[1:])
    return results


def test_own_time_holds_no_waiting_for_a_slow_peer() -> None:
    cases: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (Peer, ("forward",), {}),
        (Peer, ("backward",), {}),
        (ManualPeer, ("forward",), {}),
        (ManualPeer, ("backward",), {}),
        (MeetingPeer, ("forward",), {"waiting_modules": (Meeting,)}),
        (MeetingPeer, ("backward",), {"waiting_modules": (Meeting,)}),
        (Peer, ("forward", True), {}),
    ]
    fast, slow = run_ranks(2, timed, cases)
    for (make, arguments, _), own, peer in zip(cases, fast, slow, strict=True):
        name = (make.__name__, *arguments)
        assert min(compute_s for compute_s, _ in own) < OWN_S, (name, own)
        assert min(compute_s for compute_s, _ in peer) >= DELAY_S, (name, peer)
    for rows in fast[:4]:  # where nothing else waits, the exchange does, in the step it belongs to
        assert all(wait_s > OWN_S for _, wait_s in rows), rows


def test_waiting_inside_a_module_must_be_declared() -> None:
    """The counter-proof: without ``waiting_modules`` the fast rank's time holds the slow one's."""
    fast, _ = run_ranks(2, timed, [(MeetingPeer, ("forward",), {})])
    assert min(compute_s for compute_s, _ in fast[0]) > OWN_S
