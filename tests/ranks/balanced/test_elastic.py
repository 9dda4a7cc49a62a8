"""Ranks that are lost with ``min_ranks``: weights stay those of one process, each sample counts once.

A rank is lost here by ending its connections without a word. Real deaths are in `tests/e2e/test_elastic.py` and in the
matrix of faults.
"""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader, IterableDataset

from lightning_hetero import ShardedBalancedStrategy
from lightning_hetero.balanced.fit.elastic_run import SurvivingStep
from lightning_hetero.base.elastic.exchange import ElasticExchange
from lightning_hetero.transport.base import ServerLostError
from lightning_hetero.transport.groups import leave_default_group
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Toy, Weights, balanced, rank_trainer, regression, single, weights

SAMPLES, BATCH, EPOCHS = 60, 12, 2  # 10 steps
LOST_AT = 3  # the batch of the first epoch
EXACT = 1e-12


class LostError(Exception):
    """This rank is gone."""


def vanish(strategy: Any) -> None:
    """Ends all connections of this rank, as the end of its process does."""
    run = strategy._run
    roll = run.clients.roll
    if strategy.global_rank:
        roll._left.set()
        roll._line.close()
    else:  # the store goes with its process
        roll._lines.close()
        strategy.members.hosted = None
    roll._store.let_go()
    gc.collect()
    try:
        raise ConnectionError
    except ConnectionError:
        run.channel.leave()
        leave_default_group()
    raise LostError


class Loses(Callback):
    """Loses this rank at a place; counts the hooks of batches."""

    def __init__(self, place: str) -> None:
        self.place, self.started, self.ended = place, 0, 0

    def _at(self, place: str, trainer: Any) -> None:
        if self.place == place and trainer.current_epoch == 0 and trainer.fit_loop.epoch_loop.batch_idx >= LOST_AT:
            vanish(trainer.strategy)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.started += 1
        self._at("batch starts", trainer)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self._at("before backward", trainer)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self._at("exchanged", trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ended += 1
        self._at("batch ends", trainer)

    def on_validation_batch_start(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if not trainer.sanity_checking:
            self._at("validation", trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._at("epoch ends", trainer)


class Noted(Toy):
    """Notes how many samples each call of ``training_step`` has had."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append([float(batch_idx), float(len(batch[0]))])
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)


Outcome = tuple[str, Weights, dict[str, Any]]


def losing(
    rank: int, world: int, lost: dict[int, str], args: dict[str, Any], workers: int, val: bool, trainer: dict[str, Any]
) -> Outcome:
    module, callback = Noted(), Loses(lost.get(rank, ""))
    strategy, error = balanced(**{"min_ranks": 1, **args}), ""
    fit = rank_trainer(rank, world, strategy, callbacks=[callback], **{"max_epochs": EPOCHS, **trainer})
    more: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    loaders: list[Any] = [DataLoader(regression(SAMPLES), batch_size=BATCH // world, shuffle=True, **more)]
    if val:
        loaders.append(DataLoader(regression(20, seed=5), batch_size=2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            fit.fit(module, *loaders)
        except LostError:
            error = "lost"
        except (RuntimeError, ServerLostError) as failure:
            error = f"{type(failure).__name__}: {failure}"
    said = [str(one.message) for one in caught if "is left out" in str(one.message)]
    told = {"seen": module.seen, "hooks": (callback.started, callback.ended), "said": said, "shares": strategy.shares}
    return error, weights(module), told


def check(
    world: int, lost: dict[int, str], args: dict[str, Any] | None = None, *, workers: int = 0, val: bool = False,
    job: Any = None, **trainer: Any,
) -> list[Outcome]:
    """Those that are left have the weights of one process, and no hook was called twice."""
    outcomes = run_ranks(world, job or losing, lost, args or {}, workers, val, trainer)
    oracle = Noted()
    single(oracle, regression(SAMPLES), BATCH, **{"max_epochs": EPOCHS, **trainer})
    left = [rank for rank in range(world) if rank not in lost]
    for rank in left:
        error, trained, told = outcomes[rank]
        assert error == "", error
        assert trained.distance(weights(oracle)) <= EXACT
        assert told["hooks"] == (EPOCHS * SAMPLES // BATCH,) * 2
        assert sum(told["shares"]) == BATCH and not any(told["shares"][gone] for gone in lost)
    for rank in lost:
        assert outcomes[rank][0] == "lost"
    return outcomes


@pytest.mark.parametrize("place", ["batch starts", "before backward", "exchanged", "batch ends", "epoch ends"])
@pytest.mark.short("before backward", "exchanged")
def test_weights_are_those_of_one_process(place: str) -> None:
    outcomes = check(3, {1: place})
    said = [text for _, _, told in outcomes for text in told["said"]]
    assert len(said) == 1 and said[0].startswith("rank 1 is left out (")


@pytest.mark.parametrize(
    ("lost", "args", "options"),
    [
        ({1: "before backward", 3: "exchanged"}, {}, {}),
        ({1: "before backward"}, {}, {"workers": 2}),
        ({2: "before backward"}, {}, {"accumulate_grad_batches": 3}),
        ({1: "before backward", 2: "batch ends", 3: "before backward"}, {"loss_reduction": "mean"}, {"workers": 1}),
        ({3: "validation"}, {}, {"val": True, "val_check_interval": 4}),
    ],
    ids=["two at once", "workers have fetched ahead", "accumulation", "all but rank 0", "validation"],
)
@pytest.mark.short("two at once", "accumulation")
def test_weights_are_those_of_one_process_whatever_else_goes_on(
    lost: dict[int, str], args: dict[str, Any], options: dict[str, Any]
) -> None:
    check(4, lost, args, **options)


def one_behind(
    rank: int, world: int, lost: dict[int, str], args: dict[str, Any], workers: int, val: bool, trainer: dict[str, Any]
) -> Outcome:
    """The exchange of batch `LOST_AT` fails on the last rank when all others have the sum."""
    summed, calls = ElasticExchange._summed, 0

    def failing(self: ElasticExchange) -> Any:
        nonlocal calls
        sums, calls = summed(self), calls + 1
        if calls == LOST_AT + 1:
            raise RuntimeError("Connection closed by peer")
        return sums

    if rank == world - 1:
        ElasticExchange._summed = failing  # type: ignore[method-assign]
    try:
        return losing(rank, world, lost, args, workers, val, trainer)
    finally:
        ElasticExchange._summed = summed  # type: ignore[method-assign]


@pytest.mark.parametrize("lost", [{}, {1: "exchanged"}, {1: "batch ends"}], ids=["nobody", "another", "the next batch"])
@pytest.mark.short("another")
def test_who_has_the_sum_gives_it_to_who_has_not(lost: dict[int, str]) -> None:
    """Nothing is trained twice, also if a rank is lost meanwhile: what it had added counts."""
    check(3, lost, job=one_behind)


def not_dealt_out(
    rank: int, world: int, lost: dict[int, str], args: dict[str, Any], workers: int, val: bool, trainer: dict[str, Any]
) -> Outcome:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SurvivingStep, "_take_over", lambda *_: None)
        return losing(rank, world, lost, args, workers, val, trainer)


def test_samples_that_nobody_trains_on_are_an_error() -> None:
    outcomes = run_ranks(3, not_dealt_out, {1: "before backward"}, {}, 0, False, {})
    assert all("of 12 samples at the gradients of epoch 0, batch 3" in outcomes[rank][0] for rank in (0, 2))


@pytest.mark.parametrize(
    ("lost", "least", "text"),
    [
        (2, 3, "RemoteFailureError: 2 ranks are left, and min_ranks=3 must be (rank 2: its connection has ended"),
        (0, 1, "ServerLostError: rank 0, without which the others cannot go on, has died"),
    ],
)
def test_the_run_ends_with_the_cause_on_all_ranks(lost: int, least: int, text: str) -> None:
    outcomes = run_ranks(3, losing, {lost: "before backward"}, {"min_ranks": least}, 0, False, {})
    assert [text in error for error, *_ in outcomes] == [rank != lost for rank in range(3)]
    assert outcomes[lost][0] == "lost"


def test_a_rank_that_fails_ends_all_with_its_error() -> None:
    outcomes = run_ranks(3, failing_user, 1)
    assert outcomes[1] == "the cause" and all("rank 1 failed: KeyError: 'the cause'" in outcomes[r] for r in (0, 2))


def failing_user(rank: int, world: int, who: int) -> str:
    class Fails(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if self.global_rank == who and batch_idx == LOST_AT:
                raise KeyError("the cause")
            return super().training_step(batch, batch_idx)

    try:
        loader = DataLoader(regression(SAMPLES), batch_size=BATCH // world)
        rank_trainer(rank, world, balanced(min_ranks=1), max_epochs=1).fit(Fails(), loader)
    except KeyError as error:
        return str(error.args[0])
    except RuntimeError as error:
        return str(error)
    return "trained"


class Hand(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(regression(SAMPLES))


class Synchronised(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.SyncBatchNorm(4)


class Gathers(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.all_gather(batch[0].sum())
        return super().training_step(batch, batch_idx)


def refused(rank: int, world: int, make: Any, args: dict[str, Any], loaders: str) -> str:
    module = make()
    one = DataLoader(Stream() if loaders == "stream" else regression(SAMPLES), batch_size=4)
    try:
        strategy = balanced(**{"min_ranks": 1, **args})
        rank_trainer(rank, world, strategy, max_epochs=1).fit(module, {"a": one, "b": one} if loaders == "two" else one)
    except (ValueError, TypeError, RuntimeError) as error:
        return str(error)
    return f"trained {len(module.seen)}"


@pytest.mark.parametrize(
    ("make", "args", "loaders", "text"),
    [
        (Hand, {}, "one", "min_ranks needs automatic optimization"),
        (Toy, {"batch_weight": len}, "one", "min_ranks with batch_weight"),
        (Toy, {"stream": "infinite"}, "stream", "samples have no index"),
        (Toy, {}, "two", "there are several"),
        (Toy, {"own_data": True}, "one", "min_ranks needs one train loader whose samples every rank can read"),
        (Toy, {"max_samples": 2}, "one", "max_samples below the global batch"),
        (Synchronised, {}, "one", "min_ranks with SyncBatchNorm"),
        (Toy, {"ddp_comm_hook": allreduce_hook}, "one", "communication hooks have no place"),
        (Gathers, {}, "one", "inside training_step"),
        (Toy, {"min_ranks": 3}, "one", "min_ranks=3 must be at most the number of ranks, 2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_could_not_be_kept_exact_is_refused(make: Any, args: dict[str, Any], loaders: str, text: str) -> None:
    assert all(text in said for said in run_ranks(2, refused, make, args, loaders))


def test_sharded_models_are_refused() -> None:
    with pytest.raises(TypeError, match="min_ranks with hetero_sharded: each rank has a part of the model"):
        ShardedBalancedStrategy(min_ranks=2)  # type: ignore[call-arg]
