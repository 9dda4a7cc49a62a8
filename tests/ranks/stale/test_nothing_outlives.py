"""Nothing of ours outlives `fit`, `validate`, `test` and `predict`, also after an exception, also of a finder."""

from __future__ import annotations

import gc
import os
import threading
from typing import Any

import psutil
import pytest
from lightning.pytorch.callbacks import Callback, LearningRateFinder
from torch import Tensor
from torch.utils.data import DataLoader

from tests.ranks.harness import run_ranks
from tests.ranks.kit import Toy, rank_trainer, regression, stale

pytestmark = pytest.mark.ranks


class Whole(Toy):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])


class Fails(Callback):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_rank == self.rank and trainer.global_step >= 3:  # a slow rank may skip a version
            raise OSError("the user's own")


class FailsInStep(Whole):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 2:
            raise ValueError("the user's step")
        return super().training_step(batch, batch_idx)


def held() -> dict[str, Any]:
    """What this process has of what outlives a function."""
    gc.collect()
    sockets = [c for c in psutil.Process().net_connections(kind="all") if c.status != psutil.CONN_NONE or c.laddr]
    return {
        "threads": sorted(t.name for t in threading.enumerate() if t.name not in ("tqdm_monitor", "awake-clock")),
        "children": sorted(p.pid for p in psutil.Process().children(recursive=True)),
        "sockets": len(sockets),
        "files": len(os.listdir("/proc/self/fd")),
        "shared": sorted(link for link in _links() if "lightning-hetero" in link),
    }


def _links() -> list[str]:
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:
            continue
    with open("/proc/self/maps") as maps:  # psutil would ask for the size of every region, which takes long
        return found + [line.split(maxsplit=5)[5].strip() for line in maps if line.count("/")]


def uses(rank: int, world: int) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    valid, seen = DataLoader(regression(8), batch_size=2), []
    train = DataLoader(regression(48), batch_size=2)

    def trainer(*callbacks: Callback) -> Any:
        return rank_trainer(rank, world, stale(), max_epochs=2, callbacks=list(callbacks))

    def use(name: str, work: Any, error: str = "") -> None:
        before = held()
        try:
            work()
            said = ""
        except (OSError, ValueError) as caught:
            said = str(caught)
        assert said == error, (name, said)
        seen.append((name, before, held()))

    module, one = Whole(), trainer()
    one.fit(Whole(), train, valid)  # whatever the first fit of a process imports, and opens for good
    use("fit", lambda: one.fit(module, train, valid))
    use("validate", lambda: one.validate(module, valid, verbose=False))
    use("test", lambda: one.test(module, valid, verbose=False))
    use("predict", lambda: one.predict(module, valid))
    for failing in range(world):
        use(f"exception on {failing}", lambda at=failing: trainer(Fails(at)).fit(Whole(), train), "the user's own")
    use("exception in a step", lambda: trainer().fit(FailsInStep(), train), "the user's step")
    finder = LearningRateFinder(num_training_steps=5, update_attr=False)
    use("finder that fails", lambda: trainer(finder).fit(FailsInStep(), train), "the user's step")
    use("fit again", lambda: trainer().fit(Whole(), train, valid))
    return seen


def test_nothing_outlives_what_it_was_for() -> None:
    for seen in run_ranks(2, uses, timeout_s=90.0):
        assert len(seen) == 9
        for name, before, after in seen:
            assert after == before, name
