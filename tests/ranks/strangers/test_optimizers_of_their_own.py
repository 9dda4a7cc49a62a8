"""What an optimizer does besides ``step()`` and ``zero_grad()``, and who sees its state, under the stale engine.

There the optimizer is in the parameter server: its own methods are called there, or refused.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

from tests.ranks.kit import Toy, regression
from tests.ranks.strangers import kit

pytestmark = pytest.mark.ranks

SAMPLES = 16


def data(batch: int = SAMPLES // 2, samples: int = SAMPLES) -> DataLoader:
    return DataLoader(regression(samples), batch_size=batch)


class Sharp(SGD):
    """Sharpness-aware minimisation after davda54/sam: the step climbs, computes again, and descends (PL#17650)."""

    def _all(self) -> list[Any]:
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        self.moves = {p: 0.1 * p.grad.sign() for p in self._all()}
        for p, move in self.moves.items():
            p.add_(move)
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for p, move in self.moves.items():
            p.sub_(move)
        SGD.step(self)

    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "no closure"
        with torch.enable_grad():
            loss = closure()
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()
        return loss


class Twice(Sharp):
    """Needs no closure, and calls the one that it gets a second time."""

    def step(self, closure: Any = None) -> Any:
        return SGD.step(self) if closure is None else super().step(closure)


class Plain(Sharp):
    """Has the two steps, and one that is plain."""

    def step(self, closure: Any = None) -> Any:
        return SGD.step(self, closure)


class Optimized(Toy):
    """`cls` over the net, after `change` has seen it; steps by the closure, or by hand as `by_hand` does."""

    cls: Any = SGD
    rate = 0.1

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = type(self).by_hand is Optimized.by_hand

    def by_hand(self, batch: Any) -> Any: ...

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) if self.automatic_optimization else self.by_hand(batch)

    def configure_optimizers(self) -> Any:
        self.mine = self.cls(self.parameters(), lr=self.rate)
        self.change(self.mine)
        return self.mine

    def change(self, optimizer: Any) -> None: ...


class ByClosure(Optimized):
    cls = Sharp


class ByClosureTwice(Optimized):
    cls = Twice


class BySteps(Optimized):
    """davda54/sam#31 and many notebooks: two backward passes, the optimizer's own two steps."""

    cls = Plain

    def by_hand(self, batch: Any) -> None:
        optimizer: Any = self.optimizers()
        for step in (optimizer.first_step, optimizer.second_step):
            self.manual_backward(self.loss(batch))
            step()


class NeverSteps(Optimized):
    """Updates by hand what the gradients say; PL's own docs step in manual optimization."""

    def by_hand(self, batch: Any) -> None:
        self.manual_backward(self.loss(batch))


class ReadsState(Optimized):
    """Logs the norm of Adam's first moments, as PL#1951's users ask how to."""

    cls = torch.optim.Adam

    def on_train_batch_end(self, *args: Any) -> None:
        for p in self.parameters():
            self.trainer.optimizers[0].state[p]["exp_avg"].norm()


class SavesState(Optimized):
    """A file of its own beside Lightning's checkpoints (PL#2798 kind)."""

    def on_train_epoch_end(self) -> None:
        self.optimizers().state_dict()  # type: ignore[union-attr]


class ResetsState(Optimized):
    """Momentum forgotten in mid-training, as at the restarts of warm-restart recipes (pytorch#1489 kind)."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch:
            self.trainer.optimizers[0].state = defaultdict(dict)


class LoadsState(Optimized):
    """An optimizer rolled back to an earlier state (PL#2382 kind)."""

    def change(self, optimizer: Any) -> None:
        self.earlier = copy.deepcopy(optimizer.state_dict())

    def on_train_epoch_start(self) -> None:
        if self.current_epoch:
            self.mine.load_state_dict(self.earlier)


class Hooked(Optimized):
    """An average of the weights kept by a hook on the step, as diffusers' users do (pytorch#89176 kind)."""

    def change(self, optimizer: Any) -> None:
        optimizer.register_step_post_hook(lambda *_: self.seen.append([1.0]))


class ForgetsItsWeights(SGD):
    """Decays weights when gradients are zeroed."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(0.99)


class Decays(Optimized):
    cls = ForgetsItsWeights


class SlowAndFast(SGD):
    """Lookahead as in lonePatient/lookahead_pytorch: its state dict has parts of its own."""

    def state_dict(self) -> Any:
        return {**super().state_dict(), "slow_state": {}}


class Looks(Optimized):
    cls = SlowAndFast


class Watches(Optimized):
    """ReduceLROnPlateau per step (Lightning's docs name interval='step')."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        plateau = {"scheduler": ReduceLROnPlateau(optimizer), "monitor": "loss", "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": plateau}


class WatchesByHand(Watches):
    """The same, stepped by hand."""

    def by_hand(self, batch: Any) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        self.lr_schedulers().step(loss)  # type: ignore[union-attr, call-arg]


class Sparse(Optimized):
    def configure_optimizers(self) -> Any:
        return torch.optim.SparseAdam(self.parameters())


REFUSED: dict[type[Optimized], str] = {
    Sparse: "SparseAdam needs sparse gradients",
    ByClosure: "Sharp.step() needs a closure",
    ByClosureTwice: "Twice.step(closure) computes the loss 2 times per step",
    BySteps: "Plain.first_step() inside a batch",
    NeverSteps: "no optimizer of configure_optimizers has made a step()",
    ReadsState: "the state of Adam is used on a rank",
    SavesState: "the state of SGD is used on a rank",
    ResetsState: "SGD was given another state on a rank",
    LoadsState: "SGD was given another state on a rank",
    Hooked: "register_step_post_hook of SGD",
    Decays: "ForgetsItsWeights.zero_grad changes parameters",
    Looks: "SlowAndFast.state_dict() has 'slow_state'",
    Watches: "ReduceLROnPlateau with interval='step'",
    WatchesByHand: "ReduceLROnPlateau.step inside of training_step",
}


def refused(rank: int, world: int, engine: str) -> dict[str, str]:
    said: dict[str, str] = {}
    for cls in REFUSED:
        module = cls()
        try:
            kit.trainer(rank, world, engine, max_epochs=2).fit(module, data())
        except (TypeError, RuntimeError) as error:
            said[cls.__name__] = str(error)
    return said


@pytest.mark.stock_ddp("closures", "stale", refused="the server makes the step, and does not have the loss")
@pytest.mark.stock_ddp("optimizer_state", "stale", refused="the server has it")
@pytest.mark.stock_ddp("plateau_step", "stale", refused="the value is the rank's own")
def test_what_a_rank_cannot_do_with_an_optimizer_is_refused() -> None:
    for said in kit.ends(refused, "stale"):
        for cls, words in REFUSED.items():
            assert words in said.get(cls.__name__, "not refused"), cls.__name__
            assert "hetero_balanced" in said[cls.__name__]


def right(rank: int, world: int, engine: str) -> list[float]:
    """Closures called twice and own steps by hand, against one process."""
    off = []
    for cls in (ByClosure, BySteps):
        module, oracle = cls(), cls()
        kit.trainer(rank, world, engine, {"balanced": kit.UNEVEN}, max_epochs=2).fit(module, data())
        kit.trainer(rank, world, "single", max_epochs=2).fit(oracle, data(SAMPLES))
        off.append(kit.difference(module, oracle))
    return off


@pytest.mark.stock_ddp("closures", "balanced")
def test_two_passes_per_step() -> None:
    for off in kit.ends(right, "balanced"):
        assert max(off) < 1e-9


# ---- two sets of weights ------------------------------------------------------------------------------------------


class TwoSets(SGD):
    """Keeps an average in its state and in its groups how often it has stepped, as schedule-free ones do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            group["made"] = group.get("made", 0) + 1
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", p.clone())
                mean.add_(p - mean, alpha=1 / group["made"])
        return loss

    @torch.no_grad()
    def eval(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                kept = p.clone()
                p.copy_(self.state[p]["mean"])
                self.state[p]["mean"].copy_(kept)

    def train(self) -> None:
        self.eval()


class Averaged(Optimized):
    """Validates what the optimizer averages (PL#20441, facebookresearch/schedule_free)."""

    cls = TwoSets

    def on_validation_epoch_start(self) -> None:
        self.optimizers().eval()  # type: ignore[union-attr]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.mine.train()


def averaged(rank: int, world: int, engine: str) -> tuple[float, float, int]:
    module, oracle = Averaged(), Averaged()
    trainer = kit.trainer(rank, world, engine, {"balanced": kit.UNEVEN}, max_epochs=2)
    trainer.fit(module, data(), data())
    trainer.save_checkpoint("last.ckpt")
    one = kit.trainer(rank, world, "single", max_epochs=2)
    one.fit(oracle, data(SAMPLES), data(SAMPLES))
    off = float(trainer.callback_metrics["val"] - one.callback_metrics["val"])
    groups = torch.load("last.ckpt", weights_only=False)["optimizer_states"][0]["param_groups"]
    return kit.difference(module, oracle), abs(off), groups[0]["made"]


@pytest.mark.stock_ddp("schedule_free", "balanced", "stale")
@pytest.mark.parametrize("engine", ["balanced", "stale"])
def test_an_optimizer_with_two_sets_of_weights(engine: str) -> None:
    for weights, value, made in kit.ends(averaged, engine):
        assert weights < 1e-9 and value < 1e-9 and made == 2


# ---- steps of a batch that build on each other --------------------------------------------------------------------


class Chunks(Optimized):
    """Truncated backpropagation through time by hand (PL#17848, #19985): each chunk steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.GRU(2, 3, batch_first=True).double()

    def by_hand(self, batch: Any) -> None:
        optimizer: Any = self.optimizers()
        state = None
        for part in batch[0].split(3, dim=1):
            optimizer.zero_grad()
            out, state = self.net(part, state)
            state = state.detach()
            self.manual_backward((out**2).mean())
            optimizer.step()


class Rivals(Optimized):
    """The critic steps twice, then the generator (PL#20866, #20328)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.made, self.judge = nn.Linear(2, 2).double(), nn.Linear(2, 1).double()

    def by_hand(self, batch: Any) -> None:
        x = batch[0][:, 0]
        maker, critic = self.optimizers()  # type: ignore[misc]
        for _ in range(2):
            self.toggle_optimizer(critic)
            critic.zero_grad()
            self.manual_backward((self.judge(self.made(x).detach()).tanh() - self.judge(x).tanh()).mean())
            critic.step()
            self.untoggle_optimizer(critic)
        self.toggle_optimizer(maker)
        maker.zero_grad()
        self.manual_backward(-self.judge(self.made(x)).tanh().mean())
        maker.step()
        self.untoggle_optimizer(maker)

    def configure_optimizers(self) -> Any:
        return [torch.optim.RMSprop(part.parameters(), lr=0.05) for part in (self.made, self.judge)]


def in_turn(rank: int, world: int, engine: str) -> list[float]:
    x = torch.randn(SAMPLES, 9, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    off = []
    for cls in (Chunks, Rivals):
        module, oracle = cls(), cls()
        for fitted, engine_, batch in ((module, engine, SAMPLES // 2), (oracle, "single", SAMPLES)):
            fits = kit.trainer(rank, world, engine_, max_epochs=2)
            fits.fit(fitted, DataLoader(TensorDataset(x), batch_size=batch))
        off.append(kit.difference(module, oracle))
    return off


@pytest.mark.stock_ddp("manual", "stale")
def test_steps_that_build_on_each_other() -> None:
    for off in kit.ends(in_turn, "stale"):
        assert max(off) < 1e-9
