"""Gradients by pieces: what they add up to, whose hooks run, and which gradients a broken pass has left."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from lightning_hetero.balanced.runtime.pieces import MemoryWatch, PieceGradients, cut, save_buffers
from lightning_hetero.measure.device import device_of, save_random_states
from lightning_hetero.shares.caps import MemoryCap


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
