"""Fixtures of the stale engine's tests."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def float64() -> None:
    """Double precision, so that exact means exact to the last digits."""
    torch.set_default_dtype(torch.float64)
