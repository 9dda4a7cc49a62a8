"""What a batch of a new size costs: the time of its first, second and tenth step, with cuDNN searching and without.

Each way has sizes of its own: what cuDNN has built for a size it takes in the other way, too.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn

from tests.gpu.check.found import detail, found, is_dry
from tests.gpu.check.models import Gpt, images, resnet50, texts

STEPS = 10


def _seconds(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[float]:
    seconds = []
    for _ in range(2 if is_dry() else STEPS):
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16, enabled=not is_dry()):
            loss = nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten())
        loss.backward()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started_s)
        for parameter in model.parameters():
            parameter.grad = None
    return seconds


def _batch(n: int, *one: torch.Tensor) -> list[torch.Tensor]:
    return [part.expand(n, *part.shape).contiguous() for part in one]


def sizes() -> None:
    """Eight sizes of a batch for each model and way, all of them new."""
    if is_dry():
        cases = {"ResNet": (resnet50((1, 1), 4), images(16)), "GPT": (Gpt(16, 1, 50, 8), texts(8, 50))}
    else:
        cases = {"ResNet-50": (resnet50(), images(224)), "GPT-2 small": (Gpt(), texts(256, 50257))}
    dry = {False: (2, 3), True: (4, 5)}
    counts = dry if is_dry() else {False: (16, 17, 19, 22, 26, 31, 24, 28), True: (32, 15, 18, 21, 27, 30, 25, 29)}
    for name, (model, make) in cases.items():
        model.cuda()
        x, y = (part.cuda() for part in make(0))
        for benchmark, new in counts.items():
            torch.cuda.empty_cache()
            torch.backends.cudnn.benchmark = benchmark
            _seconds(model, *_batch(8, x, y))  # what comes once, whatever the size
            rows = {n: _seconds(model, *_batch(n, x, y)) for n in new}
            detail(model=name, benchmark=benchmark, seconds=rows)
            more = [(row[0] - row[-1]) / row[-1] for row in rows.values()]
            second = [(row[1] - row[-1]) / row[-1] for row in rows.values()]
            first = f"first step +{statistics.median(more):.0%} (most +{max(more):.0%})"
            says = f"{first}, second +{statistics.median(second):.0%}"
            found(**{f"{name}{', searching' if benchmark else ''}": says})
        model.cpu()
        torch.cuda.empty_cache()
