"""What the tests of the pipeline's step share: either carrier of suspended steps."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from lightning_hetero.pipeline.runtime.step.coroutines import Carrier, make_carrier
from tests.ranks.pipeline.resumable_kit import BOTH


@pytest.fixture(params=BOTH)
def carrier(request: pytest.FixtureRequest) -> Iterator[Carrier]:
    before = set(threading.enumerate())
    with make_carrier(request.param) as carrier:
        yield carrier
    assert set(threading.enumerate()) <= before
