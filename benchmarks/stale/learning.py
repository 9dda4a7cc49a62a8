"""Real training on a simulated schedule: digits, an MLP and a CNN, four optimizers.

The recipe is the one tuned for synchronous training and is never touched: one model, data order, noise and initial
weights per seed, whatever the policy, so runs are compared in pairs. Parameters are flat float32 vectors that are
never written in place: a worker's copy of version v is a reference to the vector of version v.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.stale.simulator import Hooks
from lightning_hetero.stale.decide.completion import completed
from lightning_hetero.stale.decide.effects import Accepted, Assigned, Refused, Span, Updated

TRAINING_SAMPLES = 1408  # of 1797; 22 global batches
BATCH = 64
NOISE = 0.12  # standard deviation of noise on pixels in [0, 1]: without it the training loss goes to 0
Vector = NDArray[np.float32]
Gradient = Callable[[Vector, Vector, NDArray[np.int64]], tuple[float, Vector]]


@lru_cache(maxsize=1)
def digits() -> tuple[Vector, NDArray[np.int64]]:
    """Returns the training images (1408, 64), pixels in [0, 1], and their labels."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))[:TRAINING_SAMPLES]
    return (pixels[order] / 16.0).astype(np.float32), labels[order].astype(np.int64)


@lru_cache(maxsize=1)
def mean_image() -> Vector:
    return digits()[0].mean(0)


# ---- models: initial weights, and loss with its gradient ------------------------------------------------------------

_MLP = ((64, 48), (48,), (48, 10), (10,))


def mlp_weights(rng: np.random.Generator) -> Vector:
    """Returns the 3610 initial weights of 64-48-10, uniform within 1/sqrt(inputs)."""
    bounds = [64, 64, 48, 48]
    return np.concatenate(
        [rng.uniform(-1, 1, math.prod(s)) / math.sqrt(b) for s, b in zip(_MLP, bounds, strict=True)]
    ).astype(np.float32)


def mlp_gradient(weights: Vector, images: Vector, labels: NDArray[np.int64]) -> tuple[float, Vector]:
    """Returns the mean cross-entropy over images (n, 64) and its gradient, flat."""
    w1, b1 = weights[:3072].reshape(64, 48), weights[3072:3120]
    w2, b2 = weights[3120:3600].reshape(48, 10), weights[3600:]
    rows = np.arange(len(labels))
    before = images @ w1 + b1
    hidden = np.maximum(before, 0)
    logits = hidden @ w2 + b2
    logits -= logits.max(1, keepdims=True)
    likely = np.exp(logits)
    likely /= likely.sum(1, keepdims=True)
    loss = -float(np.log(likely[rows, labels] + 1e-30).mean())
    likely[rows, labels] -= 1
    likely /= len(labels)
    back = (likely @ w2.T) * (before > 0)
    gradient = np.empty_like(weights)
    np.matmul(images.T, back, out=gradient[:3072].reshape(64, 48))
    back.sum(0, out=gradient[3072:3120])
    np.matmul(hidden.T, likely, out=gradient[3120:3600].reshape(48, 10))
    likely.sum(0, out=gradient[3600:])
    return loss, gradient


_CNN = ((8, 1, 3, 3), (8,), (16, 8, 3, 3), (16,), (10, 256), (10,))


def cnn_weights(rng: np.random.Generator) -> Vector:
    """Returns the 3818 initial weights of two convolutions (8 and 16 channels) and a linear layer."""
    bounds = [9, 9, 72, 72, 256, 256]
    return np.concatenate(
        [rng.uniform(-1, 1, math.prod(s)) / math.sqrt(b) for s, b in zip(_CNN, bounds, strict=True)]
    ).astype(np.float32)


def cnn_gradient(weights: Vector, images: Vector, labels: NDArray[np.int64]) -> tuple[float, Vector]:
    """Returns the mean cross-entropy over images (n, 64) and its gradient, flat; computed by torch."""
    import torch
    from torch.nn import functional as F

    flat = torch.from_numpy(weights).clone().requires_grad_()
    parts = [p.view(s) for p, s in zip(flat.split([math.prod(s) for s in _CNN]), _CNN, strict=True)]
    x = torch.from_numpy(images).view(-1, 1, 8, 8)
    x = F.max_pool2d(F.relu(F.conv2d(x, parts[0], parts[1], padding=1)), 2)
    x = F.relu(F.conv2d(x, parts[2], parts[3], padding=1))
    loss = F.cross_entropy(F.linear(x.flatten(1), parts[4], parts[5]), torch.from_numpy(labels))
    (gradient,) = torch.autograd.grad(loss, flat)
    return float(loss.detach()), gradient.numpy()


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is trained and how, as tuned for synchronous training.

    Attributes:
        name: as in the tables.
        epochs: length of the cosine schedule.
        lr: at its start; the best of a grid by time to the target, of SGD and Muon half of the largest that trains.
        optimizer: as torch has it: SGD, SGD with momentum 0.9, Adam, or Muon with Adam for the biases at a third.
        target: training loss, mean over the last epoch's worth of samples, for the time to target.
        centred: whether the mean image is taken off. Without that the curvature is much larger, and the best learning
            rate lies at the edge of stability: the hardest case for stale gradients.
    """

    name: str
    epochs: int
    lr: float
    optimizer: Literal["SGD", "momentum", "Adam", "Muon"]
    target: float
    weights: Callable[[np.random.Generator], Vector]
    gradient: Gradient
    centred: bool = True


_MLP_RECIPE: dict[str, Any] = {"epochs": 30, "weights": mlp_weights, "gradient": mlp_gradient}
_CNN_RECIPE: dict[str, Any] = {"epochs": 12, "weights": cnn_weights, "gradient": cnn_gradient}
RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(name="MLP, momentum", lr=0.5, optimizer="momentum", target=0.02, **_MLP_RECIPE),
        Recipe(name="MLP, Adam", lr=0.03, optimizer="Adam", target=0.02, **_MLP_RECIPE),
        Recipe(name="MLP, SGD", lr=2.0, optimizer="SGD", target=0.05, **_MLP_RECIPE),
        Recipe(name="MLP, Muon", lr=0.02, optimizer="Muon", target=0.02, **_MLP_RECIPE),
        Recipe(name="CNN, momentum", lr=0.2, optimizer="momentum", target=0.05, **_CNN_RECIPE),
        Recipe(name="CNN, Adam", lr=0.03, optimizer="Adam", target=0.05, **_CNN_RECIPE),
        Recipe(
            name="MLP at the edge, momentum", lr=0.35, optimizer="momentum", target=0.03, centred=False, **_MLP_RECIPE
        ),
    )
}


def layered(flat: Vector) -> list[Vector]:
    """Returns the weights and biases of the MLP as views of a flat vector."""
    ends = np.cumsum([math.prod(shape) for shape in _MLP])[:-1]
    return [part.reshape(shape) for part, shape in zip(np.split(flat, ends), _MLP, strict=True)]


def orthogonal(matrix: Vector) -> Vector:
    """Returns the matrix with singular values near 1: five Newton-Schulz steps with torch's coefficients."""
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    wide = wide / np.float32(np.linalg.norm(wide) + 1e-7)
    for _ in range(5):
        square = wide @ wide.T
        wide = np.float32(3.4445) * wide + (np.float32(-4.775) * square + np.float32(2.0315) * square @ square) @ wide
    return (wide.T if matrix.shape[0] > matrix.shape[1] else wide).astype(np.float32)


class Learner:
    """The server's half of one training: pool, optimizer, schedule, and the record of its losses.

    Args:
        recipe: model and optimizer.
        seed: of the initial weights.
        completes: a late contribution completes the mean of the update that it missed, see `Policy`.
    """

    def __init__(self, recipe: Recipe, seed: int, *, completes: bool = False) -> None:
        self.recipe, self.completes = recipe, completes
        self.weights = recipe.weights(np.random.default_rng([7, seed]))
        self.total = recipe.epochs * (TRAINING_SAMPLES // BATCH)
        self.global_step = self.steps = 0
        self.first = np.zeros_like(self.weights)
        self.second = np.zeros_like(self.weights)
        self.buffer = np.zeros_like(self.weights)  # Muon's momentum
        self.pool = np.zeros_like(self.weights)
        self.loss_sum = 0.0
        self.samples = 0
        self.tick_losses: list[float] = []
        self.target_tick: int | None = None
        self._taken: dict[int, tuple[int, Vector]] = {}  # assignment -> version and its weights
        self._means: dict[int, tuple[Vector, int]] = {}  # version -> mean of what was computed with it, and of how many
        self._moves = np.zeros_like(self.weights)  # of these means, since the last update
        self._late = 0  # samples in them

    @property
    def running(self) -> bool:
        """Whether the schedule has not ended; afterwards nothing is computed any more."""
        return self.global_step < self.total

    def take(self, assignment: int) -> None:
        """A worker copies the parameters."""
        self._taken[assignment] = self.steps, self.weights

    def give(self, assignment: int, images: Vector, labels: NDArray[np.int64], scale: float) -> None:
        """A worker's gradients over its samples go into the pool."""
        base, then = self._taken.pop(assignment)
        loss, gradient = self.gradient(then, images, labels)
        self.loss_sum += loss * len(labels)
        self.samples += len(labels)
        if base in self._means:
            mean, count = self._means[base]
            whole, part = completed(float(count), float(len(labels)))
            move = np.float32(part) * (gradient - mean)
            self._means[base] = mean + move, int(whole)
            self._moves = self._moves + move
            self._late += len(labels)
            return
        self.pool += np.float32(scale * len(labels)) * gradient

    def gradient(self, weights: Vector, images: Vector, labels: NDArray[np.int64]) -> tuple[float, Vector]:
        """Returns the mean loss over the images and its gradient."""
        return self.recipe.gradient(weights, images - mean_image() if self.recipe.centred else images, labels)

    def drop(self, assignment: int) -> None:
        """A worker's contribution is refused."""
        self._taken.pop(assignment, None)

    def step(self, samples: int, worth: float, ends_step: bool) -> None:
        """One update with the mean of the pool, at ``worth`` times the scheduled learning rate."""
        lr = np.float32(worth * self.recipe.lr * 0.5 * (1 + math.cos(math.pi * self.global_step / self.total)))
        fresh = samples - self._late
        gradient = (self.pool / np.float32(max(fresh, 1))).astype(np.float32)
        if self.completes:
            known = {**self._means, **({self.steps: (gradient, fresh)} if fresh else {})}
            taken = {base for base, _ in self._taken.values()}
            self._means = {base: known[base] for base in known if base in taken}
            gradient = gradient + self._moves
            self._moves, self._late = np.zeros_like(self.weights), 0
        self.steps += 1
        self.weights = self.weights - lr * self._direction(gradient)
        self.pool = np.zeros_like(self.pool)
        if ends_step:
            self._end_tick()

    def _direction(self, gradient: Vector) -> Vector:
        """Returns what one update takes off, at a learning rate of 1."""
        optimizer = self.recipe.optimizer
        if optimizer == "SGD":
            return gradient
        if optimizer == "momentum":
            self.first = np.float32(0.9) * self.first + gradient
            return self.first
        self.first = np.float32(0.9) * self.first + np.float32(0.1) * gradient
        self.second = np.float32(0.999) * self.second + np.float32(0.001) * gradient * gradient
        root = np.sqrt(self.second / np.float32(1 - 0.999**self.steps)) + np.float32(1e-8)
        found = self.first / np.float32(1 - 0.9**self.steps) / root
        if optimizer == "Muon":
            found *= np.float32(1 / 3)
            self.buffer = np.float32(0.95) * self.buffer + np.float32(0.05) * gradient
            ahead = np.float32(0.95) * self.buffer + np.float32(0.05) * gradient
            for to, layer in zip(layered(found), layered(ahead), strict=True):
                if layer.ndim == 2:
                    to[:] = np.float32(math.sqrt(max(1.0, layer.shape[0] / layer.shape[1]))) * orthogonal(layer)
        return found

    def _end_tick(self) -> None:
        self.tick_losses.append(self.loss_sum / self.samples if self.samples else math.nan)
        self.loss_sum, self.samples = 0.0, 0
        window = TRAINING_SAMPLES // BATCH
        if self.target_tick is None and len(self.tick_losses) >= window:
            recent = [x for x in self.tick_losses[-window:] if math.isfinite(x)]
            if recent and sum(recent) / len(recent) <= self.recipe.target:
                self.target_tick = self.global_step
        self.global_step += 1

    def final_loss(self) -> float:
        """Returns the loss over all training samples, each with two fixed draws of the noise; inf if it diverged."""
        images, labels = digits()
        noise = np.random.default_rng(999).standard_normal((2, *images.shape)).astype(np.float32)
        with np.errstate(all="ignore"):
            losses = [self.gradient(self.weights, images + np.float32(NOISE) * n, labels)[0] for n in noise]
        mean = sum(losses) / 2
        return mean if math.isfinite(mean) else math.inf

    def result(self, ticks_s: Sequence[float]) -> dict[str, Any]:
        """Returns the final loss and when the target was reached, given the time of each global step's end [s]."""
        at = self.target_tick
        return {"loss": self.final_loss(), "target_tick": at, "target_s": None if at is None else ticks_s[at]}


class Training(Hooks):
    """`benchmarks.stale.simulator.Hooks` for several learners on one schedule."""

    def __init__(self, learners: Sequence[Learner], seed: int) -> None:
        self.learners, self.seed = list(learners), seed
        self.ticks_s: list[float] = []
        self._images, self._labels = digits()

    def begin(self, epoch: int, now_s: float) -> None:
        images, labels = digits()
        rng = np.random.default_rng([self.seed, epoch])
        order = rng.permutation(TRAINING_SAMPLES)
        noise = rng.standard_normal(images.shape).astype(np.float32)
        self._images, self._labels = images[order] + np.float32(NOISE) * noise, labels[order]

    def assigned(self, assigned: Assigned, now_s: float) -> None:
        for learner in self.learners:
            if learner.running:
                learner.take(assigned.assignment)

    def accepted(self, accepted: Accepted, assigned: Assigned, spans: Sequence[Span], now_s: float) -> None:
        positions = np.concatenate([np.arange(start, end) for start, end in spans])
        images, labels = self._images[positions], self._labels[positions]
        for learner in self.learners:
            if learner.running:
                learner.give(assigned.assignment, images, labels, accepted.scale)

    def refused(self, refused: Refused, now_s: float) -> None:
        for learner in self.learners:
            learner.drop(refused.assignment)

    def updated(self, updated: Updated, now_s: float) -> None:
        for learner in self.learners:
            if learner.running:
                learner.step(updated.samples, updated.worth, updated.ends_step)
        if updated.ends_step:
            self.ticks_s.append(now_s)


def synchronous(recipe: Recipe, seed: int) -> dict[str, Any]:
    """Trains as one process would; every barrier engine does the same mathematics, only at other times.

    Returns:
        ``loss`` and ``target_tick``, as `Learner.result`.
    """
    learner = Learner(recipe, seed)
    training = Training([learner], seed)
    assignment = 0
    for epoch in range(recipe.epochs):
        training.begin(epoch, 0.0)
        for start in range(0, TRAINING_SAMPLES, BATCH):
            span = (start, start + BATCH)
            learner.take(assignment)
            assigned = Assigned(rank=0, assignment=assignment, global_step=0, base=0, spans=(span,))
            accepted = Accepted(rank=0, assignment=assignment, samples=BATCH, staleness=0)
            training.accepted(accepted, assigned, (span,), 0.0)
            learner.step(BATCH, 1.0, True)
            assignment += 1
    return {"loss": learner.final_loss(), "target_tick": learner.target_tick}
