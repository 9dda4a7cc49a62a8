"""What fails when a run is torn down neither hides the first error nor a model that has been trained."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from tests.ranks.harness import run_ranks
from tests.ranks.kit import Toy, regression
from tests.ranks.strangers import kit

pytestmark = pytest.mark.ranks


class Breaks(Callback):
    """Lets the end of the run fail, behind what it does; and a hook of the training before, if it is said to."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        run = trainer.strategy._run
        stock = run.close

        def close() -> None:
            stock()
            raise OSError("of the end")

        run.close = close

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self.fails:
            raise LookupError("of the user")


def ended(rank: int, world: int, engine: str, fails: bool) -> tuple[str, list[str]]:
    trainer = kit.trainer(rank, world, engine, {"pipeline": {"backbone": "net"}}, callbacks=[Breaks(fails)])
    error = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(Toy(), DataLoader(regression(16), batch_size=4))
        except Exception as caught_error:
            error = f"{type(caught_error).__name__}: {caught_error}"
    return error, [str(w.message) for w in caught if "of the end" in str(w.message)]


@pytest.mark.parametrize("engine", ["balanced", "stale", "pipeline", "federated"])
def test_the_first_error_is_the_one_that_is_raised(engine: str) -> None:
    errors = run_ranks(2, ended, engine, True)
    assert all("of the user" in error and "of the end" not in error for error, _ in errors)
    assert errors[0][1]


@pytest.mark.parametrize("engine", ["balanced", "stale", "federated"])
def test_a_model_that_each_rank_has_is_not_lost(engine: str) -> None:
    errors = run_ranks(2, ended, engine, False)
    assert [error for error, _ in errors] == ["", ""] and errors[0][1]
