"""What a strategy says of its fit when the fit is over, as a notebook asks it: the same names under every engine."""

from __future__ import annotations

import warnings
from typing import Any

from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from lightning_hetero import BoundedStalenessStrategy, HeteroPipelineStrategy, LoadBalancedStrategy
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Toy, rank_trainer, regression

ENGINES: list[tuple[type[Any], dict[str, Any]]] = [
    (LoadBalancedStrategy, {"exchange_every": 1}),
    (BoundedStalenessStrategy, {}),
    (HeteroPipelineStrategy, {"backbone": "net"}),
]


def said(strategy: Any) -> dict[str, Any]:
    report = strategy.step_report()
    return {
        "sizes": (strategy.global_batch_size, strategy.effective_batch_size),
        "shares": (len(strategy.shares), sum(strategy.shares)),
        "ranks": None if report is None else [record.rank for record in report.records],
        "repr": repr(strategy).partition(": ")[2],
    }


class Look(Callback):
    """Looks at the strategy while it trains."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen = (trainer.strategy.global_batch_size, trainer.strategy.effective_batch_size)


def kept_job(rank: int, world: int) -> list[tuple[Any, ...]]:
    found = []
    for engine, options in ENGINES:
        for monitor in (True, False):
            strategy, look = engine(process_group_backend="gloo", monitor=monitor, **options), Look()
            before = said(strategy)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                trainer = rank_trainer(
                    rank, world, strategy, max_epochs=1, callbacks=[look], accumulate_grad_batches=2
                )
                trainer.fit(Toy(), DataLoader(regression(48), batch_size=4))
            found.append((engine.__name__, before, look.seen, said(strategy)))
    return found


def test_what_is_asked_after_a_fit_is_what_was_true_in_it() -> None:
    nothing = {"sizes": (None, None), "shares": (0, 0), "ranks": None}
    for ranks in run_ranks(2, kept_job, timeout_s=100.0):
        for name, before, seen, after in ranks:
            assert {key: value for key, value in before.items() if key != "repr"} == nothing, name
            assert before["repr"].endswith("global batch of the loader>"), name
            assert seen == (8, 16) == after["sizes"], name
            assert after["shares"] == (2, 8) and after["ranks"] == [0, 1], (name, after)
            assert ", global batch 8, shares " in after["repr"], name
