"""The worker's side: flat memory, codecs, what goes into a slot and when."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.stale.compress import Cast, Codec, TopK, by_name
from lightning_hetero.stale.flags import PushFlag
from lightning_hetero.stale.hyper import CLIP_NORM, CLIP_VALUE, HyperParameters
from lightning_hetero.stale.layout import ALIGN_BYTES, Entry, FlatLayout
from lightning_hetero.stale.policy import Bsp, Flexible, Saps
from lightning_hetero.stale.server import serve
from lightning_hetero.stale.worker import RemoteFailureError, Worker
from lightning_hetero.transport.base import Ask, Link, Reply, Request, Say, ServerLostError
from lightning_hetero.transport.in_process import InProcess
from tests.ranks.stale_kit import Script, Setting, Trainee, automatic, ends_of, threads


@pytest.fixture(autouse=True)
def _float64() -> None:
    torch.set_default_dtype(torch.float64)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 2))


def sgd(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)]


def weight_of(model: Any) -> nn.Parameter:
    return model[0].weight


# ---- layout -----------------------------------------------------------------------------------------------------


def all_kinds() -> list[tuple[str, Tensor]]:
    torch.manual_seed(0)
    last = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    return [
        ("scalar", torch.tensor(3.5)),
        ("matrix", torch.randn(3, 5, dtype=torch.float32)),
        ("transposed", torch.randn(3, 5).t()),
        ("last", last),
        ("half", torch.randn(7).bfloat16()),
        ("complex", torch.randn(2, 2, dtype=torch.complex64)),
        ("empty", torch.zeros(0, 4)),
        ("integer", torch.arange(5)),
        ("bool", torch.tensor([True, False])),
        ("expanded", torch.arange(3.0).expand(2, 3)),
        ("strided", torch.randn(4, 8)[:, ::2]),
        ("one", torch.randn(1, 6)[:, :1]),
    ]


def test_every_tensor_survives_the_area_in_its_own_format() -> None:
    named = all_kinds()
    tensors = [t for _, t in named]
    before = [t.clone() for t in tensors]
    layout = FlatLayout.of(named[:6], named[6:])
    area = torch.full((layout.bytes,), 255, dtype=torch.uint8)
    layout.adopt(area, tensors)
    for view, tensor, old, (start, stop) in zip(
        layout.views(area), tensors, before, layout.ranges, strict=True
    ):
        assert torch.equal(view, old) and torch.equal(tensor, old)
        assert view.dtype == old.dtype
        assert start % ALIGN_BYTES == 0 and stop - start == old.numel() * old.element_size()
        assert tensor.numel() == 0 or tensor.data_ptr() == area.data_ptr() + start
    assert dict(named)["last"].is_contiguous(memory_format=torch.channels_last)
    assert dict(named)["transposed"].stride() == (1, 5)
    assert layout.views(area)[9].is_contiguous()  # what overlapped has got room
    ranges = sorted(layout.ranges)
    assert all(a[1] <= b[0] for a, b in pairwise(ranges))
    assert layout.parameter_bytes <= layout.ranges[6][0]


def test_tied_tensors_appear_once() -> None:
    a, b = torch.zeros(3), torch.zeros(3)
    layout = FlatLayout.of([("a", a), ("again", a), ("b", b)], [("c", torch.ones(1)), ("a buffer", b)])
    assert [e.name for e in layout.parameters] == ["a", "b"]
    assert [e.name for e in layout.buffers] == ["c"]


def test_the_digest_tells_whatever_matters() -> None:
    def make(**changes: Any) -> FlatLayout:
        shape, dtype = changes.get("shape", (3, 4)), changes.get("dtype", torch.float32)
        weight = nn.Parameter(torch.zeros(shape, dtype=dtype))
        if changes.get("transposed"):
            weight = nn.Parameter(torch.zeros(shape[::-1], dtype=dtype).t())
        optimizers = [changes.get("optimizer", torch.optim.SGD)([weight])]
        named = [(changes.get("name", "weight"), weight)]
        buffers = [] if changes.get("parameter") else [("b", torch.zeros(2))]
        more = [("b", torch.zeros(2))] if changes.get("parameter") else []
        return FlatLayout.of(named + more, buffers, optimizers=optimizers, codec=changes.get("codec"))

    assert make().digest == make().digest
    changes = [
        {"shape": (4, 3)}, {"dtype": torch.float64}, {"name": "w"}, {"transposed": True}, {"parameter": True},
        {"optimizer": torch.optim.Adam}, {"codec": "bf16"}, {"codec": "fp16"}, {"codec": TopK(0.1)},
        {"codec": TopK(0.2)},
    ]  # fmt: skip
    assert len({make(**change).digest for change in [{}, *changes]}) == len(changes) + 1


def test_the_slot_has_room_for_everything_without_overlap() -> None:
    model = mlp()
    layout = FlatLayout.of(
        list(model.named_parameters()), list(model.named_buffers()), optimizers=sgd(model), codec=TopK(0.3)
    )
    ranges = [layout.present, layout.number_range, *layout.buffer_ranges, *layout.gradient_ranges]
    assert all(start % ALIGN_BYTES == 0 for start, _ in ranges)
    assert all(a[1] <= b[0] for a, b in pairwise(ranges))
    assert ranges[-1][1] <= layout.slot_bytes
    assert layout.number_range[1] - layout.number_range[0] == 8 * HyperParameters(sgd(model)).size


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.eye(3).to_sparse(), "sparse"),
        (nn.LazyLinear(2).weight, "lazy.*forward"),
    ],
)
def test_what_has_no_place_is_refused_by_name(tensor: Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=f"'odd'.*{words}"):
        FlatLayout.of([("odd", tensor)])


def test_an_area_must_fit() -> None:
    layout = FlatLayout.of([("a", torch.zeros(3))])
    with pytest.raises(ValueError, match="uint8 of shape"):
        layout.views(torch.zeros(layout.bytes + 1, dtype=torch.uint8))


# ---- codecs -----------------------------------------------------------------------------------------------------


def travel(codec: Codec, gradient: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    entry = Entry.of("weight", gradient)
    data = torch.full((codec.bytes(entry),), 77, dtype=torch.uint8)
    memory = codec.encode(gradient, data, entry, memory)
    pool = entry.empty().fill_(math.nan)
    codec.put(pool, data, entry, 2.0)
    codec.add_to(pool, data, entry, -0.5)
    return pool / 1.5, memory


@pytest.mark.parametrize(
    ("codec", "tolerance"), [(None, 1e-15), ("bf16", 2**-8), ("fp16", 2**-11), (TopK(1.0), 1e-15)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_round_trip(codec: Any, tolerance: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for gradient in (
        torch.randn(6, 5),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(()),
    ):
        exact = gradient.to(dtype)
        received, _ = travel(by_name(codec), exact)
        assert received.stride() == exact.stride()
        error = ((received - exact).abs() / exact.abs()).max()
        assert error <= tolerance + (1e-6 if dtype is torch.float32 else 0.0)


def test_narrow_codecs_make_pushes_smaller() -> None:
    entry = Entry.of("w", torch.zeros(1000, dtype=torch.float32))
    assert by_name(None).bytes(entry) == 4000
    assert by_name("bf16").bytes(entry) == by_name("fp16").bytes(entry) == 2000
    assert TopK(0.01).bytes(entry) == 120
    assert by_name("bf16").bytes(Entry.of("c", torch.zeros(10, dtype=torch.complex64))) == 80


def test_topk_sends_the_largest_and_keeps_the_rest() -> None:
    gradient = torch.tensor([0.1, -5.0, 0.2, 3.0])
    received, memory = travel(TopK(0.5), gradient)
    assert memory is not None
    assert received.tolist() == pytest.approx([0.0, -5.0, 0.0, 3.0])
    assert memory.tolist() == pytest.approx([0.1, 0.0, 0.2, 0.0])


def test_with_error_feedback_the_sum_of_pushes_follows_the_sum_of_gradients() -> None:
    torch.manual_seed(0)
    codec, memory = TopK(0.1), None
    sent, total, rests = torch.zeros(40), torch.zeros(40), []
    constant = torch.randn(40)
    for step in range(1, 201):
        gradient = constant + 0.1 * torch.randn(40)
        received, memory = travel(codec, gradient, memory)
        sent, total = sent + received, total + gradient
        rests.append(float((sent - total).norm()) / step)
    assert memory is not None
    assert torch.allclose(sent + memory, total, rtol=0, atol=1e-10)  # nothing is ever lost
    assert rests[-1] < 0.1 * float(constant.norm()) < rests[0]


def test_topk_refuses_places_that_do_not_exist() -> None:
    codec, entry = TopK(0.5), Entry.of("weight", torch.zeros(4))
    data = torch.zeros(codec.bytes(entry), dtype=torch.uint8)
    data[:8].view(torch.int64)[0] = 4
    with pytest.raises(ValueError, match="'weight' has 4 entries"):
        codec.add_to(torch.zeros(4), data, entry, 1.0)


@pytest.mark.parametrize("codec", [None, "bf16", "fp16", TopK(0.5)])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_single_bad_number_is_found(codec: Any, bad: float) -> None:
    codec = by_name(codec)
    gradient = torch.randn(50)
    entry = Entry.of("w", gradient)
    data = torch.zeros(codec.bytes(entry), dtype=torch.uint8)
    codec.encode(gradient, data, entry, None)
    assert codec.finite(codec.values(data, entry))
    gradient[17] = bad
    codec.encode(gradient, data, entry, None)
    assert not codec.finite(codec.values(data, entry))


def test_a_sum_that_overflows_blames_nobody() -> None:
    for dtype, large in ((torch.float16, 6e4), (torch.float32, 3e38), (torch.float64, 1.7e308)):
        assert Cast().finite(torch.full((100,), large, dtype=dtype))


@pytest.mark.parametrize("codec", ["int8", "", "BF16"])
def test_unknown_codecs_are_named(codec: str) -> None:
    with pytest.raises(ValueError, match=f"codec={codec!r}.*'bf16', 'fp16'"):
        by_name(codec)


@pytest.mark.parametrize("ratio", [0.0, -1.0, 1.1, math.nan])
def test_topk_ratio_is_checked(ratio: float) -> None:
    with pytest.raises(ValueError, match=r"TopK\(ratio="):
        TopK(ratio)


# ---- hyper-parameters -------------------------------------------------------------------------------------------


def test_numeric_entries_travel_and_nothing_else() -> None:
    p, q = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

    def make() -> list[torch.optim.Optimizer]:
        adam = torch.optim.Adam([{"params": [p], "lr": 0.1}, {"params": [q], "lr": torch.tensor(0.2)}])
        return [adam, torch.optim.SGD([q], lr=1, momentum=0.5)]

    here, there = make(), make()
    mine, theirs = HyperParameters(here), HyperParameters(there)
    assert mine.digest == theirs.digest
    torch.optim.lr_scheduler.StepLR(here[0], 1)  # adds initial_lr to the worker's groups only
    here[0].param_groups[0].update(lr=0.3, betas=(0.5, 0.6), amsgrad=True)
    here[0].param_groups[1]["lr"].fill_(0.4)
    here[1].param_groups[0].update(lr=0.7, nesterov=True, weight_decay=0.25)
    numbers = torch.zeros(mine.size)
    mine.write(numbers, [(0, 0.0), (CLIP_NORM, 1.5)])
    assert theirs.apply(numbers.tolist()) == [(0, 0.0), (CLIP_NORM, 1.5)]
    first, second = there[0].param_groups
    assert (first["lr"], first["betas"], first["amsgrad"]) == (0.3, (0.5, 0.6), True)
    assert isinstance(second["lr"], Tensor) and float(second["lr"]) == pytest.approx(0.4)
    other = there[1].param_groups[0]
    assert (other["lr"], other["nesterov"], other["weight_decay"]) == (0.7, True, 0.25)
    assert "initial_lr" not in first


def test_what_only_the_server_changes_stays_its_own() -> None:
    """Schedule-free optimizers count in their groups; a worker's never moves, and must not set the server's back."""

    class Counting(torch.optim.SGD):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.1)
            self.defaults["k"] = 0
            for group in self.param_groups:
                group["k"] = 0

    p = nn.Parameter(torch.zeros(1))
    here, there = [Counting([p])], [Counting([p])]
    mine, theirs = HyperParameters(here), HyperParameters(there)
    there[0].param_groups[0]["k"] = 41
    here[0].param_groups[0]["lr"] = 0.05
    numbers = torch.zeros(mine.size)
    mine.write(numbers, [(0, 0.0)])
    theirs.apply(numbers.tolist())
    assert there[0].param_groups[0]["k"] == 41
    assert there[0].param_groups[0]["lr"] == 0.05


# ---- the worker on a link that only takes notes -----------------------------------------------------------------


class Note(Link):
    """Accepts everything; keeps what was pushed."""

    def __init__(self, layout: FlatLayout) -> None:
        self.rank, self.layout = 0, layout
        self.gradient = torch.zeros(layout.slot_bytes, dtype=torch.uint8)
        self.calls: list[str] = []
        self.ready_now: list[tuple[int, int]] = []
        self.pushes: list[dict[str, Any]] = []
        self.requests: list[Request] = []
        self.version = 0
        self.published = torch.zeros(layout.bytes, dtype=torch.uint8)
        self.reads = 0
        self.reply: Reply = Reply(kind=Say.GRANT, lease=1, numbers=(0, 4))

    def open_slot(self) -> None:
        assert not self.calls or self.calls[-1] == "closed", "opened twice"
        self.calls.append("open")
        self.ready_now = []

    def ready(self, start: int, stop: int) -> None:
        self.calls.append("ready")
        self.ready_now.append((start, stop))

    def close_slot(self) -> int:
        self.calls.append("closed")
        return self.calls.count("closed")

    def call(self, request: Request, *, timeout_s: float | None = None) -> Reply:
        self.requests.append(request)
        if request.kind is Ask.PUSH:
            layout = self.layout
            flags, buffers = (f.tolist() for f in layout.flags_of(self.gradient))
            gradients: list[Tensor | None] = []
            for i, entry in enumerate(layout.parameters):
                pool = entry.empty().zero_()
                if flags[i]:
                    layout.codec.add_to(pool, layout.gradient_of(self.gradient, i), entry, 1.0)
                gradients.append(pool if flags[i] else None)
            values = [
                layout.buffer_of(self.gradient, i).clone() if f else None for i, f in enumerate(buffers)
            ]
            self.pushes.append({"gradients": gradients, "buffers": values, "ready": list(self.ready_now)})
            if not request.flags & PushFlag.FINAL:
                return Reply(kind=Say.APPLIED)
        return self.reply

    def read_parameters(self, into: Tensor) -> int:
        self.reads += 1
        into.copy_(self.published)
        return self.version

    def newest_version(self) -> int:
        return self.version

    def read_state(self) -> bytes:
        return b""

    def close(self) -> None:
        pass


def start(
    codec: Any = None, overlap: bool | None = True, **options: Any
) -> tuple[nn.Sequential, Note, Worker]:
    model = mlp()
    optimizers = sgd(model)
    layout = FlatLayout.of(
        list(model.named_parameters()), list(model.named_buffers()), optimizers=optimizers, codec=codec
    )
    link = Note(layout)
    worker = Worker(
        link, layout, list(model.parameters()), list(model.buffers()), optimizers, codec=codec, overlap=overlap,
        **options,
    )  # fmt: skip
    worker.attach()
    link.published.copy_(worker._replica.host)
    return model, link, worker


def backward(model: nn.Module, scale: float = 1.0) -> None:
    torch.manual_seed(3)
    (scale * model(torch.randn(6, 5)).square().sum()).backward()


def pushed(model: nn.Module, link: Note) -> bool:
    expected = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return same(link.pushes[-1]["gradients"], expected)


def same(some: list[Tensor | None], others: list[Tensor | None]) -> bool:
    return all(
        (a is None) == (b is None) and (a is None or b is None or torch.equal(a, b))
        for a, b in zip(some, others, strict=True)
    )


def now(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


def test_attach_and_detach_keep_values_and_formats() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    before = {k: v.clone() for k, v in model.state_dict().items()}
    layout = FlatLayout.of(list(model.named_parameters()), list(model.named_buffers()))
    worker = Worker(Note(layout), layout, list(model.parameters()), list(model.buffers()))
    worker.attach()
    worker.attach()
    area = worker._replica.host
    inside = range(area.data_ptr(), area.data_ptr() + layout.bytes)
    assert all(v.data_ptr() in inside for v in model.state_dict().values())
    worker.detach()
    worker.detach()
    assert not any(v.data_ptr() in inside for v in model.state_dict().values())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    weight = model[0].weight
    assert isinstance(weight, Tensor) and weight.is_contiguous(memory_format=torch.channels_last)
    weight.sum().backward()  # and no hook is left to copy that


def test_a_pull_is_skipped_if_there_is_nothing_new_but_buffers_are_put_back() -> None:
    model, link, worker = start()
    norm: Any = model[1]
    assert worker.pull() == 0 and link.reads == 1
    model(torch.randn(6, 5))
    assert int(norm.num_batches_tracked) == 1
    assert worker.pull() == 0 and link.reads == 1
    assert int(norm.num_batches_tracked) == 0 and not bool(norm.running_mean.any())
    link.version = 3
    worker.layout.views(link.published)[0].fill_(7.0)
    assert worker.pull() == 3 and link.reads == 2
    assert torch.equal(weight_of(model), torch.full((7, 5), 7.0))


def test_a_parameter_that_was_moved_elsewhere_is_brought_back() -> None:
    model, link, worker = start()
    worker.pull()
    link.version = 1
    worker.layout.views(link.published)[0].fill_(7.0)
    weight_of(model).data = weight_of(model).data.clone()
    worker.pull()
    assert torch.equal(weight_of(model), torch.full((7, 5), 7.0))


def test_gradients_are_written_while_backward_runs_and_not_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, link, worker = start()
    worker.claim(0, 0)
    worker.pull()
    written: list[int] = []
    copy = worker._writer._copy
    monkeypatch.setattr(
        worker._writer, "_copy", lambda index, gradient: (written.append(index), copy(index, gradient))
    )
    backward(model)
    assert sorted(written) == list(range(6))
    assert link.calls == ["open", "ready"]  # one bucket: all gradients
    assert link.ready_now == [(worker.layout.gradient_ranges[0][0], worker.layout.gradient_ranges[-1][1])]
    expected = now(model)
    worker.push(steps=1, zeroes=1)
    assert same(link.pushes[-1]["gradients"], expected)
    assert len(written) == 6
    assert all(p.grad is None for p in model.parameters())
    assert link.calls == ["open", "ready", "closed"]


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.grad.mul_(0.5),
        lambda p: setattr(p, "grad", p.grad * 3),
        lambda p: setattr(p, "grad", None),
        lambda p: torch._foreach_mul_([p.grad], 0.5),
        lambda p: nn.utils.clip_grad_norm_([p], 1e-3),
    ],
)
@pytest.mark.parametrize("codec", [None, TopK(0.5)])
def test_gradients_changed_after_backward_are_pushed_as_they_are(
    change: Callable[[Any], Any], codec: Any
) -> None:
    model, link, worker = start(codec)
    worker.claim(0, 0)
    worker.pull()
    backward(model)
    change(model[2].weight)
    expected = now(model)
    worker.push(steps=1)
    received = link.pushes[-1]["gradients"]
    if codec is None:
        assert same(received, expected)
        if expected[4] is not None:
            assert (
                worker.layout.gradient_ranges[4] in link.pushes[-1]["ready"][1:]
            )  # a wire must send it again
    else:
        for i, (a, b) in enumerate(zip(received, expected, strict=True)):
            if b is None:
                assert a is None and worker._writer.memory.get(i) is None
            else:
                rest = worker._writer.memory[i]
                assert rest is not None
                assert torch.allclose(a + rest.view_as(b), b, rtol=0, atol=1e-14)  # nothing counted twice


def test_unscaling_behind_autograds_back_is_noticed() -> None:
    """`torch.amp.GradScaler` changes gradients without counting a version."""
    model, link, worker = start()
    worker.claim(0, 0)
    worker.pull()
    backward(model, scale=1024.0)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    versions = [g._version for g in gradients]
    found, inverse = torch.zeros((), dtype=torch.float32), torch.tensor(1 / 1024.0, dtype=torch.float32)
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse)
    assert [g._version for g in gradients] == versions
    expected = now(model)
    worker.push(steps=1)
    assert same(link.pushes[-1]["gradients"], expected)


def test_without_overlap_everything_is_written_at_the_push() -> None:
    model, link, worker = start(overlap=False)
    worker.claim(0, 0)
    worker.pull()
    backward(model)
    assert link.calls == []
    expected = now(model)
    worker.push(steps=1)
    assert same(link.pushes[-1]["gradients"], expected)


def test_micro_batches_without_copies() -> None:
    model, link, worker = start()
    worker.claim(0, 0)
    worker.pull()
    with worker.no_copy():
        backward(model)
        assert link.calls == []
    backward(model)
    assert link.calls[0] == "open"
    expected = now(model)
    worker.push(steps=1)
    assert same(link.pushes[-1]["gradients"], expected)


def test_two_backward_passes_push_their_sum() -> None:
    model, link, worker = start(TopK(1.0))
    worker.claim(0, 0)
    worker.pull()
    backward(model)
    backward(model)
    expected = now(model)
    worker.push(steps=1)
    received = link.pushes[-1]["gradients"]
    for a, b in zip(received, expected, strict=True):
        assert b is not None and torch.allclose(a, b, rtol=0, atol=1e-14)


def test_sparse_gradients_travel_dense() -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    layout = FlatLayout.of(list(embedding.named_parameters()))
    link = Note(layout)
    worker = Worker(link, layout, list(embedding.parameters()))
    worker.attach()
    worker.claim(0, 0)
    embedding(torch.tensor([1, 3, 3])).sum().backward()
    gradient = embedding.weight.grad
    assert gradient is not None and gradient.is_sparse
    expected = gradient.to_dense()
    worker.push()
    assert torch.equal(link.pushes[-1]["gradients"][0], expected)


def test_buffers_travel_as_changes() -> None:
    model, link, worker = start()
    worker.claim(0, 0)
    worker.pull()
    norm: Any = model[1]
    backward(model)
    mean = norm.running_mean.clone()
    worker.push(PushFlag(0), steps=1)
    first = link.pushes[-1]["buffers"]
    assert (
        torch.equal(first[0], mean) and int(first[2]) == 1
    )  # running_mean began at 0; the counter is absolute
    worker.push(PushFlag(0), steps=1)
    assert link.pushes[-1]["buffers"][0] is None  # has been told already
    backward(model)
    worker.push(steps=1)
    assert torch.allclose(link.pushes[-1]["buffers"][0], norm.running_mean - mean, rtol=0, atol=1e-15)


def test_substeps_are_counted_and_then_pulls_are_never_skipped() -> None:
    model, link, worker = start()
    worker.claim(0, 0)
    worker.pull()
    for _ in range(2):
        backward(model)
        worker.push(PushFlag(0), steps=1)
        reads = link.reads
        worker.pull()
        assert link.reads == reads + 1
    backward(model)
    worker.push(steps=1)
    assert [r.substep for r in link.requests if r.kind is Ask.PUSH] == [0, 1, 2]
    worker.claim(0, 1)
    backward(model)
    worker.push(steps=1)
    assert link.requests[-1].substep == 0


def test_large_models_are_announced_in_buckets_from_the_end() -> None:
    torch.set_default_dtype(torch.float32)
    model = nn.Sequential(*(nn.Linear(1500, 1500, bias=False) for _ in range(6)))  # 9 MB each
    layout = FlatLayout.of(list(model.named_parameters()))
    link = Note(layout)
    worker = Worker(link, layout, list(model.parameters()))
    worker.attach()
    worker.claim(0, 0)
    model(torch.randn(1, 1500)).sum().backward()
    ranges = layout.gradient_ranges
    assert link.ready_now == [
        (ranges[4][0], ranges[5][1]),
        (ranges[2][0], ranges[3][1]),
        (ranges[0][0], ranges[1][1]),
    ]
    worker.detach()


def test_a_dummy_batch_is_not_pushed_and_grants_are_given_back() -> None:
    _, link, worker = start()
    with pytest.raises(RuntimeError, match="nothing was granted"):
        worker.push()
    link.reply = Reply(kind=Say.GRANT, lease=9)
    worker.claim(0, 0)
    with pytest.raises(RuntimeError, match="dummy"):
        worker.push()
    worker.give_back()
    assert link.requests[-1].kind is Ask.CLAIM
    link.reply = Reply(kind=Say.GRANT, lease=10, numbers=(0, 4, 8, 9))
    worker.claim(0, 0)
    worker.give_back()
    worker.give_back()
    assert [(r.kind, r.lease) for r in link.requests[-2:]] == [(Ask.CLAIM, 0), (Ask.RETURN, 10)]


def test_defaults_of_a_push_come_from_the_grant() -> None:
    times = iter(range(100))
    model, link, worker = start(clock=lambda: float(next(times)))
    link.reply = Reply(kind=Say.GRANT, lease=10, numbers=(0, 4, 8, 9))
    worker.claim(3, 2)
    backward(model)
    worker.push(steps=1, zeroes=1)
    request = link.requests[-1]
    assert (request.epoch, request.tick, request.lease, request.samples, request.weight) == (3, 2, 10, 5, 5.0)
    assert request.compute_s == 1.0
    worker.push(samples=3, weight=1.5, compute_s=7.0, lease=11, epoch=4, tick=5, substep=6)
    request = link.requests[-1]
    assert (request.epoch, request.tick, request.substep, request.lease) == (4, 5, 6, 11)
    assert (request.samples, request.weight, request.compute_s) == (3, 1.5, 7.0)


def test_clipping_travels_with_the_next_push_only() -> None:
    model, link, worker = start()
    worker.claim(0, 0)
    clips = []
    for setting in (("norm", 0.5), ("value", 0.25), None, ("norm", None)):
        if setting is not None:
            worker.clip(0, setting[1], setting[0])
        backward(model)
        worker.push(steps=1)
        clips.append(tuple(worker.layout.numbers_of(link.gradient)[:2].tolist()))
    assert clips == [(CLIP_NORM, 0.5), (CLIP_VALUE, 0.25), (0.0, 0.0), (0.0, 0.0)]
    with pytest.raises(ValueError, match="'norm' or 'value'"):
        worker.clip(0, 1.0, "infinity")


def test_saps_return_is_asked_for_by_the_version_gap() -> None:
    _, link, worker = start()
    grant = Reply(kind=Say.GRANT, version=5, flags=4, numbers=(0, 8), micro=2)
    asked = []
    for version in range(5, 11):
        link.version = version
        asked.append(worker.wants_return(grant))
    assert asked == [False] * 4 + [True] * 2
    assert not worker.wants_return(Reply(kind=Say.GRANT, version=5))
    assert worker.wants_return(grant, threshold=1)


def test_the_server_tells_the_threshold_of_its_policy() -> None:
    setting = Setting(mlp(), sgd, Saps(threshold=4), 1)
    grants: list[Reply] = []

    def body(trainee: Trainee) -> None:
        trainee.worker.begin_epoch(0, [8])
        grants.append(trainee.worker.claim(0, 0))

    Script(
        setting, automatic(torch.zeros(8, 5), torch.zeros(8, 2), loss), body, workers=1, work_s=constant
    ).run()
    assert grants[0].flags == 4


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


def constant(rank: int, samples: int, now_s: float) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"codec": "bf16"}, "codec='bf16' is not the layout's"),
        ({"parameters": []}, "0 parameters, the layout has 6"),
        ({"parameters": "swapped"}, r"'0\.weight'"),
        ({"optimizers": []}, "other optimizers"),
        ({"buffers": ()}, "0 buffers, the layout has 3"),
    ],
)
def test_a_worker_must_fit_the_layout(change: dict[str, Any], words: str) -> None:
    model = mlp()
    optimizers = sgd(model)
    layout = FlatLayout.of(list(model.named_parameters()), list(model.named_buffers()), optimizers=optimizers)
    arguments: dict[str, Any] = {
        "parameters": list(model.parameters()), "buffers": list(model.buffers()), "optimizers": optimizers, **change,
    }  # fmt: skip
    if arguments["parameters"] == "swapped":
        arguments["parameters"] = list(model.parameters())[::-1]
    with pytest.raises(ValueError, match=words):
        Worker(Note(layout), layout, **arguments)


def test_pull_needs_attach() -> None:
    _, _, worker = start()
    worker.detach()
    with pytest.raises(RuntimeError, match="attach"):
        worker.pull()


# ---- with a server ----------------------------------------------------------------------------------------------


def test_training_with_compressed_pushes_approaches_that_without() -> None:
    torch.manual_seed(0)
    x = torch.randn(48, 5)
    y = x @ torch.randn(5, 2)
    ends = ends_of(48, 12)
    model = nn.Linear(5, 2)
    finals: dict[str, float] = {}
    for codec in (None, "bf16", "fp16", TopK(0.3)):
        setting = Setting(model, lambda m: [torch.optim.SGD(m.parameters(), lr=0.1)], Bsp(), 2, codec=codec)

        def body(trainee: Trainee) -> None:
            for epoch in range(12):
                trainee.epoch(epoch, ends)

        Script(setting, automatic(x, y, loss), body, workers=2, work_s=constant).run()
        finals[repr(codec)] = float(loss(setting.model, x, y).detach())
    initial = float(loss(model, x, y).detach())
    assert finals["None"] < 0.01 * initial
    assert finals["'bf16'"] == pytest.approx(finals["None"], rel=0.2, abs=1e-4)
    assert finals["'fp16'"] == pytest.approx(finals["None"], rel=0.05, abs=1e-4)
    assert finals["TopK(ratio=0.3)"] < 0.05 * initial


def test_state_and_metrics_reach_a_worker() -> None:
    x, y = torch.randn(24, 5), torch.randn(24, 2)
    seen: dict[str, Any] = {}

    def body(trainee: Trainee) -> None:
        trainee.epoch(0, ends_of(24, 6))
        met = trainee.worker.meet(1, "the end")
        assert list(met.numbers) == [0, 1]
        if trainee.rank == 0:
            seen["metrics"] = trainee.worker.parse_metrics(met)
            seen["notices"] = trainee.worker.parse_notices(met)
            seen["state"] = trainee.worker.state()
        trainee.worker.meet(2)

    setting = Setting(mlp(), sgd, Bsp(), 2)
    with threads(setting, automatic(x, y, loss), body, workers=2):
        pass
    assert seen["notices"] == []
    assert seen["metrics"]["samples"] == {"0": 12, "1": 12}
    assert seen["metrics"]["staleness"] == {"0": 24} and seen["metrics"]["stale_fraction"] == 0.0
    state = seen["state"]
    momentum = state["optimizers"][0]["state"][0]["momentum_buffer"]
    assert torch.equal(
        momentum, setting.optimizers[0].state[next(setting.model.parameters())]["momentum_buffer"]
    )
    assert (state["version"], state["coordinator"]["tick"]) == (4, 4)


def test_a_killed_worker_raises_and_the_other_goes_on() -> None:
    x, y = torch.randn(24, 5), torch.randn(24, 2)
    lost: list[int] = []
    dead, running = threading.Event(), threading.Event()

    def die(trainee: Trainee) -> None:
        running.wait()  # until there is a transport to kill by
        trainee.worker.begin_epoch(0, ends)
        trainee.worker.claim(0, 0)
        transport.kill(1)
        with pytest.raises(ServerLostError, match="killed"):
            trainee.worker.push()
        lost.append(1)
        trainee.worker.abort("never raises")
        raise Dead

    def body(trainee: Trainee) -> None:
        if trainee.rank == 1:
            try:
                die(trainee)
            finally:
                dead.set()
        dead.wait()
        trainee.epoch(0, ends)

    class Dead(Exception):
        pass

    ends = ends_of(24, 6)
    setting = Setting(mlp(), sgd, Flexible(), 2)
    with pytest.raises(Dead), threads(setting, automatic(x, y, loss), body, workers=2) as transport:
        running.set()
    assert lost == [1]
    assert setting.coordinator.version == len(ends)


def test_a_server_that_fails_says_why_before_it_ends() -> None:
    setting = Setting(mlp(), sgd, Bsp(), 1, clip=broken)
    transport = InProcess(1, setting.layout.slot_bytes, setting.layout.bytes)
    server = setting.serve_on(transport.listener)
    trainee = setting.trainee(0, transport.link(0), automatic(torch.randn(4, 5), torch.randn(4, 2), loss))
    errors: list[BaseException] = []

    def run() -> None:
        try:
            serve(server, transport.listener, lambda: 0.0)
        except ArithmeticError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    with pytest.raises(RemoteFailureError, match=r"parameter server failed: ArithmeticError: no such norm"):
        trainee.epoch(0, [4])
    thread.join()
    assert len(errors) == 1
    transport.listener.close()
    with pytest.raises(ServerLostError):
        trainee.worker.claim(0, 0)


def broken(index: int) -> None:
    raise ArithmeticError("no such norm")


def test_a_server_without_workers_ends_when_its_starter_is_gone() -> None:
    setting = Setting(mlp(), sgd, Bsp(), 1)
    transport = InProcess(1, setting.layout.slot_bytes, setting.layout.bytes)
    server = setting.serve_on(transport.listener)
    answers = iter([False, False, True])
    serve(server, transport.listener, lambda: 0.0, orphaned=lambda: next(answers), look_s=0.001)
    assert next(answers, None) is None
    transport.listener.close()
