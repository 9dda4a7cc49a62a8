"""docs/reference/architecture.md: the orders of calls are what a trace shows."""

from __future__ import annotations

import sys

import pytest

from tests.docs.call_order import PAGE, STOPS, page_with


@pytest.mark.skipif(sys.version_info < (3, 11), reason="qualified names of functions are in frames from 3.11 on")
@pytest.mark.parametrize("engine", STOPS)
def test_orders_of_calls_are_traced(engine: str) -> None:
    assert len(STOPS[engine]) <= 12
    assert page_with(engine, PAGE.read_text()) == PAGE.read_text(), "run: python -m tests.docs.call_order"
