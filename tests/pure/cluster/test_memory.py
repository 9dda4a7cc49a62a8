"""What of a device's memory a plan may count with."""

from __future__ import annotations

import math

import pytest

from lightning_hetero.cluster.memory import budget_bytes

pytestmark = pytest.mark.pure
GIB = 2.0**30


def test_a_tenth_half_a_gibibyte_and_communicators_are_left_alone_and_a_card_is_divided() -> None:
    assert budget_bytes(10 * GIB) == pytest.approx(8.5 * GIB)
    assert budget_bytes(10 * GIB, communicators_bytes=6 * 0.25 * GIB) == pytest.approx(7.0 * GIB)
    assert budget_bytes(10 * GIB, ranks=2) == pytest.approx(4.0 * GIB)


def test_a_host_has_no_limit_and_a_full_card_is_no_error() -> None:
    assert budget_bytes(math.inf, ranks=4, communicators_bytes=0.0) == math.inf
    assert budget_bytes(0.3 * GIB) == 1.0
