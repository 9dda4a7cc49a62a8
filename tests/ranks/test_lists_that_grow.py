"""What a run keeps does not grow with its steps and epochs: in every engine, on every rank, in the server.

A run is looked at twice. The lengths of all containers that can be reached from the strategy, the run's callbacks and
the server are summed by the attribute that they are in; a deque with a limit counts as nothing. Neither does what a
solver notes of the one problem that it solves, which depends on what was measured.
"""

from __future__ import annotations

import functools
import json
import types
from array import array
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import StragglerMonitor
from lightning_hetero.balanced.decide.controller import ExchangeClock
from lightning_hetero.stale.runtime.serve.agreement import AnnouncedEpochs
from lightning_hetero.stale.runtime.serve.server import ParameterServer
from tests.ranks.harness import run_ranks
from tests.ranks.strangers import kit

_SLACK = 8  # entries that come and go
_AT_MOST = {"ShareController._local": ExchangeClock().most}  # steps since the latest exchange: more of them when short
_ATOMS = (str, bytes, int, float, bool, type(None), Tensor, torch.dtype, torch.device, type, types.ModuleType)


def _slots(value: Any) -> Iterator[tuple[str, Any]]:
    for kind in type(value).__mro__:
        names = vars(kind).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if hasattr(value, name):
                yield name, getattr(value, name)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object of ours, a container or a function refers to, each with the end of a name."""
    if isinstance(value, Mapping):
        for key, entry in list(value.items()):
            yield "{}", entry
            yield "{key}", key
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from (("[]", entry) for entry in list(value))
    elif isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            try:
                yield f".{value.__qualname__}", cell.cell_contents
            except ValueError:
                continue  # it is empty
    elif isinstance(value, types.MethodType):
        yield "()", value.__self__
        yield "()", value.__func__
    elif isinstance(value, functools.partial):
        yield from (("(partial)", part) for part in (value.func, *value.args, *value.keywords.values()))
    elif type(value).__module__.startswith("lightning_hetero") and ".solvers." not in type(value).__module__:
        kept = {**getattr(value, "__dict__", {}), **dict(_slots(value))}
        yield from ((f"{type(value).__name__}.{name}", part) for name, part in kept.items())


def lengths(*roots: Any) -> dict[str, int]:
    """The lengths of all containers that can be reached within the package's own objects, by where they are."""
    found: Counter[str] = Counter()
    seen: set[int] = set()
    held: list[Any] = []  # so that no id is used again
    queue: deque[tuple[str, Any]] = deque(("", root) for root in roots)
    while queue:
        where, value = queue.popleft()
        if isinstance(value, _ATOMS) or id(value) in seen:
            continue
        seen.add(id(value))
        held.append(value)
        if isinstance(value, deque) and value.maxlen is not None:
            continue
        if isinstance(value, Mapping | list | set | deque | array | bytearray):
            found[where] += len(value)
        for name, part in _parts(value):
            queue.append((name if name[0] not in "[{(." else f"{where}{name}", part))
    return dict(found)


def grown(early: Mapping[str, int], late: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """What is longer in the end, and longer than its known limit."""
    allowed = {w: max(early.get(w, 0) + _SLACK, _AT_MOST.get(w, 0)) for w in late}
    return {w: (early.get(w, 0), n) for w, n in late.items() if n > allowed[w]}


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.net(batch[0]).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class Looks(Callback):
    """Looks at what there is when two epochs begin."""

    def __init__(self, early: int, late: int) -> None:
        self.at, self.found = (early, late), list[dict[str, int]]()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch in self.at:
            ours = [c for c in trainer.callbacks if type(c).__module__.startswith("lightning_hetero")]
            self.found.append(lengths(trainer.strategy, *ours))


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "balanced": ("balanced", {}),
    "balanced, equal": ("balanced", {"rebalance": False}),
    "stale": ("stale", {}),
    "pipeline": ("pipeline", {"backbone": "net"}),
    "two stages": ("pipeline", {"backbone": "net", "plan": kit.two_stages(0, 1, 3, samples=4, micro_samples=2)}),
    "federated": ("federated", {"local_steps": 4}),
}


def watch_server(early: int, late: int) -> None:
    """Lets the server, which is forked off this process, write down what it has."""
    servers: list[ParameterServer] = []
    made, begin = ParameterServer.__init__, AnnouncedEpochs.begin

    def init(self: ParameterServer, *args: Any, **kwargs: Any) -> None:
        servers.append(self)
        made(self, *args, **kwargs)

    def begins(self: AnnouncedEpochs, number: int, *args: Any) -> None:
        begin(self, number, *args)
        if number in (early, late):
            Path(f"server-{number}.json").write_text(json.dumps(lengths(*servers)))

    ParameterServer.__init__, AnnouncedEpochs.begin = init, begins  # type: ignore[method-assign]


def trained(rank: int, world: int, engine: str, options: dict[str, Any], batches: int, early: int, late: int) -> Any:
    if engine == "stale":
        watch_server(early, late)
    looks = Looks(early, late)
    trainer = kit.trainer(
        rank, world, engine, {engine: options}, max_epochs=late + 1, callbacks=[looks, StragglerMonitor()],
        check_val_every_n_epoch=max(1, early // 3),
    )  # fmt: skip
    trainer.strategy._monitor = True  # pyright: ignore[reportAttributeAccessIssue]
    data = TensorDataset(torch.randn(4 * batches, 2))
    trainer.fit(Net(), DataLoader(data, batch_size=2), DataLoader(data, batch_size=2 * batches))
    assert len(looks.found) == 2
    if engine == "stale" and rank == 0:
        looks.found += [json.loads(Path(f"server-{epoch}.json").read_text()) for epoch in (early, late)]
    return looks.found


def no_list_grows(variant: str, batches: int, early: int, late: int) -> None:
    engine, options = VARIANTS[variant]
    for early_one, late_one, *server in run_ranks(2, trained, engine, options, batches, early, late, timeout_s=600):
        assert len(early_one) > 20  # it looks far enough
        assert grown(early_one, late_one) == {}
        assert not server or grown(*server) == {}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.short("balanced", "stale", "pipeline")
def test_nothing_that_is_kept_grows(variant: str) -> None:
    no_list_grows(variant, 8, 3, 14)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_that_is_kept_grows_in_3000_steps(variant: str) -> None:
    no_list_grows(variant, 100, 10, 30)


def test_what_grows_is_found() -> None:
    class Keeps:
        __module__ = "lightning_hetero.of_a_test"

        def __init__(self) -> None:
            self.kept: list[int] = []
            self.limited: deque[int] = deque(maxlen=99)
            self.call = functools.partial(lambda kept: None, self.kept)

    keeps = Keeps()
    before = lengths(keeps)
    keeps.kept += range(_SLACK + 1)
    keeps.limited += range(_SLACK + 1)
    assert grown(before, lengths(keeps)) == {"Keeps.kept": (0, _SLACK + 1)}


def test_what_has_a_limit_may_be_as_long_as_that() -> None:
    (name, most), *_ = _AT_MOST.items()
    assert grown({name: 0}, {name: most}) == {}
    assert grown({name: 0}, {name: most + 1}) == {name: (0, most + 1)}
