"""docs/reference/drop_in.md: its table is what the tests show."""

from __future__ import annotations

from tests.docs.stock_ddp import PAGE, page_with, table


def test_table_is_what_tests_show() -> None:
    assert PAGE.read_text() == page_with(table()), "run: python -m tests.docs.stock_ddp"
