"""The stopwatch in real runs: what torch calls when, and a peer that is really slow (see also `test_stopwatch`)."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lightning_hetero.measure.step_clock import when_backward_ends
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Toy, balanced, rank_trainer, regression
from tests.ranks.measure.kit import Late

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
    side: Any = dist.new_group(backend="gloo")
    calls: dict[str, int] = {}
    for name in ("plain", "static", "unused", "no_sync"):
        torch.manual_seed(1)
        kwargs: dict[str, Any] = {"static_graph": name == "static", "find_unused_parameters": name == "unused"}
        model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)), **kwargs)
        calls[name] = 0
        for _ in range(2):
            with model.no_sync() if name == "no_sync" else nullcontext():
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


# ---- steps as events ------------------------------------------------------------------------------------------


def noted(rank: int, world: int) -> list[tuple[list[tuple[int, int]], list[tuple[int, int]]]]:
    """Per stopwatch, at once or a step late: what each batch was, and what the events say it was."""
    results = []
    for late in (False, True):
        strategy = balanced()
        trainer = rank_trainer(rank, world, strategy, max_epochs=1)
        module = Toy()
        batches: list[tuple[int, int]] = []
        module.on_train_batch_start = (  # type: ignore[method-assign]
            lambda batch, batch_idx, s=strategy, b=batches: b.append((batch_idx, s.current_samples() or 0))
        )
        if late:
            module.on_train_start = (  # type: ignore[method-assign]
                lambda s=strategy: vars(s._run.probe).update(_watch=Late(), _exchange=Late())  # pyright: ignore
            )
        events: list[tuple[int, int]] = []
        module.on_train_batch_end = (  # type: ignore[method-assign]
            lambda *_, s=strategy, e=events: e.extend(
                (one.step, one.data["samples"]) for one in s.step_events() if one.kind == "step"
            )
        )
        trainer.fit(module, DataLoader(regression(96), batch_size=8))
        results.append((batches, events))
    return results


def test_events_tell_each_step_its_own_samples() -> None:
    """Also when the time of a step is known only during the next one, as on an accelerator."""
    for (batches, events), (late_batches, late_events) in run_ranks(2, noted):
        assert len(batches) == 6 and len(set(batches)) > 2
        assert events == batches
        assert late_events == late_batches[:-1]


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
        """The first step is not looked at."""
        slow = self.global_rank == 1 and self.where == where and self.trainer.fit_loop.batch_idx > 0
        return DELAY_S if slow else 0.0

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


class Meeting(nn.SyncBatchNorm):
    """Waits for the peers in forward and in backward, without a GPU."""

    def __init__(self) -> None:
        super().__init__(16, affine=False, track_running_stats=False)

    def forward(self, input: Tensor) -> Tensor:
        return _Meet.apply(input)


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


class GatheringPeer(MeetingPeer):
    """Gathers rows, through which gradients flow."""

    def __init__(self, where: str) -> None:
        super().__init__(where)
        del self.meeting
        self.meeting = self.gathered  # type: ignore[assignment]

    def gathered(self, hidden: Tensor) -> Tensor:
        return torch.as_tensor(self.all_gather(hidden, sync_grads=True))[self.global_rank]


def timed(rank: int, world: int, cases: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]) -> list[Any]:
    """Returns, per case, (compute_s, wait_s) of every step but the first."""
    results = []
    for make, arguments, options in cases:
        strategy = balanced(policy=None, rebalance=False, **options)
        trainer = rank_trainer(rank, world, strategy, max_epochs=1, limit_train_batches=3)
        rows: list[tuple[float, float]] = []
        module = make(*arguments)
        take = lambda *_, s=strategy, r=rows: r.extend(  # noqa: E731
            (e.data["compute_s"], e.data["wait_s"]) for e in s.step_events() if e.kind == "step"
        )
        module.on_train_batch_end = take
        with mock.patch.object(DistributedDataParallel, "_passing_sync_batchnorm_handle"):  # refuses it on CPUs
            trainer.fit(module, DataLoader(regression(64), batch_size=8))
        assert len(rows) == 3
        results.append(rows[1:])
    return results


def test_own_time_holds_no_waiting_for_a_slow_peer() -> None:
    cases: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (Peer, ("forward",), {}),
        (Peer, ("backward",), {}),
        (ManualPeer, ("forward",), {}),
        (ManualPeer, ("backward",), {}),
        (MeetingPeer, ("forward",), {}),
        (MeetingPeer, ("backward",), {}),
        (GatheringPeer, ("forward",), {}),
        (GatheringPeer, ("backward",), {}),
        (Peer, ("forward", True), {}),
    ]
    fast, slow = run_ranks(2, timed, cases)
    for (make, arguments, _), own, peer in zip(cases, fast, slow, strict=True):
        name = (make.__name__, *arguments)
        assert min(compute_s for compute_s, _ in own) < OWN_S, (name, own)
        assert min(compute_s for compute_s, _ in peer) >= DELAY_S, (name, peer)
    for rows in fast[:4]:  # where nothing else waits, the exchange does, in the step it belongs to
        assert all(wait_s > OWN_S for _, wait_s in rows), rows
