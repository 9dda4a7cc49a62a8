"""What torch compiles, and when: pinned to the installed version, for torch documents neither."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.compile import from_compiled
from torch import Tensor, nn

from lightning_hetero.measure.compiles import Compiled, CompileWatch, compiled_parts
from lightning_hetero.measure.device import device_of

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")  # Inductor's own
PINNED = f"torch {torch.__version__}: what measure/compiles.py takes from torch._dynamo has changed"
CPU, CUDA = device_of("cpu"), device_of("cuda")


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def watch() -> Iterator[CompileWatch]:
    watch = CompileWatch()
    yield watch
    watch.close()


def test_a_compilation_is_told_once_and_a_call_of_compiled_code_never(watch: CompileWatch) -> None:
    double = torch.compile(lambda x: 2 * x, backend="eager", dynamic=False)
    assert not watch.ask()
    double(torch.ones(3))
    assert watch.ask(), PINNED
    assert not watch.ask()
    double(torch.ones(3))
    assert not watch.ask()
    double(torch.ones(4))  # another size
    assert watch.ask(), PINNED


def test_a_compiled_backward_is_told(watch: CompileWatch) -> None:
    net = torch.compile(nn.Linear(3, 3), backend="aot_eager")
    loss = net(torch.ones(2, 3)).sum()
    assert watch.ask(), PINNED
    loss.backward()
    net(torch.ones(2, 3)).sum().backward()
    watch.ask()  # whether this backward waited to be compiled is torch's choice
    net(torch.ones(2, 3)).sum().backward()
    assert not watch.ask()


def test_a_reset_counts_as_a_compilation_and_is_outlived(watch: CompileWatch) -> None:
    double = torch.compile(lambda x: 2 * x, backend="eager")
    double(torch.ones(3))
    watch.ask()
    torch._dynamo.reset()
    assert watch.ask(), PINNED
    assert not watch.ask()
    double(torch.ones(3))
    assert watch.ask()


def test_it_is_called_back_no_more_when_closed() -> None:
    handler = sys.modules["torch._dynamo.callback"].callback_handler
    before = list(handler.start_callbacks)
    watch = CompileWatch()
    assert len(handler.start_callbacks) == len(before) + 1, PINNED
    watch.close()
    watch.close()
    assert handler.start_callbacks == before


def test_nothing_is_imported_where_nothing_can_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["torch._dynamo.callback"]
    compiled = torch.compile(nn.Linear(3, 3), backend="eager", dynamic=False)
    for name in ("torch._dynamo", "torch._dynamo.callback"):
        monkeypatch.delitem(sys.modules, name)
    watch = CompileWatch()
    assert not watch.ask()
    assert compiled_parts(compiled, CPU) == Compiled()
    assert "torch._dynamo.callback" not in sys.modules
    monkeypatch.setitem(sys.modules, "torch._dynamo.callback", module)
    assert watch.ask()  # loaded by this step
    assert not watch.ask()
    watch.close()


# ---- what is compiled --------------------------------------------------------------------------------------------


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).sum()


class Decorated(Net):
    @torch.compile(dynamic=False, backend="eager")
    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def of_a_part(**how: Any) -> Net:
    net = Net()
    net.body = torch.compile(net.body, **how)  # type: ignore[assignment]
    return net


def in_place(**how: Any) -> Net:
    net = Net()
    net.body[0].compile(**how)
    return net


def by_lightning(**how: Any) -> LightningModule:
    return from_compiled(torch.compile(Net(), **how))  # type: ignore[arg-type]


def of_a_step(**how: Any) -> Net:
    net = Net()
    net.training_step = torch.compile(net.training_step, **how)  # type: ignore[method-assign]
    return net


@pytest.mark.parametrize("make", [of_a_part, in_place, by_lightning, of_a_step])
def test_compiled_parts_are_found_with_what_was_asked_for(make: Callable[..., Net]) -> None:
    for backend in ("eager", "inductor"):
        for dynamic, per_size in ((None, False), (True, False), (False, True)):
            found = compiled_parts(make(dynamic=dynamic, backend=backend), CPU)
            assert found == Compiled(any=True, per_size=per_size), (backend, dynamic, PINNED)


def test_cuda_graphs_are_recorded_per_size_on_a_gpu() -> None:
    for mode, per_size in (("default", False), ("reduce-overhead", True), ("max-autotune", True)):
        net = of_a_part(mode=mode)
        assert compiled_parts(net, CUDA) == Compiled(any=True, per_size=per_size), PINNED
        assert compiled_parts(net, CPU) == Compiled(any=True), PINNED


def test_a_decorated_method_is_found_and_a_plain_module_has_nothing_compiled() -> None:
    assert compiled_parts(Decorated(), CPU) == Compiled(any=True, per_size=True)
    assert compiled_parts(Net(), CUDA) == Compiled()


def test_sizes_that_never_become_dynamic_by_torchs_settings() -> None:
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):  # pytest's monkeypatch would hide it afterwards
        assert compiled_parts(of_a_part(), CPU) == Compiled(any=True, per_size=True), PINNED
