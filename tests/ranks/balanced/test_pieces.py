"""Gradients by pieces: what they add up to, whose hooks run, and which gradients a broken pass has left."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.balanced.runtime.pieces import (
    GradientsTaken,
    MemoryWatch,
    PieceGradients,
    cut,
    leaves,
    save_buffers,
    save_random_states,
    stand_in,
)
from lightning_hetero.measure.device import device_of, is_out_of_memory
from lightning_hetero.shares.caps import MemoryCap


def net(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(dtype)


def losses(module: nn.Module, x: Tensor, sizes: list[int]) -> list[tuple[Tensor, float]]:
    return [(module(part).square().mean(), len(part) / len(x)) for part in x.split(sizes)]


def test_pieces_are_few_and_equal_and_none_is_too_small() -> None:
    for samples in range(1, 40):
        for most in range(0, 40):
            for least in (1, 2):
                sizes = cut(samples, most, least)
                assert sum(sizes) == samples and max(sizes) - min(sizes) <= 1
                assert len(sizes) == 1 or min(sizes) >= least
                if max(sizes) > max(most, 1):
                    assert samples // least <= len(sizes)  # as many as there may be
                else:
                    assert len(sizes) == -(-samples // max(most, 1))


def test_gradients_of_pieces_are_those_of_the_whole_and_no_hook_runs() -> None:
    module, x = net(), torch.randn(7, 3, dtype=torch.float64)
    ran: list[str] = []
    first = module[0].weight
    handles = [first.register_hook(lambda g: ran.append("hook") or 3 * g)]
    handles.append(first.register_post_accumulate_grad_hook(lambda p: ran.append("accumulated")))
    total = PieceGradients(module.parameters())
    for loss, weight in losses(module, x, [3, 2, 2]):
        total.add(loss, weight)
    assert ran == [] and all(p.grad is None for p in module.parameters())
    value = module(x).square().mean().detach()
    stand = stand_in(value, total.gradients())
    assert float(stand.detach()) == float(value)
    assert {id(leaf) for leaf in leaves(stand)} == {id(p) for p in module.parameters()}
    (0.5 * stand).backward()
    assert ran == ["hook", "accumulated"]
    got = [p.grad.clone() for p in module.parameters()]  # type: ignore[union-attr]
    module.zero_grad()
    (0.5 * module(x).square().mean()).backward()
    for p, g in zip(module.parameters(), got, strict=True):
        torch.testing.assert_close(g, p.grad, rtol=1e-13, atol=1e-15)
    for handle in handles:
        handle.remove()  # the users' own, still valid
    module.zero_grad()
    module(x).square().mean().backward()
    assert len(ran) == 4


def test_a_loss_that_stands_in_has_one_backward_pass() -> None:
    weight = torch.ones(2, requires_grad=True)
    stand = stand_in(torch.tensor(1.0), {weight: torch.ones(2)})
    stand.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="has one backward pass only"):
        stand.backward()


def test_parameters_that_autograd_gives_one_gradient_tensor() -> None:
    a, b = (torch.zeros(2, requires_grad=True) for _ in range(2))
    total = PieceGradients([a, b])
    for _ in range(3):
        total.add((a + b).sum(), 1.0)
    found = total.gradients()
    assert found[a].tolist() == found[b].tolist() == [3.0, 3.0]


def test_half_precision_is_summed_in_single_and_a_scaled_loss_does_not_underflow() -> None:
    weight = torch.zeros(1, dtype=torch.float16, requires_grad=True)
    plain, scaled = PieceGradients([weight]), PieceGradients([weight], scale=2.0**16)
    for total in (plain, scaled):
        for _ in range(64):
            total.add((weight * 2**-6).sum(), 2.0**-20)
    assert float(plain.gradients()[weight]) == 0.0
    assert float(scaled.gradients()[weight]) == pytest.approx(2.0**-20)


def test_a_piece_of_weight_0_adds_nothing_but_uses_its_parameters() -> None:
    weight = torch.zeros(1, requires_grad=True)
    total = PieceGradients([weight])
    total.add((weight / 0.0).sum() * torch.tensor(float("nan")), 0.0)
    assert total.gradients()[weight].tolist() == [0.0]


@pytest.mark.parametrize("accumulating", [False, True])
def test_which_gradients_a_broken_pass_has_left(accumulating: bool) -> None:
    class Wall(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            raise torch.OutOfMemoryError("no room")

    module, x = net(), torch.randn(2, 3, dtype=torch.float64)
    if accumulating:
        module(x).sum().backward()
    taken = GradientsTaken(module.parameters())
    taken.begin()
    with pytest.raises(torch.OutOfMemoryError):
        module[2](Wall.apply(module[:2](x))).sum().backward()
    assert taken.taken() == {id(p) for p in module[2].parameters()}
    taken.close()
    assert not any(getattr(p, "_post_accumulate_grad_hooks", None) for p in module.parameters())


def test_what_counts_as_a_lack_of_memory() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("anything"))
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**60, dtype=torch.uint8)  # more than any address space
    assert is_out_of_memory(error.value)
    assert not is_out_of_memory(RuntimeError("out of luck"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_buffers_and_random_states_are_put_back() -> None:
    module, device = nn.BatchNorm1d(3), device_of("cpu")
    module.register_buffer("sparse", torch.eye(3).to_sparse())
    module.register_buffer("turned", torch.arange(6.0).view(2, 3).t())
    module.register_buffer("none", torch.empty(0))
    undo = save_buffers(module), save_random_states(device)
    drawn = random.random(), np.random.rand(), torch.rand(1).item()
    module(torch.randn(4, 3))
    module.sparse.mul_(2.0)
    module.turned.mul_(2.0)
    assert module.num_batches_tracked == 1
    for one in undo:
        one()
    assert torch.equal(module.sparse.to_dense(), torch.eye(3))
    assert torch.equal(module.turned, torch.arange(6.0).view(2, 3).t())
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == drawn
    assert module.num_batches_tracked == 0 and not module.running_mean.any()  # type: ignore[union-attr]


def test_memory_is_asked_of_a_device_that_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls, on a device made up; the arithmetic is in tests/pure/balanced/test_caps.py."""
    mib, asked, base, peak, forgotten = 2**20, [0], [0], [0], [0]

    def available(device: torch.device) -> tuple[int, int]:
        asked[0] += 1
        return 700 * mib, 1000 * mib

    def forget(device: torch.device) -> None:
        forgotten[0] += 1

    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", forget)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: base[0] * mib)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak[0] * mib)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300 * mib)
    monkeypatch.setattr(torch.cuda, "mem_get_info", available)
    cap = MemoryCap(careful=True)
    watch = MemoryWatch(device_of("cuda:0"), cap)
    steps = (40, 0, 500), (40, 300, 700), (40, 300, 800), (20, 300, 600)
    for samples, bytes_before, most_bytes in (*steps, (20, 300, 900), (30, 300, 900), (-1, 300, 900)):
        base[0], peak[0] = bytes_before, most_bytes
        watch.begin(samples)
        cap.fits(samples)
        watch.end(samples)
    assert cap.estimate == 50 and cap.most == 50  # 400 + 10 per sample, in 0.9 of 1000
    assert asked == [1]
    assert forgotten == [4]  # only in steps that teach something: the peak is the user's, too
    nothing = MemoryCap()
    on_host = MemoryWatch(device_of("cpu"), nothing)
    on_host.begin(4)
    on_host.end(4)
    assert nothing.estimate is None and asked == [1]
