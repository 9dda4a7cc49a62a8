"""A module that hooks change after its layers were divided: divided anew, or refused before it is trained wrongly."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.ranks.harness import run_ranks
from tests.ranks.kit import Weights, weights
from tests.ranks.strangers import kit

EXACT, EPOCHS = 1e-12, 3
ENOUGH = {"on_fit_start": 2, "on_train_end": 1}  # epochs for what is changed there
seed = torch.default_generator.manual_seed  # `torch.manual_seed` takes milliseconds for other backends


class Net(LightningModule):
    """Four layers and a head; ``extra`` and ``scale`` are made by hooks, if at all."""

    extra: Any
    scale: Any

    def __init__(self) -> None:
        super().__init__()
        seed(3)
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()).double()
        self.head = nn.Linear(4, 1).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self.head(self.body(x))
        for name in ("extra", "scale"):
            if hasattr(self, name):
                out = self.extra(out) if name == "extra" else out * self.scale
        return (out - y).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.training_step(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Spy(nn.Module):
    """Stands in the place of a layer and counts its calls."""

    calls = 0
    inner: Any

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        Spy.calls += 1
        return self.inner(x)


def linear(before: int, behind: int) -> nn.Linear:
    seed(7)
    return nn.Linear(before, behind).double()


def adds(net: Net, trainer: Trainer) -> None:
    net.extra = linear(1, 1)


def adds_to_optimizer(net: Net, trainer: Trainer) -> None:
    net.extra = linear(1, 1)
    trainer.optimizers[0].add_param_group({"params": net.extra.parameters()})


def replaces(net: Net, trainer: Trainer) -> None:
    net.body[2] = linear(4, 4)


def replaces_in_optimizer(net: Net, trainer: Trainer) -> None:
    replaces(net, trainer)
    trainer.optimizers[0].add_param_group({"params": list(net.body[2].parameters())})


def makes_optimizer(net: Net, trainer: Trainer) -> None:
    replaces(net, trainer)
    trainer.optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)]


def spies(net: Net, trainer: Trainer) -> None:
    net.body[2] = Spy(net.body[2])


def another_function(net: Net, trainer: Trainer) -> None:
    net.body[3] = nn.GELU()


def another_weight(net: Net, trainer: Trainer) -> None:
    net.head.weight = nn.Parameter(torch.full((1, 4), 0.3).double())


def weight_of_weight(net: Net, trainer: Trainer) -> None:
    layer: Any = net.body[2]
    layer.weight = nn.Parameter(layer.weight.detach() * 2)


def registers(net: Net, trainer: Trainer) -> None:
    net.register_buffer("scale", torch.tensor(1.5).double())
    net.body[2].register_buffer("mask", torch.ones(4).double())


def removes(net: Net, trainer: Trainer) -> None:
    net.head.bias = None  # type: ignore[assignment]


TAKEN = (
    adds, adds_to_optimizer, replaces, replaces_in_optimizer, makes_optimizer, spies, another_function, another_weight,
    weight_of_weight, registers, removes,
)  # fmt: skip
FEW = (adds_to_optimizer, spies, another_function, registers)
# Outside and in a layer, parameters and buffers, more and fewer of them, the optimizer's groups and another optimizer.
IN_GROUPS = (adds_to_optimizer, makes_optimizer, registers, removes)
ALSO_IN_GROUPS = tuple(change for change in TAKEN if change not in IN_GROUPS)


class At(Callback):
    """Changes the module in one hook, in epoch 1 if the hook comes more than once."""

    def __init__(self, change: Callable[[Net, Trainer], None], hook: str) -> None:
        self.done = False

        def now(trainer: Trainer, pl_module: Net, *_: Any, **__: Any) -> None:
            once = hook in ("on_fit_start", "on_train_start", "on_train_end")
            if not self.done and (once or trainer.current_epoch == 1):
                self.done = True
                change(pl_module, trainer)

        setattr(self, hook, now)


def data(rows: int) -> DataLoader:
    """One batch of all samples per epoch, so that their order does not matter."""
    seed(4)
    x = torch.randn(16, 3).double()
    return DataLoader(TensorDataset(x, torch.linspace(0, 2, 16).double().unsqueeze(1)), batch_size=rows)


def fitted(rank: int, world: int, engine: str, *callbacks: Callback, plan: Any = None, **options: Any) -> Net:
    module = Net()
    given = {"pipeline": {"backbone": "body", "plan": plan or kit.two_stages(0, 2, 4)}}
    validated = {"num_sanity_val_steps": 1, "check_val_every_n_epoch": 2}  # before all, and behind a change of epoch 1
    options = {"max_epochs": EPOCHS, "enable_checkpointing": engine != "single", **validated, **options}
    trainer = kit.trainer(rank, world, engine, given, callbacks=[*callbacks], **options)
    rows = 16 if engine == "single" else 16 // world
    trainer.fit(module, data(rows), data(rows))
    return module


Change = Callable[[Net, Trainer], None]
Ended = tuple[Weights, Weights | None, int]  # of a rank: its weights, what was saved last, calls of the spy


@cache
def alone(change: Change, hook: str) -> Weights:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return weights(fitted(0, 1, "single", At(change, hook), max_epochs=ENOUGH.get(hook, EPOCHS)))


def taken(rank: int, world: int, changes: Sequence[Change], hook: str, plan: Any = None) -> dict[Change, Ended]:
    found = {}
    for change in changes:
        Spy.calls = 0
        saved = ModelCheckpoint(change.__name__, save_last=True, save_top_k=0, save_on_train_epoch_end=True)
        options = {"plan": plan, "max_epochs": ENOUGH.get(hook, EPOCHS)}
        ours = weights(fitted(rank, world, "pipeline", At(change, hook), saved, **options))
        torch.distributed.barrier()
        last = torch.load(f"{change.__name__}/last.ckpt", weights_only=False)["state_dict"] if rank == 0 else None
        found[change] = ours, last, Spy.calls
    return found


def check(ranks: list[dict[Change, Ended]], hook: str) -> None:
    """Each rank ended with the weights of one process, which were saved, too, unless they changed when all was over."""
    for rank, found in enumerate(ranks):
        for change, (ours, last, _) in found.items():
            one = alone(change, hook)
            assert off(ours, one) <= EXACT, (change, rank)
            assert last is None or hook == "on_train_end" or off(last, one) <= EXACT, change


def off(ours: Any, one: Weights) -> float:
    assert ours.keys() == one.keys()
    return max(float((ours[key] - value).abs().max()) for key, value in one.items())


TWO_GROUPS = {"groups": [
    {"ranks": [2, 0], "cuts": [0, 2, 4], "samples": 12, "micro_samples": 4},
    {"ranks": [1, 3], "cuts": [0, 3, 4], "samples": 4, "micro_samples": 4},
]}  # fmt: skip


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_epoch_end"])
@pytest.mark.short("on_fit_start", "on_train_epoch_start")
def test_what_hooks_change_before_training_or_between_epochs_is_trained_and_saved(hook: str) -> None:
    ranks = run_ranks(2, taken, TAKEN if hook == "on_train_epoch_start" else FEW, hook)
    check(ranks, hook)
    assert sum(found[spies][2] for found in ranks) > 0


@pytest.mark.parametrize("changes", [IN_GROUPS, ALSO_IN_GROUPS], ids=["some", "others"])
@pytest.mark.short("some")
def test_groups_train_together_what_they_are_given_late(changes: Sequence[Change]) -> None:
    hook = "on_train_epoch_start"
    check(run_ranks(4, taken, changes, hook, TWO_GROUPS, timeout_s=120.0), hook)


def test_what_is_changed_when_training_has_ended_costs_nothing() -> None:
    check(run_ranks(2, taken, FEW, "on_train_end"), "on_train_end")


def appends(net: Net, trainer: Trainer) -> None:
    net.body.append(linear(4, 4))


def strays(net: Net, trainer: Trainer) -> None:
    trainer.optimizers[0].add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def ties(net: Net, trainer: Trainer) -> None:
    net.body[2] = linear(3, 4)
    net.body[2].weight = net.body[0].weight


def on_rank_0(net: Net, trainer: Trainer) -> None:
    if trainer.global_rank == 0:
        net.extra = linear(1, 1)


class Counts(Callback):
    batches = 0

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        self.batches += 1


def refused(
    rank: int, world: int, change: Callable[[Net, Trainer], None], hook: str, *callbacks: Callback
) -> tuple[str, int]:
    counts = Counts()
    with pytest.raises(RuntimeError) as caught:
        fitted(rank, world, "pipeline", At(change, hook), counts, *callbacks)
    return str(caught.value), counts.batches


@pytest.mark.parametrize(
    ("change", "hook", "why", "batches"),
    [
        (appends, "on_fit_start", "5 layers, and the plan was made for 4", 0),
        (strays, "on_fit_start", r"shapes \[\(1,\)\] that are not the module's", 0),
        (ties, "on_train_start", "'body.0.weight' = 'body.2.weight', used by layer 0 and layer 2", 0),
        (on_rank_0, "on_train_epoch_start", r"only some ranks have \['extra.bias', 'extra.weight'\]", 1),
        (replaces, "on_train_batch_start", "between two batches.*: body.2, body.2.bias, body.2.weight", 1),
        (another_function, "on_validation_start", "around a validation: body.3", 2),
        (adds, "on_validation_end", "between two batches.*: extra.bias, extra.weight", 2),
    ],
)
def test_what_cannot_be_divided_is_refused_at_once(
    change: Callable[..., None], hook: str, why: str, batches: int
) -> None:
    for text, trained in run_ranks(2, refused, change, hook):
        assert re.search(rf"rank \d.*{why}.*on_train_epoch_start.*hetero_balanced", text, re.DOTALL), text
        assert trained <= batches + 1


def averaged(rank: int, world: int) -> tuple[str, int]:
    return refused(rank, world, adds, "on_fit_start", WeightAveraging())


def test_copies_of_the_module_that_callbacks_have_made_are_not_forgotten() -> None:
    assert all("not in the copy in which a callback averages" in text and not n for text, n in run_ranks(2, averaged))


class LazyMask(nn.Module):
    """Makes a buffer in its first forward pass, on the rank that runs it."""

    mask: Any

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.ones(x.shape[-1], dtype=x.dtype))
        return x * self.mask


def masks(net: Net, trainer: Trainer) -> None:
    net.body[3] = LazyMask()


def lazy(rank: int, world: int) -> tuple[Weights, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = fitted(rank, world, "pipeline", At(masks, "on_fit_start"), max_epochs=ENOUGH["on_fit_start"])
    return weights(ours), [str(w.message) for w in caught if "chang" in str(w.message)]


def test_a_buffer_that_a_layer_makes_when_it_runs_is_left_where_it_runs() -> None:
    one = alone(masks, "on_fit_start")
    for rank, (ours, said) in enumerate(run_ranks(2, lazy)):
        assert ("body.3.mask" in ours) == (rank == 1) and not said
        assert off(ours, Weights({name: value for name, value in one.items() if name in ours})) < EXACT


def untaken(rank: int, world: int) -> tuple[list[str], list[str]]:
    """`on_train_end` is over when this changes the module: nothing looks at it any more."""
    module = Net()
    given = {"pipeline": {"backbone": "body", "plan": kit.two_stages(0, 2, 4)}}
    trainer = kit.trainer(rank, world, "pipeline", given)
    stock = trainer.strategy.on_train_end

    def on_train_end() -> None:
        stock()
        appends(module, trainer)
        removes(module, trainer)
        replaces(module, trainer)

    trainer.strategy.on_train_end = on_train_end  # type: ignore[method-assign]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, data(8))
    assert not any(tensor.is_meta for tensor in module.state_dict().values())
    return [*module.state_dict()], [str(w.message) for w in caught if "changed" in str(w.message)]


def test_teardown_gathers_what_fits_and_names_the_rest_once() -> None:
    ranks = run_ranks(2, untaken)
    assert all(
        names == ["body.0.weight", "body.0.bias", "body.2.weight", "body.2.bias", "body.4.weight", "body.4.bias",
                  "head.weight"]
        for names, _ in ranks
    )  # fmt: skip
    assert len(ranks[0][1]) == 1 and "body.4.bias, body.4.weight; the rest is whole" in ranks[0][1][0]
