"""Hooks in batches that a rank has no part in, and samples left for the batches to come."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback

from lightning_hetero.stale.loop import _leaving
from tests.ranks.harness import run_ranks
from tests.ranks.kit import rank_trainer, stale
from tests.ranks.test_stale_resume_engines import Watched, pair

pytestmark = pytest.mark.ranks


class Counting(Callback):
    """Counts batches; looks at none, so it is called for every one of them."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.batches += 1


class Looking(Callback):
    """Looks at batches, so it is called for those of its rank."""

    def __init__(self) -> None:
        self.samples: list[int] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.samples.append(len(batch[0]))
        assert outputs["loss"] is not None


def counting_job(rank: int, world: int) -> tuple[int, list[int]]:
    counting, looking = Counting(), Looking()
    trainer = rank_trainer(rank, world, stale(policy="asp"), max_epochs=2, callbacks=[counting, looking])
    trainer.fit(Watched(rank, slow_s=0.05), pair()[0])
    return counting.batches, looking.samples


def test_hooks_that_look_at_no_batch_are_called_for_every_batch_on_every_rank() -> None:
    """Or the ranks would not come to save a checkpoint together."""
    ranks = run_ranks(2, counting_job)
    assert [batches for batches, _ in ranks] == [2 * 17] * 2
    assert all(0 < len(samples) <= 2 * 17 and min(samples) > 0 for _, samples in ranks)
    assert len(ranks[1][1]) < 2 * 17  # the slow rank was passed by


@pytest.mark.parametrize(
    ("ticks", "spans", "kept"),
    [
        (2, [[0, 8], [10, 18]], [[0, 8], [10, 18]]),  # two are free
        (3, [[0, 8], [9, 19]], [[0, 8], [9, 18]]),
        (4, [[0, 17], [18, 20]], [[0, 16]]),
        (2, [[0, 16], [18, 24]], [[0, 16], [18, 20]]),  # beyond the last batch that is trained
    ],
)  # fmt: skip
def test_each_batch_to_come_has_a_sample(ticks: int, spans: list[list[int]], kept: list[list[int]]) -> None:
    """The others may have gone on while a rank failed: then the last samples are trained again."""
    assert _leaving(ticks, spans, 20) == kept
