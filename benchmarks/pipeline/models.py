"""The models: a deep MLP of uneven widths, a CNN, a small GPT, four equal layers; and what their layers cost.

They are small, because every device is emulated on one machine: a layer's *bytes* are its real ones, its *time* is its
part of the FLOPs times what a scenario says a sample takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from lightning_hetero.demo import VOCABULARY, CausalBlock, encode, topics_text
from lightning_hetero.pipeline.runtime.measure.layers import Observed, observe
from lightning_hetero.pipeline.runtime.measure.memory import state_bytes, state_copies, trained_bytes
from lightning_hetero.solvers.fit import fit_affine
from lightning_hetero.types import AffineCost, LayerCost, ModelCost

OPTIMIZER = torch.optim.Adam
WIDTHS = (64, 192, 256, 96, 256, 128, 320, 160, 256, 64, 384, 128, 256, 192, 96, 256, 64)
CHANNELS = (1, 12, 16, 16, 24, 24, 32, 32, 48, 48, 64, 64, 64)
SIDE = 16  # of an image [pixels]
EQUAL = 256  # of four equal layers, to compare engines
WIDTH, HEADS, BLOCKS, WINDOW = 48, 4, 12, 32  # of the GPT


class Net(LightningModule):
    """``head(layers(before(x)))``; ``layers`` is the backbone.

    Args:
        before: up to the layers.
        layers: divided among devices.
        head: behind them.
        loss: of the head's output and the targets.
    """

    def __init__(
        self, before: nn.Module, layers: list[nn.Module], head: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.before, self.layers, self.head = before, nn.Sequential(*layers), head
        self.loss = loss

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.loss(self.head(self.layers(self.before(batch[0]))), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZER(self.parameters(), lr=1e-3)


class Dense(nn.Module):
    """A linear layer and its activation function, as one layer of the backbone."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


class Convolution(nn.Module):
    """A convolution, normalised by group; every fourth halves the image."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1)
        self.norm = nn.GroupNorm(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x)))


class Embedding(nn.Module):
    """Characters and their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.zeros(WINDOW, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        return self.characters(ids) + self.positions[: ids.shape[1]]


class MeanOverImage(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


def _next_character(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _mlp() -> Net:
    layers: list[nn.Module] = [Dense(a, b) for a, b in pairwise(WIDTHS)]
    return Net(nn.Identity(), layers, nn.Linear(WIDTHS[-1], 1), nn.functional.mse_loss)


def _cnn() -> Net:
    layers: list[nn.Module] = [
        Convolution(a, b, 2 if i % 4 == 3 else 1) for i, (a, b) in enumerate(pairwise(CHANNELS))
    ]
    head = nn.Sequential(MeanOverImage(), nn.Linear(CHANNELS[-1], 10))
    return Net(nn.Identity(), layers, head, nn.functional.cross_entropy)


def _equal() -> Net:
    layers: list[nn.Module] = [nn.Sequential(*(Dense(EQUAL, EQUAL) for _ in range(3))) for _ in range(4)]
    return Net(nn.Identity(), layers, nn.Linear(EQUAL, 1), nn.functional.mse_loss)


def _gpt() -> Net:
    layers: list[nn.Module] = [CausalBlock(WIDTH, HEADS) for _ in range(BLOCKS)]
    head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))
    return Net(Embedding(), layers, head, _next_character)


MODELS: dict[str, Callable[[], Net]] = {"mlp": _mlp, "cnn": _cnn, "gpt": _gpt, "equal": _equal}


def make(model: str) -> Net:
    """Returns a model, the same on all ranks.

    Raises:
        ValueError: an unknown name.
    """
    if model not in MODELS:
        raise ValueError(f"model={model!r} must be one of {', '.join(MODELS)}")
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return MODELS[model]()


def dataset(model: str, samples: int) -> TensorDataset:
    """Returns inputs and targets; the GPT's are Python's help topics."""
    generator = torch.Generator().manual_seed(1)
    if model == "gpt":
        ids = encode(topics_text())[: samples * WINDOW + 1]
        ids = ids.repeat(-(-(samples * WINDOW + 1) // len(ids)))[: samples * WINDOW + 1]
        return TensorDataset(ids[:-1].view(samples, WINDOW), ids[1:].view(samples, WINDOW))
    if model == "cnn":
        images = torch.rand(samples, 1, SIDE, SIDE, generator=generator)
        return TensorDataset(images, torch.randint(0, 10, (samples,), generator=generator))
    width = EQUAL if model == "equal" else WIDTHS[0]
    x = torch.randn(samples, width, generator=generator)
    return TensorDataset(x, x.sin().sum(1, keepdim=True))


def parameters_of(model: str) -> list[tuple[int, float]]:
    """Returns each parameter's part of the model and size [bytes], in the order of the forward pass.

    Parts: 0 is before the layers, 1 the first layer, ..., the last one the head.
    """
    net = make(model)
    parts = [net.before, *net.layers, net.head]
    return [(i, float(p.numel() * p.element_size())) for i, part in enumerate(parts) for p in part.parameters()]


def _flops(layer: nn.Module, value: Tensor) -> tuple[float, float]:
    """Returns the FLOPs of forward and backward."""
    with FlopCounterMode(display=False) as forward:
        output = layer(value)
    with FlopCounterMode(display=False) as backward:
        output.sum().backward()
    return float(forward.get_total_flops()), float(backward.get_total_flops())


def _counted(layers: Sequence[nn.Module], example: Tensor, copies: Mapping[int, int]) -> list[LayerCost]:
    """Returns the layers' costs, with FLOPs in the place of seconds."""
    sizes, flops, kept = (2, 8), [list[tuple[float, float]]() for _ in layers], list[Observed]()
    for samples in sizes:
        value, held, kept = example[:samples].detach().requires_grad_(example.requires_grad), [], []
        for layer, found in zip(layers, flops, strict=True):
            found.append(_flops(layer, value.clone()))
            kept.append(observe(layer, value, lambda layer, value: layer(value), held))
            value, held = kept[-1].value, kept[-1].held
    return [
        LayerCost(
            name=f"layers.{i}",
            forward=fit_affine(sizes, [forward for forward, _ in found]),
            backward=fit_affine(sizes, [backward for _, backward in found]),
            param_bytes=trained_bytes(layer),
            state_bytes=state_bytes(layer, copies),
            activation_bytes=seen.kept_bytes / sizes[-1],
            output_bytes=seen.output_bytes / sizes[-1],
        )
        for i, (layer, found, seen) in enumerate(zip(layers, flops, kept, strict=True))
    ]


def costs_of(model: str, sample_s: float, fixed_s: float = 0.0) -> ModelCost:
    """Returns the model's costs: real bytes; the seconds of a micro-batch divided among layers by FLOPs.

    Args:
        model: name.
        sample_s: per sample, forward and backward of the whole model on a device of speed 1 [s].
        fixed_s: of a micro-batch besides, likewise [s].
    """
    net = make(model)
    copies = state_copies(net.configure_optimizers())
    inputs = dataset(model, 8).tensors[0]
    example = net.before(inputs).detach()
    example.requires_grad_(bool(trained_bytes(net.before)))
    counted = _counted([*net.layers, net.head], example, copies)
    total = sum(cost.forward.per_sample_s + cost.backward.per_sample_s for cost in counted)

    def scaled(cost: AffineCost) -> AffineCost:
        part = cost.per_sample_s / total
        return AffineCost(fixed_s=part * fixed_s, per_sample_s=part * sample_s)

    *layers, head = (
        replace(cost, forward=scaled(cost.forward), backward=scaled(cost.backward)) for cost in counted
    )
    per_sample_bytes = example.nbytes / len(example)
    before = LayerCost(
        name="before",
        forward=AffineCost(fixed_s=0.0, per_sample_s=0.0),
        backward=AffineCost(fixed_s=0.0, per_sample_s=0.0),
        param_bytes=trained_bytes(net.before),
        state_bytes=state_bytes(net.before, copies),
        activation_bytes=per_sample_bytes,
        output_bytes=per_sample_bytes,
    )
    return ModelCost(layers=tuple(layers), before=before, head=head)
