"""What the tests of the pipeline's step share: what keeps account of suspended steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from lightning_hetero.pipeline.runtime.step.resumable import Carrier


@pytest.fixture
def carrier() -> Iterator[Carrier]:
    with closing(Carrier()) as carrier:
        yield carrier
