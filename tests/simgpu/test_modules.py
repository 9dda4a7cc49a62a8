"""Common modules compute on simulated GPUs what they compute on the host, forward and backward, and are saved."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.simgpu.harness import run_sim_ranks


class _Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.rnn = kind(6, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        return self.attention(x, x, x, attn_mask=causal)[0]


class _Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        index = (x.abs() * 7).long() % 10
        found = self.embedding(index)
        return torch.where(found > 0, found, found[index == index].mean())  # a mask: the host waits


def _images() -> Tensor:
    return torch.randn(4, 3, 8, 8)


def _sequences() -> Tensor:
    return torch.randn(3, 5, 6)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.GELU(), nn.MaxPool2d(2)), _images
    ),
    "transposed convolution": (lambda: nn.Sequential(nn.ConvTranspose2d(3, 2, 3), nn.GroupNorm(1, 2)), _images),
    "upsampling": (lambda: nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(3, 1, 1)), _images),
    "LSTM": (lambda: _Recurrent(nn.LSTM), _sequences),
    "GRU": (lambda: _Recurrent(nn.GRU), _sequences),
    "attention": (_Attention, _sequences),
    "transformer": (lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True), _sequences),
    "embedding": (_Words, lambda: torch.randn(4, 5)),
    "layer norm": (lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 3), nn.LogSoftmax(-1)), _sequences),
}  # fmt: skip


def _computed(make: Callable[[], nn.Module], data: Callable[[], Tensor], device: str) -> list[Tensor]:
    torch.manual_seed(0)
    module, x = make(), data()
    module.to(device)
    y = module(x.to(device))
    y.pow(2).mean().backward()
    state = [p.grad for p in module.parameters() if p.grad is not None] + list(module.buffers())
    return [t.detach().cpu() for t in [y, *state]]


def _all(rank: int, world: int) -> dict[str, Any]:
    return {name: _computed(*CASES[name], "cuda") for name in CASES}


def test_modules_compute_what_they_do_on_the_host() -> None:
    (found,) = run_sim_ranks(1, _all)
    for name, results in found.items():
        wanted = _computed(*CASES[name], "cpu")
        assert len(wanted) == len(results)
        for one, other in zip(results, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def _saved(rank: int, world: int) -> list[Any]:
    module = nn.Linear(3, 2).to("cuda:1")
    twin = copy.deepcopy(module)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    found = []
    for place in (None, "cpu", "cuda:0"):
        file.seek(0)
        weight = torch.load(file, map_location=place)["weight"]
        found.append((str(weight.device), torch.equal(weight.cpu(), module.weight.detach().cpu())))
    found.append((str(twin.weight.device), torch.equal(twin.weight, module.weight)))
    parameter, pointer = module.weight, module.weight.data_ptr()
    module.to("cpu")
    found.append((str(parameter.device), parameter is module.weight and parameter.data_ptr() != pointer))
    return found


def test_tensors_are_saved_copied_and_moved_as_they_are_on_a_gpu() -> None:
    (found,) = run_sim_ranks(1, _saved, gpus=2)
    assert [device for device, _ in found] == ["cuda:1", "cpu", "cuda:0", "cuda:1", "cpu"]
    assert all(right for _, right in found)


def _draws(rank: int, world: int) -> list[list[float]]:
    torch.manual_seed(3)
    host = torch.get_rng_state()
    states = torch.cuda.get_rng_state_all()
    one = torch.rand(3, device="cuda:0").tolist()
    untouched = torch.equal(host, torch.get_rng_state())
    torch.cuda.set_rng_state_all(states)
    again = torch.rand(3, device="cuda:0").tolist()
    other = torch.rand(3, device="cuda:1").tolist()
    return [one, again, other, [float(untouched)]]


def test_each_device_draws_from_its_own_numbers() -> None:
    (one, again, other, (untouched,)), = run_sim_ranks(1, _draws, gpus=2)
    assert one == again == other and untouched  # as on GPUs, which one seed seeds
