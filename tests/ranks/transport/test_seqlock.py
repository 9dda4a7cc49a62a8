"""What transports are made of: packed messages, slots, published parameters, frames, mailboxes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.transport import seqlock as areas
from lightning_hetero.transport.base import Ask, Reply, Request, Say
from lightning_hetero.transport.link import _gaps
from lightning_hetero.transport.seqlock import PAGE_BYTES, ParameterArea

int32, int64 = st.integers(-(1 << 31), (1 << 31) - 1), st.integers(-(1 << 63), (1 << 63) - 1)
uint16, uint32 = st.integers(0, (1 << 16) - 1), st.integers(0, (1 << 32) - 1)
payload = {"numbers": st.lists(int64).map(tuple), "text": st.text()}
reals = st.floats(allow_nan=False)

requests = st.builds(
    Request, kind=st.sampled_from(Ask), epoch=int32, global_step=int32, substep=uint16, assignment=int64, samples=int32,
    weight=reals, compute_s=reals, flags=uint32, steps=uint32, zeroes=uint32,
    slot=st.integers(0, (1 << 64) - 1), **payload,
)  # fmt: skip
replies = st.builds(
    Reply, kind=st.sampled_from(Say), epoch=int32, global_step=int32, version=int64, assignment=int64, micro=uint16,
    hint_start=int64, hint_end=int64, flags=uint32, **payload,
)  # fmt: skip


# ---- messages ---------------------------------------------------------------------------------------------


@given(requests | replies)
def test_a_message_survives_packing(message: Request | Reply) -> None:
    packed = message.pack()
    head, body = packed[: message.SIZE], packed[message.SIZE :]
    assert type(message).body_size(head) == len(body)
    assert type(message).unpack(head, body) == message


@given(st.sampled_from([Request, Reply]), st.binary(max_size=200), st.binary(max_size=40))
def test_garbage_is_a_message_or_a_value_error(kind: type[Request] | type[Reply], head: bytes, body: bytes) -> None:
    try:
        message = kind.unpack(head, body)
    except ValueError:
        return
    assert len(message.pack()) == len(head) + len(body)


@pytest.mark.parametrize("field", ["epoch", "substep", "steps", "slot"])
def test_a_number_too_large_for_its_field_is_named(field: str) -> None:
    with pytest.raises(ValueError, match=rf"{field}={1 << 64}"):
        Request(kind=Ask.PUSH, **{field: 1 << 64}).pack()


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)).map(lambda p: (min(p), max(p)))))
def test_gaps_are_what_spans_leave(spans: list[tuple[int, int]]) -> None:
    covered = {at for start, stop in spans for at in range(start, stop)}
    gaps = [at for start, stop in _gaps(spans, 20) for at in range(start, stop)]
    assert gaps == [at for at in range(20) if at not in covered]


# ---- parameters ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("published", "copies"), [(0, 1), (1, 1), (2, 2), (3, 2)])
def test_a_reader_retries_only_if_overtaken_twice(
    published: int, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the reader copies, the writer publishes so many more versions."""
    area = ParameterArea(torch.zeros(ParameterArea.size(10), dtype=torch.uint8), 10)
    area.publish(1, torch.full((10,), 1, dtype=torch.uint8))
    into, made, copy_bytes = torch.zeros(10, dtype=torch.uint8), 0, areas.copy_bytes

    def overtaken(out: torch.Tensor, source: torch.Tensor, threads: int) -> None:
        nonlocal made
        if out is not into:
            copy_bytes(out, source, threads)
            return
        copy_bytes(out[:5], source[:5], threads)
        for version in range(2, 2 + published) if not made else ():
            area.publish(version, torch.full((10,), version, dtype=torch.uint8))
        made += 1
        copy_bytes(out[5:], source[5:], threads)

    monkeypatch.setattr(areas, "copy_bytes", overtaken)
    version = area.read(into)
    assert made == copies and into.tolist() == [version] * 10
    assert version == (1 if copies == 1 else 1 + published)


@pytest.mark.parametrize("threads", [1, 2, 3, 9])
@pytest.mark.parametrize("size_bytes", [1, PAGE_BYTES - 1, 3 * PAGE_BYTES, 10 * PAGE_BYTES + 7])
def test_threads_copy_every_byte_and_no_other(
    size_bytes: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(areas, "_LARGE_BYTES", PAGE_BYTES)
    source = torch.arange(size_bytes).to(torch.uint8)
    memory = torch.full((size_bytes + 2,), 99, dtype=torch.uint8)
    areas.copy_bytes(memory[1:-1], source, threads)
    assert torch.equal(memory[1:-1], source) and memory[0] == memory[-1] == 99
