"""An error of a callback that only observes is told once and ends nothing."""

from __future__ import annotations

import os
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from lightning_hetero import HeteroTrace, StragglerMonitor
from lightning_hetero.callbacks import straggler
from lightning_hetero.callbacks.reporting import RAISES, EventSource
from lightning_hetero.record import read_events
from tests.ranks.callbacks.kit import WARNINGS, fit
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Toy, balanced, rank_trainer, regression


class Broken(Callback, EventSource):
    """Raises when it is asked for events."""

    def __init__(self, error: Exception) -> None:
        self.error, self.asked = error, 0

    def step_events(self) -> list[Any]:
        self.asked += 1
        raise self.error


@WARNINGS
def test_an_error_is_told_once_with_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RAISES)
    broken, trace = Broken(ZeroDivisionError("by zero")), HeteroTrace()
    with pytest.warns(UserWarning, match="HeteroTrace observes no more") as told:
        trainer = fit(tmp_path, [broken, trace])
    (said,) = (str(one.message) for one in told if "observes no more" in str(one.message))
    assert (trainer.global_step, broken.asked) == (6, 1)
    assert "please report it" in said and "in step_events" in said and "ZeroDivisionError: by zero" in said
    assert [e.kind for e in read_events(tmp_path / "hetero")] == ["run"]
    with pytest.warns(UserWarning, match="HeteroTrace observes no more"):  # a fit that begins tries again
        fit(tmp_path, [broken, trace])


@WARNINGS
@pytest.mark.parametrize("error", [ZeroDivisionError("ours"), RuntimeError("a rank is lost"), ConnectionError("gone")])
def test_lost_ranks_and_the_tests_own_switch_raise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Any) -> None:
    if not isinstance(error, ZeroDivisionError):
        monkeypatch.delenv(RAISES)
    with pytest.raises(type(error), match=str(error)):
        fit(tmp_path, [Broken(error), HeteroTrace()])


def broken_monitor(rank: int, world: int, place: str, engine: str) -> tuple[int, list[str]]:
    """One rank's monitor goes wrong in the second batch, or in the second summary; the others' do not."""
    del os.environ[RAISES]
    calls = [0]

    def wrong(original: Any) -> Any:
        def once(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            return {}["nothing"] if calls[0] == 2 else original(*args, **kwargs)

        return once

    owner: Any = next((o for o in (straggler.reporting, straggler) if hasattr(o, place)), StragglerMonitor)
    wrongs = patch.object(owner, place, wrong(getattr(owner, place)))
    strategy: Any = balanced() if engine == "balanced" else DDPStrategy(process_group_backend="gloo")
    here = rank == (0 if place in ("spent_together", "_values") else 1)
    with warnings.catch_warnings(record=True) as told, wrongs if here else nullcontext():
        warnings.simplefilter("always")
        monitor = StragglerMonitor()
        trace = HeteroTrace("trace")
        trainer = rank_trainer(rank, world, strategy, callbacks=[monitor, trace], max_epochs=3, log_every_n_steps=5)
        trainer.fit(Toy(), DataLoader(regression(80), batch_size=4))
    return trainer.global_step, [str(w.message) for w in told if "observes no more" in str(w.message)]


@pytest.mark.parametrize(
    ("place", "engine"),
    [(place, "ddp") for place in ("count_samples", "spent_together", "_values")] + [("_values", "balanced")],
)
def test_one_ranks_monitor_may_go_wrong_while_the_others_gather(place: str, engine: str) -> None:
    ranks = run_ranks(2, broken_monitor, place, engine)
    wrong = 0 if place in ("spent_together", "_values") else 1
    assert [steps for steps, _ in ranks] == [30, 30]
    assert [len(told) for _, told in ranks] == [int(rank == wrong) for rank in (0, 1)]
    assert "KeyError: 'nothing'" in ranks[wrong][1][0]


def test_a_users_own_mistake_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RAISES)
    with warnings.catch_warnings(), pytest.raises(ValueError, match="batch_cost returned -1"):
        warnings.simplefilter("ignore")
        fit(tmp_path, [StragglerMonitor(batch_cost=lambda _: -1)])
