"""The cut at the backbone, over both carriers: an unchanged ``training_step`` gets the gradients of a direct run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_hetero.pipeline.ambient import seed_torch_streams
from lightning_hetero.pipeline.arrival import Arrival
from lightning_hetero.pipeline.carriers import Carrier, make_carrier
from lightning_hetero.pipeline.cut import BackboneCall, BackboneCut, graphs_to_retain
from lightning_hetero.pipeline.resumable import Done, ResumableStep, Suspended, stream_seed
from tests.ranks.test_resumable import BOTH

D = 5


@pytest.fixture(params=BOTH)
def carrier(request: pytest.FixtureRequest) -> Iterator[Carrier]:
    with make_carrier(request.param) as carrier:
        yield carrier


# ---- models: what users write ----------------------------------------------------------------------------------


class Net(nn.Module):
    """Embedding, backbone, head; subclasses change ``training_step``."""

    dtype = torch.float64

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.head = nn.Linear(D, D), nn.Linear(D, 2)
        self.backbone = self.make_backbone()
        self.to(self.dtype)

    def make_backbone(self) -> nn.Module:
        return nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))

    def cut(self) -> BackboneCut:
        return BackboneCut(self.backbone)

    def training_step(self, batch: Tensor) -> Tensor:
        return self.head(self.backbone(self.embed(batch))).square().mean()


class Dropout(Net):
    def training_step(self, batch: Tensor) -> Tensor:
        x = F.dropout(self.embed(batch * torch.rand(1, dtype=batch.dtype)), 0.3)
        return self.head(F.dropout(self.backbone(x), 0.3)).square().mean()


class Skip(Net):
    """Uses the graph before the backbone twice, at two places."""

    def training_step(self, batch: Tensor) -> Tensor:
        z = self.embed(batch)
        x = z.tanh()
        return self.head(self.backbone(x) * x + z).square().mean()


class SkipOfLeaf(Net):
    def training_step(self, batch: Tensor) -> Tensor:
        return self.head(self.backbone(batch) + batch).square().mean()


class InPlace(Net):
    """What a leaf that requires a gradient would not allow."""

    def training_step(self, batch: Tensor) -> Tensor:
        y = self.backbone(self.embed(batch))
        y *= 2.0
        return self.head(F.leaky_relu(y, inplace=True)).square().mean()


class Twice(Net):
    """The second call takes what the first returned; both share the embedding."""

    def training_step(self, batch: Tensor) -> Tensor:
        x = self.embed(batch).tanh()
        y = self.backbone(x)
        z = self.backbone(y * x)
        return (self.head(z).square() + y.sum(1, keepdim=True)).mean()


class TwoWithoutLink(Net):
    """Contrastive learning: two views through one encoder."""

    def training_step(self, batch: Tensor) -> Tensor:
        a, b = self.backbone(self.embed(batch)), self.backbone(self.embed(-batch))
        return (self.head(a) * self.head(b)).mean()


class Nested(Net):
    """Nested tuples in, a dict with an integer tensor and a number out."""

    class Backbone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(D, D)

        def forward(self, xs: tuple[Tensor, tuple[Tensor, Tensor]], scale: float = 1.0, *, mask: Any) -> dict[str, Any]:
            a, (b, i) = xs
            return {"a": self.layer(a) * scale, "rest": [self.layer(a) + b * mask["m"], i + 1], "unused": a * 2, "n": 3}

    def make_backbone(self) -> nn.Module:
        return Nested.Backbone()

    def training_step(self, batch: Tensor) -> Tensor:
        x = self.embed(batch)
        out = self.backbone((x, (batch, torch.arange(D))), 0.5, mask={"m": x.detach(), "none": None})
        assert out["n"] == 3 and out["rest"][1].tolist() == [1, 2, 3, 4, 5]
        return self.head(out["a"] + out["rest"][0]).square().mean()


class Frozen(Net):
    """Nothing is trained before the backbone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)


class FirstUnused(Net):
    """The loss does not depend on the backbone."""

    def training_step(self, batch: Tensor) -> Tensor:
        x = self.embed(batch)
        self.backbone(x)
        return self.head(x).square().mean()


class UnderNoGrad(Net):
    """A frozen teacher: forward only, then a second call with gradients."""

    def training_step(self, batch: Tensor) -> Tensor:
        x = self.embed(batch)
        with torch.no_grad():
            teacher = self.backbone(x)
        assert not teacher.requires_grad
        return (self.head(self.backbone(x)) - self.head(teacher)).square().mean() + teacher.mean()


class Autocast(Net):
    """The precision plugin's block around the step is the caller's; this one is the step's own, held open."""

    dtype = torch.float32

    def training_step(self, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.head(self.backbone(self.embed(batch))).square().mean()


class Checkpoints(Net):
    use_reentrant = False

    def before(self, x: Tensor) -> Tensor:
        return F.dropout(self.embed(x).tanh(), 0.4)

    def after(self, y: Tensor) -> Tensor:
        return F.dropout(self.head(F.dropout(y, 0.4)), 0.4)

    def training_step(self, batch: Tensor) -> Tensor:
        x = checkpoint(self.before, batch.requires_grad_(), use_reentrant=self.use_reentrant)
        y = checkpoint(self.after, self.backbone(x), use_reentrant=self.use_reentrant)
        return y.square().mean()


class ReentrantCheckpoints(Checkpoints):
    use_reentrant = True


class Loop(Net):
    """A ``ModuleList`` that the step walks itself."""

    def make_backbone(self) -> nn.Module:
        return nn.ModuleList([nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)])

    def cut(self) -> BackboneCut:
        assert isinstance(self.backbone, nn.ModuleList)
        return BackboneCut(*self.backbone)

    def training_step(self, batch: Tensor) -> Tensor:
        x = self.embed(batch)
        for layer in self.backbone:  # type: ignore[union-attr]
            x = layer(x)
        return self.head(x).square().mean()


NETS = [Net, Dropout, Skip, SkipOfLeaf, InPlace, Twice, TwoWithoutLink, Nested, Frozen, FirstUnused, UnderNoGrad]
NETS += [Autocast, Checkpoints, ReentrantCheckpoints, Loop]


# ---- a pipeline of one process, and a direct run ---------------------------------------------------------------


class Stage:
    """Computes the backbone on what a step hands out, apart from the step's graph."""

    def __init__(self, net: Net) -> None:
        layers = net.backbone
        self.forward = nn.Sequential(*layers) if isinstance(layers, nn.ModuleList) else layers
        self.pending: list[tuple[BackboneCall, list[Tensor]]] = []

    def reply(self, call: BackboneCall) -> Any:
        with torch.set_grad_enabled(call.grad_enabled):
            autocast = call.autocast
            with torch.autocast("cpu", dtype=autocast.get("cpu", torch.bfloat16), enabled="cpu" in autocast):
                outputs = self.forward(*call.args, **call.kwargs)
        tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
        if call.grad_enabled:
            self.pending.append((call, tensors))
        return call.reply(outputs)

    def backward(self, loss: Tensor) -> None:
        keep, *keeps = graphs_to_retain(loss, [call for call, _ in self.pending])
        loss.backward(retain_graph=keep)
        for (call, outputs), keep in zip(reversed(self.pending), keeps, strict=True):
            grads = call.output_grads()
            pairs = [(y, g) for y, g in zip(outputs, grads, strict=True) if g is not None and y.requires_grad]
            inputs = call.inputs
            if pairs:
                torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])
            call.backward([x.grad for x in inputs], retain_graph=keep)


def batches(net: Net, number: int = 3) -> list[Tensor]:
    g = torch.Generator().manual_seed(9)
    return [torch.randn(3 + k, D, generator=g, dtype=net.dtype) for k in range(number)]


def direct(net: Net, data: Sequence[Tensor]) -> list[Tensor]:
    losses = []
    for k, batch in enumerate(data):
        seed_torch_streams(stream_seed(0, k))
        loss = net.training_step(batch)
        loss.backward()
        losses.append(loss.detach())
    return losses


def piped(net: Net, data: Sequence[Tensor], carrier: Carrier, step: Callable[..., Any] | None = None) -> list[Tensor]:
    """All steps are in flight together; they go on in turns, from the last to the first."""
    step = step or net.training_step
    losses: dict[int, Tensor] = {}
    stages = [Stage(net) for _ in data]
    with net.cut():
        steps = [
            ResumableStep(lambda batch=batch: step(batch), carrier=carrier, seed=stream_seed(0, k))
            for k, batch in enumerate(data)
        ]
        outcomes = {k: step.start() for k, step in enumerate(steps)}
        while outcomes:
            for k, outcome in sorted(outcomes.items(), reverse=True):
                if isinstance(outcome, Done):
                    losses[k] = outcomes.pop(k).value
                else:
                    outcomes[k] = steps[k].resume(stages[k].reply(outcome.value))
    for k, stage in enumerate(stages):
        stage.backward(losses[k])
    return [losses[k].detach() for k in range(len(data))]


def gradients(net: Net) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in net.named_parameters()}


def assert_same(got: Any, expected: Any, exactly: bool = True) -> None:
    tolerance = {"rtol": 0.0, "atol": 0.0} if exactly else {"rtol": 1e-12, "atol": 1e-15}
    torch.testing.assert_close(got, expected, **tolerance)


@pytest.mark.parametrize("make", NETS)
def test_gradients_equal_a_direct_run(carrier: Carrier, make: type[Net]) -> None:
    """Bit by bit; to 1e-12 where gradients are summed in another order, since a graph is walked in two goes."""
    expected_net, net = make(), make()
    data = batches(net)
    expected = direct(expected_net, data)
    losses = piped(net, data, carrier)
    assert_same(losses, expected)
    exactly = make not in (Skip, Twice, TwoWithoutLink, UnderNoGrad)
    for name, grad in gradients(expected_net).items():
        got = gradients(net)[name]
        assert (got is None) == (grad is None), name
        if grad is not None:
            assert_same(got, grad, exactly)
    assert net.training_step(data[0]).grad_fn is not None  # and it runs without steps again


def test_the_callers_autocast_is_in_force_in_interleaved_steps(carrier: Carrier) -> None:
    class Mixed(Net):
        dtype = torch.float32

    expected_net, net = Mixed(), Mixed()
    data = batches(net)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = piped(net, data, carrier)
    for k, batch in enumerate(data):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = expected_net.training_step(batch)
        loss.backward()
        assert_same(losses[k], loss.detach())
    assert_same(gradients(net), gradients(expected_net))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (Net, [False, False]),
        (Skip, [True, False]),
        (SkipOfLeaf, [False, False]),
        (TwoWithoutLink, [False, False, False]),
        (Twice, [False, True, False]),
    ],
)
def test_a_graph_is_retained_only_where_it_is_walked_again(make: type[Net], expected: list[bool]) -> None:
    """A compiled graph that gives its buffers away refuses ``retain_graph``."""
    net = make()
    calls: list[BackboneCall] = []
    with make_carrier("thread") as carrier, net.cut():
        step = ResumableStep(lambda: net.training_step(batches(net)[0]), carrier=carrier, seed=0)
        outcome = step.start()
        stage = Stage(net)
        while isinstance(outcome, Suspended):
            calls.append(outcome.value)
            outcome = step.resume(stage.reply(outcome.value))
    assert graphs_to_retain(outcome.value, calls) == expected


# ---- what is replaced, and for how long ------------------------------------------------------------------------


def test_forward_is_the_original_after_the_cut_also_after_an_exception(carrier: Carrier) -> None:
    net = Net()
    with pytest.raises(KeyError), net.cut():
        assert "forward" in vars(net.backbone)
        step = ResumableStep(lambda: net.training_step(batches(net)[0]), carrier=carrier, seed=0)
        assert isinstance(step.start(), Suspended)
        raise KeyError
    assert "forward" not in vars(net.backbone)


def test_a_forward_of_the_instance_is_put_back() -> None:
    net = Net()
    mine = net.backbone.forward = lambda x: x * 2  # type: ignore[method-assign]
    cut = net.cut()
    replaced = []
    for _ in range(2):
        with cut:
            replaced.append(net.backbone.forward)
            assert replaced[0] is replaced[-1] is not mine
            assert net.backbone(torch.ones(1)).item() == 2.0  # outside of steps
            with pytest.raises(RuntimeError, match="in force already"):
                cut.__enter__()
        assert net.backbone.forward is mine


def test_hooks_run_in_the_step_and_those_of_layers_where_they_are_computed(carrier: Carrier) -> None:
    net = Net()
    seen: list[str] = []
    net.backbone.register_forward_pre_hook(lambda m, args: seen.append("before backbone"))
    net.backbone.register_forward_hook(lambda m, args, y: seen.append("after backbone") or y * 0 + 1)
    net.backbone[0].register_forward_hook(lambda *_: seen.append("layer"))  # type: ignore[index]
    net.head.register_forward_hook(lambda *_: seen.append("head"))
    layers = nn.Sequential(*net.backbone)  # type: ignore[arg-type]
    with net.cut():
        step = ResumableStep(lambda: net.training_step(batches(net)[0]), carrier=carrier, seed=0)
        call = step.start().value
        seen.append("suspended")
        done = step.resume(call.reply(layers(*call.args)))
    assert seen == ["before backbone", "suspended", "layer", "after backbone", "head"]
    assert_same(done.value, net.head(torch.ones(3, D, dtype=net.dtype)).square().mean())


# torch hides this warning of its own, but not where warnings are errors
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_step_is_split_at_the_call(carrier: Carrier) -> None:
    expected_net, net = Net(), Net()
    data = batches(net)
    graphs = 0

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    torch.compiler.reset()
    step = torch.compile(net.training_step, backend=backend, dynamic=True)
    expected = direct(expected_net, data)
    with torch.no_grad():
        plain = [step(batch) for batch in data]  # compiled whole, without the cut
    assert_same(plain, expected)
    seen = [graphs]
    cut = net.cut()
    net.cut = lambda: cut  # type: ignore[method-assign]
    for _ in range(3):
        net.zero_grad()
        assert_same(piped(net, data, carrier, step), expected)
        assert_same(gradients(net), gradients(expected_net))
        seen.append(graphs)
    with torch.no_grad():
        assert_same([step(batch) for batch in data], expected)  # and whole again
    assert seen[0] == 1 and seen[1] >= 3  # two more: before the call and behind it
    assert seen[1] == seen[2] == seen[3] == graphs  # and none for the same cut entered again


# ---- one call --------------------------------------------------------------------------------------------------


def suspended(carrier: Carrier, body: Callable[[nn.Module], Any]) -> tuple[ResumableStep, BackboneCall]:
    backbone = nn.Identity()
    with BackboneCut(backbone):
        step = ResumableStep(lambda: body(backbone), carrier=carrier, seed=0)
        call = step.start()
    assert isinstance(call, Suspended) and isinstance(call.value, BackboneCall)
    return step, call.value


def test_a_call_hands_out_detached_tensors_that_share_memory(carrier: Carrier) -> None:
    x = (torch.ones(2, requires_grad=True) * 2).requires_grad_()
    _, call = suspended(carrier, lambda backbone: backbone((x, (torch.ones(1),))))
    (sent, (constant,)) = call.message()
    assert (sent.grad_fn, sent.requires_grad, sent.data_ptr()) == (None, True, x.data_ptr())
    assert not constant.requires_grad
    assert (call.number, call.grad_enabled, call.autocast) == (0, True, {})


def test_a_call_under_no_grad_is_forward_only(carrier: Carrier) -> None:
    x = torch.ones(2, requires_grad=True)

    def body(backbone: nn.Module) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            return backbone(x)

    step, call = suspended(carrier, body)
    assert (call.grad_enabled, call.message().requires_grad) == (False, False)
    assert call.autocast == {"cpu": torch.bfloat16}
    y = step.resume(call.reply(call.message() * 2)).value
    assert not y.requires_grad
    for back in (call.output_grads, lambda: call.backward([None])):
        with pytest.raises(RuntimeError, match="under no_grad: nothing goes back"):
            back()


@pytest.mark.parametrize(
    ("args", "kwargs", "named"),
    [
        ((torch.ones(1), 3), {}, "2 positional and the keyword arguments \\[\\]"),
        ((torch.ones(1),), {"mask": None}, "\\['mask'\\]"),
        (({"x": torch.ones(1)},), {}, "argument is a dict"),
        (([torch.ones(1)],), {}, "argument is a list"),
        (((torch.ones(1), (torch.ones(1), None)),), {}, "argument\\[1\\]\\[1\\] is a NoneType"),
        ((4,), {}, "argument is a int"),
    ],
)
def test_what_cannot_travel_is_named_and_still_works_in_one_process(
    carrier: Carrier, args: tuple[Any, ...], kwargs: dict[str, Any], named: str
) -> None:
    step, call = suspended(carrier, lambda backbone: backbone(*args, **kwargs))
    with pytest.raises(TypeError, match=named):
        call.message()
    assert call.args == args and call.kwargs == kwargs
    assert step.resume(call.reply("y")) == Done("y")


def test_a_step_resumed_without_reply_is_told(carrier: Carrier) -> None:
    step, _ = suspended(carrier, lambda backbone: backbone(torch.ones(1)))
    with pytest.raises(TypeError, match=r"resumed with a Tensor: resume it with call.reply\(outputs\)"):
        step.resume(torch.ones(1))
    step, call = suspended(carrier, lambda backbone: backbone(torch.ones(1)))
    call.reply(torch.ones(1))
    with pytest.raises(TypeError, match="resumed with a NoneType"):
        step.resume()


def test_misuse_of_a_call_is_named(carrier: Carrier) -> None:
    x = torch.ones(2, requires_grad=True)
    step, call = suspended(carrier, lambda backbone: backbone(x * 2).sum())
    with pytest.raises(RuntimeError, match="without a reply"):
        call.output_grads()
    with pytest.raises(ValueError, match="2 flags for 1 tensors"):
        call.reply(torch.ones(2), requires_grad=[True, False])
    loss = step.resume(call.reply(torch.ones(2))).value
    with pytest.raises(RuntimeError, match="replied to before"):
        call.reply(torch.ones(2))
    loss.backward()
    (grad,) = call.output_grads()
    assert_same(grad, torch.ones(2))
    with pytest.raises(RuntimeError, match="taken before"):
        call.output_grads()
    with pytest.raises(ValueError, match="0 gradients for 1 inputs"):
        call.backward([])
    call.backward([torch.full((2,), 3.0)])
    assert_same(x.grad, torch.full((2,), 6.0))
    with pytest.raises(RuntimeError, match="gone back before"):
        call.backward([None])


def test_where_nothing_is_trained_no_gradient_comes_back(carrier: Carrier) -> None:
    step, call = suspended(carrier, lambda backbone: backbone(torch.ones(2)))
    assert not step.resume(call.reply(torch.ones(2), requires_grad=False)).value.requires_grad
    assert call.output_grads() == [None]


def test_a_version_check_reaches_across_the_cut(carrier: Carrier) -> None:
    """What a direct run refuses, overwriting what a layer has saved, is not silently wrong."""

    def body(backbone: nn.Module) -> Tensor:
        y = backbone(torch.ones(2, requires_grad=True) * 2)
        y.mul_(2)
        return y.sum()

    step, call = suspended(carrier, body)
    y = call.message().sigmoid()  # saves its output
    step.resume(call.reply(y)).value.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(*call.output_grads())


def test_an_arrival_sums_what_comes_and_tells_what_comes_too_late() -> None:
    arrival = Arrival([torch.ones(2), torch.arange(2), torch.ones(2), torch.ones(1)], [True, True, False, True])
    a, integers, constant, unused = arrival.take()
    assert [t.requires_grad for t in (a, integers, constant, unused)] == [True, False, False, True]
    with pytest.raises(RuntimeError, match="taken before"):
        arrival.take()
    (a * 2).sum().backward()
    (a * 3).sum().backward()
    late = (a * 5).sum()
    grads = arrival.take_grads()
    assert grads[1:] == [None, None, None]
    assert_same(grads[0], torch.full((2,), 5.0))
    with pytest.raises(RuntimeError, match="the last must go back first"):
        late.backward()


# ---- layers that the step calls one after another --------------------------------------------------------------


def _collects(layers: nn.ModuleList, x: Tensor) -> Tensor:
    features = []
    for layer in layers:
        features.append(x := layer(x))
    return torch.cat(features)


def _between(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x) + x
    return x


def _shape(layers: nn.ModuleList, x: Tensor) -> Tensor:
    return layers[2](layers[1](layers[0](x))[:, :1])


def _attribute(layers: nn.ModuleList, x: Tensor) -> Tensor:
    return layers[1](layers[0](x).relu())


def _order(layers: nn.ModuleList, x: Tensor) -> Tensor:
    return layers[1](layers[2](layers[0](x)))


def _another(layers: nn.ModuleList, x: Tensor) -> Tensor:
    layers[0](x)
    return layers[1](x)


def _more(layers: nn.ModuleList, x: Tensor) -> Tensor:
    return layers[1](layers[0](x), x)


@pytest.mark.parametrize(
    ("walk", "error", "named"),
    [
        (_collects, RuntimeError, "output of layer 0 .* move what uses it there"),
        (_between, RuntimeError, "output of layer 0 .* move what uses it there"),
        (_shape, TypeError, "'_ComputedElsewhere' object is not subscriptable"),
        (_attribute, AttributeError, "no 'relu': the output of layer 0"),
        (_order, TypeError, "layer 2 .* something else than the output of layer 1"),
        (_another, TypeError, "layer 1 .* something else than the output of layer 0"),
        (_more, TypeError, "layer 1 .* something else than the output of layer 0"),
    ],
)
def test_a_walk_that_is_no_chain_is_refused(
    carrier: Carrier, walk: Callable[[nn.ModuleList, Tensor], Tensor], error: type[Exception], named: str
) -> None:
    layers = nn.ModuleList([nn.Identity() for _ in range(3)])

    def body() -> Tensor:
        return walk(layers, torch.ones(1, 2))

    with BackboneCut(*layers), pytest.raises(error, match=named):
        step = ResumableStep(body, carrier=carrier, seed=0)
        outcome = step.start()
        while isinstance(outcome, Suspended):
            outcome = step.resume(outcome.value.reply(torch.ones(1, 2)))


def test_bad_modules_are_named() -> None:
    layer = nn.Identity()
    with pytest.raises(TypeError, match=r"modules=\(\) must be one or more nn.Module"):
        BackboneCut()
    with pytest.raises(TypeError, match=r"must be one or more nn\.Module"):
        BackboneCut([layer])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="several places"):
        BackboneCut(layer, nn.Tanh(), layer)
