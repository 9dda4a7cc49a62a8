"""One seed for every global generator, before each test and each job of a rank."""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_all() -> None:
    """Seeds Python's, numpy's and torch's generators with 0.

    `torch.manual_seed` would write down the stack for each kind of device that has not been used, a millisecond.
    """
    random.seed(0)
    np.random.seed(0)
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:
        torch.default_generator.manual_seed(0)
