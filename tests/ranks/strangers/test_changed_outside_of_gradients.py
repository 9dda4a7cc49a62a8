"""The model's parameters and buffers are written by other code than an optimizer's step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelPruning
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, normalize
from torch.utils.data import DataLoader, DistributedSampler

from tests.ranks.kit import FEATURES, Toy, regression
from tests.ranks.stale.fits import Late
from tests.ranks.strangers.kit import UNEVEN, ends, everyone, refusal, trainer

pytestmark = pytest.mark.ranks

Facts = dict[str, Tensor]
BSP = {"stale": {"policy": "bsp"}, "balanced": UNEVEN}


class Net(Toy):
    """Trained by SGD: one rank's numbers differ from one process's by rounding only."""

    def __init__(self, *args: Any) -> None:
        super().__init__()
        self.validates = False

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("valid", self.loss(batch), sync_dist=True)

    @torch.no_grad()
    def clamp(self) -> None:
        for p in self.net.parameters():
            p.clamp_(-0.2, 0.2)


def fit(
    module: Toy, rank: int, world: int, engine: str, *, samples: int = 16, epochs: int = 3, options: Any = None,
    **kwargs: Any,
) -> Facts:  # fmt: skip
    """Trains with a global batch of 16; returns all values there are at the end, and the validated loss."""
    size, data = 16 // world, regression(samples)
    order = DistributedSampler(data, num_replicas=1, rank=0, seed=0) if world == 1 else None  # that of DDP
    train = DataLoader(data, batch_size=size, sampler=order)
    valid = DataLoader(regression(16), batch_size=size) if getattr(module, "validates", False) else None
    one = trainer(rank, world, engine, options or {"balanced": UNEVEN}, max_epochs=epochs, **kwargs)
    one.fit(module, train, valid)
    facts = {name: value.detach().clone() for name, value in module.state_dict().items()}
    return facts if valid is None else {**facts, "validated": one.callback_metrics["valid"].clone()}


def same(ranks: list[Facts], oracle: Facts) -> None:
    for facts in ranks:
        assert facts.keys() == oracle.keys()
        for name, value in oracle.items():
            torch.testing.assert_close(facts[name], value, rtol=1e-9, atol=1e-9, msg=name)


# ---- where all ranks meet -----------------------------------------------------------------------------------------


class RolledBack(Net):
    """The weights of an earlier epoch are loaded again (PL#2382); ``where`` is the hook."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.validates = where, True
        object.__setattr__(self, "first", copy.deepcopy(self.net.state_dict()))

    def now(self, where: str) -> None:
        if self.where == where and self.trainer.current_epoch == 1:
            self.net.load_state_dict(self.first)

    def on_train_start(self) -> None:
        if self.where == "on_train_start":
            with torch.no_grad():
                self.net[0].weight.mul_(0.5)

    def on_train_epoch_start(self) -> None:
        self.now("on_train_epoch_start")

    def on_train_epoch_end(self) -> None:
        self.now("on_train_epoch_end")

    def on_validation_end(self) -> None:
        self.now("on_validation_end")


def rolls_back(rank: int, world: int, engine: str, where: str) -> Facts:
    """PL#2382."""
    return fit(RolledBack(where), rank, world, engine)


WHERE = ["on_train_start", "on_train_epoch_start", "on_train_epoch_end", "on_validation_end"]


@pytest.mark.stock_ddp("weights_set_epoch", "balanced", "stale")
@pytest.mark.parametrize(
    ("engine", "where"), [*(("stale", where) for where in WHERE), ("balanced", "on_train_epoch_end")]
)
def test_weights_that_all_ranks_set_between_two_epochs_are_trained_on(engine: str, where: str) -> None:
    same(ends(rolls_back, engine, where), rolls_back(0, 1, "single", where))


def prunes(rank: int, world: int, engine: str) -> Facts:
    """PL#7505: masks come as new buffers, and a parameter gets another name."""
    pruning = ModelPruning(
        "l1_unstructured", amount=0.4, apply_pruning=lambda epoch: epoch in (0, 1), use_lottery_ticket_hypothesis=False
    )
    return fit(Net(), rank, world, engine, callbacks=[pruning])


@pytest.mark.stock_ddp("ModelPruning", "balanced", "stale")
@pytest.mark.parametrize("engine", ["balanced", "stale"])
def test_pruned_weights_stay_pruned_alike_on_all_ranks(engine: str) -> None:
    ranks, oracle = ends(prunes, engine), prunes(0, 1, "single")
    same(ranks, oracle)
    assert int((oracle["net.0.weight"] == 0).sum()) > 20


class OnOneRank(Net):
    def on_train_epoch_end(self) -> None:
        if self.global_rank == 0:
            self.clamp()


def clamps_on_one_rank(rank: int, world: int, engine: str) -> Facts:
    """PL#8861 kind: code under is_global_zero. Under stock DDP the ranks' models silently part."""
    return fit(OnOneRank(), rank, world, engine)


def test_weights_that_one_rank_sets_are_refused() -> None:
    said = refusal(clamps_on_one_rank, "stale")
    assert "net.0.bias was changed" in said and "differently on ranks 0 and 1" in said


class Recalibrated(Net):
    """Statistics of BatchNorm are made anew at the end of an epoch, from one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES).double()

    def loss(self, batch: Any) -> Tensor:
        return mse_loss(self.net(self.norm.eval()(batch[0])), batch[1])

    def on_train_epoch_end(self) -> None:
        self.norm.reset_running_stats()
        self.norm.train()(regression(16).tensors[0])


def recalibrates(rank: int, world: int, engine: str) -> Facts:
    """pytorch's update_bn, in a hook."""
    return fit(Recalibrated(), rank, world, engine)


def test_statistics_that_are_made_anew_between_epochs_stay() -> None:
    same(ends(recalibrates, "stale"), recalibrates(0, 1, "single"))


class Swapped(Callback):
    """Averages take the weights' place while validation runs, also in mid-epoch."""

    @torch.no_grad()
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.kept = copy.deepcopy(pl_module.net.state_dict())
        for p in pl_module.net.parameters():
            p.mul_(0.5)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.net.load_state_dict(self.kept)


class Validated(Net):
    def __init__(self) -> None:
        super().__init__()
        self.validates = True


def swaps(rank: int, world: int, engine: str) -> Facts:
    """Callbacks of moving averages (PL#10914)."""
    return fit(
        Validated(), rank, world, engine, samples=64, epochs=2, val_check_interval=2, callbacks=[Swapped()], options=BSP
    )


def test_weights_that_are_swapped_for_validation_and_back_are_no_change() -> None:
    same(ends(swaps, "stale"), swaps(0, 1, "single"))


class InMidEpoch(Validated):
    def on_validation_end(self) -> None:
        self.clamp()


def clamps_in_mid_epoch(rank: int, world: int, engine: str) -> Facts:
    """PL#2382, with val_check_interval."""
    return fit(InMidEpoch(), rank, world, engine, samples=64, epochs=1, val_check_interval=2)


def test_weights_that_are_set_in_a_validation_in_mid_epoch_are_refused() -> None:
    said = refusal(clamps_in_mid_epoch, "stale")
    assert "net.0.weight and " in said and "e.g. in a hook of a validation" in said


# ---- within a batch, or between two -------------------------------------------------------------------------------


class Clamped(Net):
    """Weights stay in bounds, as in the first WGAN (WassersteinGAN#32); ``how`` and where."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.automatic_optimization = how != "manual"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.how == "forward":
            self.clamp()
        loss = self.loss(batch)
        if self.how == "manual":
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.clamp()
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        if self.how == "hook":
            self.clamp()
        elif self.how == "data":
            for p in self.net.parameters():
                p.data.clamp_(-0.2, 0.2)
        elif self.how == "assigned":
            self.net[0].weight.data = self.net[0].weight.data.clamp(-0.2, 0.2)
        elif self.how == "another":
            self.net[0].weight = nn.Parameter(self.net[0].weight.detach().clamp(-0.2, 0.2))

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        if self.how == "step":
            self.clamp()


def clamps(rank: int, world: int, engine: str, how: str) -> Facts:
    """WassersteinGAN#32, PL#2382."""
    return fit(Clamped(how), rank, world, engine, samples=64, epochs=1)


@pytest.mark.stock_ddp("weights_set_batch", "balanced")
@pytest.mark.parametrize("how", ["hook", "step"])
def test_weights_that_are_set_in_a_batch_stay_set(how: str) -> None:
    same(ends(clamps, "balanced", how), clamps(0, 1, "single", how))


@pytest.mark.stock_ddp("weights_set_batch", "stale", refused="the server has them")
@pytest.mark.parametrize("how", ["manual", "forward", "hook", "data", "assigned", "another", "step"])
@pytest.mark.short("manual", "forward", "hook", "assigned", "another")
def test_weights_that_are_set_in_a_batch_are_refused(how: str) -> None:
    said = refusal(clamps, "stale", how)
    assert "net.0.weight" in said and "other than by an optimizer" in said and "hetero_balanced" in said
    within = "in training_step" if how in ("manual", "forward") else "behind an optimizer's step"
    assert within in said


class PaddingRow(Net):
    """Few numbers among many, from the second batch on."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4000, FEATURES, max_norm=0.01).double()

    def loss(self, batch: Any) -> Tensor:
        return mse_loss(self.net(batch[0] + self.table(torch.arange(7, 7 + len(batch[0])))), batch[1])


def renormalises(rank: int, world: int, engine: str) -> Facts:
    """pytorch's nn.Embedding(max_norm=...): the forward pass writes the rows that it reads."""
    return fit(PaddingRow(), rank, world, engine, samples=64)


@pytest.mark.stock_ddp("weights_set_batch", "stale", refused="the server has them")
def test_an_embedding_that_renormalises_itself_is_refused() -> None:
    assert "table.weight was changed" in refusal(renormalises, "stale")


class PutBack(Net):
    """The weights are others while a loss is computed (binary weights, adversarial ones), and put back."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        kept = copy.deepcopy(self.net.state_dict())
        with torch.no_grad():
            for p in self.net.parameters():
                p.add_(0.01)
        penalty = self.loss(batch).detach()
        self.net.load_state_dict(kept)
        return self.loss(batch) * (1 + penalty)


def puts_back(rank: int, world: int, engine: str) -> Facts:
    """XNOR-Net-PyTorch's binarization() and restore()."""
    return fit(PutBack(), rank, world, engine, samples=64, epochs=1)


def test_weights_that_are_put_back_within_the_step_are_no_change() -> None:
    a, b = ends(puts_back, "stale")
    same([a], b)


# ---- parameters that no optimizer has ------------------------------------------------------------------------------


class Teacher(Net):
    """Follows the student by a moving average (fairscale#1061, DeepSpeed#2056)."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        return mse_loss(self.net(batch[0]), batch[1] + self.teacher(batch[0]))

    @torch.no_grad()
    def follow(self) -> None:
        for old, new in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            old.mul_(0.8).add_(new, alpha=0.2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.where == "step":
            self.follow()
        return self.loss(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.where == "hook" and batch is not None:
            self.follow()


def follows(rank: int, world: int, engine: str, where: str, late: int) -> Facts:
    """fairscale#1061, DeepSpeed#2056, pytorch#117742."""
    callbacks, options = ([Late(1, "middle", late)], None) if late else ([], BSP)
    return fit(
        Teacher(where), rank, world, engine, samples=128, epochs=1, callbacks=callbacks, options=options
    )  # fmt: skip


@pytest.mark.stock_ddp("moving_average", "balanced")
@pytest.mark.stock_ddp(
    "moving_average", "stale", differs="refused where a rank has missed an update, which `policy='bsp'` prevents"
)  # fmt: skip
@pytest.mark.parametrize(("engine", "where"), [("stale", "hook"), ("stale", "step"), ("balanced", "step")])
def test_a_teacher_is_one_processs_while_all_ranks_see_every_update(engine: str, where: str) -> None:
    same(ends(follows, engine, where, 0), follows(0, 1, "single", where, 0))


@pytest.mark.stock_ddp(
    "moving_average", "stale", differs="refused where a rank has missed an update, which `policy='bsp'` prevents"
)  # fmt: skip
@pytest.mark.parametrize("where", ["hook", "step"])
def test_a_teacher_that_missed_an_update_on_a_rank_is_refused(where: str) -> None:
    said = refusal(follows, "stale", where, 2)
    assert "teacher.0." in said or "in a top-up chunk" in said
    assert "no optimizer has" in said or "has no optimizer" in said
    assert "policy='bsp'" in said and "strategy='hetero_balanced'" in said


# ---- buffers --------------------------------------------------------------------------------------------------------


class Counting(Net):
    """Counters on the module decide on a warm-up; one is written in place, one is another tensor each time."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("share", torch.zeros(1))
        self.servers = set[int]()

    def on_train_batch_start(self, *_: Any) -> None:
        self.servers.add(self.trainer.strategy._run.session.address.port)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls += 1
        self.share = self.share + 0.125
        return self.loss(batch) * (1 + float(self.share))


def counts(rank: int, world: int, engine: str) -> Facts:
    """Warm-ups of KL weights and Gumbel temperatures (PL forum)."""
    module = Counting()
    facts = fit(module, rank, world, engine, samples=128, epochs=2, callbacks=[Late(1, "middle", 1)])
    assert len(module.servers) == 1  # what a push has brought is no change
    return facts


@pytest.mark.stock_ddp("kept_by_steps", "stale")
def test_counters_in_buffers_count_updates() -> None:
    for facts in ends(counts, "stale"):
        assert int(facts["calls"]) == 16 and float(facts["share"]) == 2.0


class Queue(Net):
    """A queue of keys with a pointer (moco#41, BLIP#101)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", normalize(torch.randn(32, 4, dtype=torch.float64), dim=1))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))
        self.head = nn.Linear(FEATURES, 4).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        keys = normalize(self.head(batch[0]), dim=1)
        loss = cross_entropy(keys @ self.queue.clone().T, torch.zeros(len(keys), dtype=torch.long))
        with torch.no_grad():
            rows = (torch.arange(len(keys)) + int(self.pointer)) % 32
            self.queue[rows] = keys
            self.pointer.fill_((int(self.pointer) + len(keys)) % 32)
        return loss


def enqueues(rank: int, world: int, engine: str) -> tuple[Facts, Any]:
    """moco#41, BLIP#101."""
    facts = fit(Queue(), rank, world, engine, samples=128, epochs=1, callbacks=[Late(1, "middle", 1)])
    return facts, everyone(facts["queue"])


@pytest.mark.stock_ddp("kept_by_steps", "stale")
def test_a_queue_holds_whole_keys_and_is_one_for_all_ranks() -> None:
    for facts, (mine, others) in ends(enqueues, "stale"):
        torch.testing.assert_close(facts["queue"].norm(dim=1), torch.ones(32, dtype=torch.float64))
        assert 0 <= int(facts["pointer"]) < 32
        assert torch.equal(mine, others)


class Observed(Net):
    """A range that begins at infinity (torch.ao.quantization's observers)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("least", torch.tensor(float("inf")))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.least.copy_(torch.minimum(self.least, batch[0].min()))
        return self.loss(batch)


def observes(rank: int, world: int, engine: str) -> Facts:
    """torch.ao.quantization.MinMaxObserver."""
    return fit(Observed(), rank, world, engine)


def test_a_range_that_begins_at_infinity_is_a_ranks() -> None:
    a, b = ends(observes, "stale")
    assert float(a["least"]) == float(b["least"]) and abs(float(a["least"])) < 5.0


class Shadow(Net):
    """Averages in buffers, as LitEma of latent diffusion keeps them, moved behind each step."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shadow", self.net[0].weight.detach().clone())

    def on_train_batch_end(self, *_: Any) -> None:
        self.shadow.lerp_(self.net[0].weight.detach(), 0.1)


def shadows(rank: int, world: int, engine: str) -> Facts:
    """CompVis/stable-diffusion, ldm/modules/ema.py."""
    return fit(Shadow(), rank, world, engine, samples=64)


@pytest.mark.stock_ddp("weights_set_batch", "stale", refused="the server has them")
def test_averages_in_buffers_that_a_hook_moves_are_refused() -> None:
    assert "shadow was changed" in refusal(shadows, "stale")
