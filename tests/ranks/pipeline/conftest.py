"""What the tests of the pipeline's step share: what closes suspended steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest


@pytest.fixture
def carrier() -> Iterator[ExitStack]:
    with ExitStack() as carrier:
        yield carrier
