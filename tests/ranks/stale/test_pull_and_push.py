"""What a worker pulls, writes into its slot and pushes, and when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.stale.runtime.hyper_parameters import CLIP_NORM, CLIP_VALUE
from lightning_hetero.stale.runtime.layout import FlatLayout
from lightning_hetero.stale.runtime.work.worker import Worker
from lightning_hetero.transport.base import Ask, Reply, Say
from lightning_hetero.transport.flags import PushFlag
from tests.ranks.stale.kit import Pusher
from tests.ranks.stale.note import Note, backward, mlp, now, same, start, weight_of

pytestmark = pytest.mark.usefixtures("float64")


def test_attach_and_detach_keep_values_and_formats() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    before = {k: v.clone() for k, v in model.state_dict().items()}
    layout = FlatLayout.of(list(model.named_parameters()), list(model.named_buffers()))
    worker = Worker(Note(layout), layout, list(model.parameters()), lambda: list(model.buffers()))
    area = worker.weights.area
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
    link.layout.views(link.published)[0].fill_(7.0)
    assert worker.pull() == 3 and link.reads == 2
    assert torch.equal(weight_of(model), torch.full((7, 5), 7.0))


def test_a_parameter_that_was_moved_elsewhere_is_brought_back() -> None:
    model, link, worker = start()
    worker.pull()
    link.version = 1
    link.layout.views(link.published)[0].fill_(7.0)
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
        worker._writer, "_copy", lambda gradients: (written.extend(i for i, _ in gradients), copy(gradients))
    )
    backward(model)
    assert sorted(written) == list(range(6))
    assert link.calls == ["open", "ready"]  # one bucket: all gradients
    assert link.ready_now == [(link.layout.gradient_ranges[0][0], link.layout.gradient_ranges[-1][1])]
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
@pytest.mark.parametrize("overlap", [True, False])
def test_gradients_changed_after_backward_are_pushed_as_they_are(change: Callable[[Any], Any], overlap: bool) -> None:
    model, link, worker = start(overlap)
    worker.claim(0, 0)
    worker.pull()
    backward(model)
    assert bool(link.calls) == overlap
    change(model[2].weight)
    expected = now(model)
    worker.push(steps=1)
    received = link.pushes[-1]["gradients"]
    assert same(received, expected)
    if overlap and expected[4] is not None:
        assert link.layout.gradient_ranges[4] in link.pushes[-1]["ready"][1:]  # a wire must send it again


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


def test_two_backward_passes_push_their_sum() -> None:
    model, link, worker = start()
    worker.claim(0, 0)
    worker.pull()
    backward(model)
    backward(model)
    expected = now(model)
    worker.push(steps=1)
    received = link.pushes[-1]["gradients"]
    for a, b in zip(received, expected, strict=True):
        assert b is not None and torch.allclose(a, b, rtol=0, atol=1e-14)
    assert set(link.layout.gradient_ranges) <= set(link.pushes[-1]["ready"])  # a wire must send them again


def test_sparse_gradients_travel_dense() -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    layout = FlatLayout.of(list(embedding.named_parameters()))
    link = Note(layout)
    worker = Pusher(link, layout, list(embedding.parameters()))
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


def test_after_a_substep_pulls_are_never_skipped() -> None:
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


def test_large_models_are_announced_in_buckets_from_the_end() -> None:
    torch.set_default_dtype(torch.float32)
    model = nn.Sequential(*(nn.Linear(1500, 1500, bias=False) for _ in range(6)))  # 9 MB each
    layout = FlatLayout.of(list(model.named_parameters()))
    link = Note(layout)
    worker = Pusher(link, layout, list(model.parameters()))
    worker.claim(0, 0)
    model(torch.randn(1, 1500)).sum().backward()
    ranges = layout.gradient_ranges
    assert link.ready_now == [
        (ranges[4][0], ranges[5][1]),
        (ranges[2][0], ranges[3][1]),
        (ranges[0][0], ranges[1][1]),
    ]
    worker.detach()


def test_clipping_travels_with_the_next_push_only() -> None:
    model, link, worker = start()
    worker.claim(0, 0)
    clips = []
    for setting in (("norm", 0.5), ("value", 0.25), None, ("norm", None)):
        if setting is not None:
            worker.clip(0, setting[1], setting[0])
        backward(model)
        worker.push(steps=1)
        clips.append(tuple(link.layout.numbers_of(link.gradient)[:2].tolist()))
    assert clips == [(CLIP_NORM, 0.5), (CLIP_VALUE, 0.25), (0.0, 0.0), (0.0, 0.0)]
    with pytest.raises(ValueError, match="'norm' or 'value'"):
        worker.clip(0, 1.0, "infinity")


def test_saps_return_is_asked_for_by_the_version_gap() -> None:
    _, link, worker = start()
    grant = Reply(kind=Say.ASSIGNED, version=5, flags=4, numbers=(0, 8), micro=2)
    asked = []
    for version in range(5, 11):
        link.version = version
        asked.append(worker.wants_return(grant))
    assert asked == [False] * 4 + [True] * 2
    assert not worker.wants_return(Reply(kind=Say.ASSIGNED, version=5))


def test_a_module_on_several_devices_is_refused() -> None:
    model = mlp()
    layout = FlatLayout.of(list(model.named_parameters()))
    model[2].to("meta")
    with pytest.raises(ValueError, match=r"on cpu and meta: .* on one device"):
        Worker(Note(layout), layout, list(model.parameters()))


@pytest.mark.parametrize("ask", ["epoch", "claim", "push"])
def test_people_hear_what_the_server_says_whatever_was_asked(ask: str) -> None:
    class Says(Note):
        def call(self, request: Any, **options: Any) -> Reply:
            reply = super().call(request, **options)
            return replace(reply, text="rank 1 died\nrank 2 died") if request.kind.name.lower() == ask else reply

    told: list[str] = []
    model = mlp()
    layout = FlatLayout.of(list(model.named_parameters()), list(model.named_buffers()))
    worker = Pusher(Says(layout), layout, list(model.parameters()), lambda: list(model.buffers()), tell=told.append)
    worker.begin_epoch(0, [4])
    worker.claim(0, 0)
    backward(model)
    worker.push()
    assert told == ["rank 1 died", "rank 2 died"]
