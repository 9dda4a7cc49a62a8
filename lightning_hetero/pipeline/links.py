"""The links of one rank to its neighbours in a pipeline: first in, first out, beside computation (layer T).

    main thread      send ──► gloo ──► sender thread, waits until it is out
                  receive ◄── queue ◄── receiver thread ◄── gloo

Each neighbour has a sender and a receiver thread, which wait without holding the interpreter. The receiver takes in
what comes at once, so a transfer overlaps computation on both sides. A message goes as a head of fixed size, with the
header in it as a rule, and the payload.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections.abc import Iterable, Mapping
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from lightning_hetero.pipeline.failures import FailureBoard
from lightning_hetero.pipeline.messages import Message, pack, unpack
from lightning_hetero.transport.frames import FOREVER
from lightning_hetero.transport.rendezvous import first_line
from lightning_hetero.types import Link

__all__ = ["Links"]

LOOK_S = 1.0  # at the failure board, while waiting
_ABORT_S = 1.0  # how long threads may take to notice that a connection is closed
_HEAD_BYTES = 1024
_SIZES = struct.Struct("<QQd")  # bytes of header and payload, when it was sent [s, time.monotonic]
_INLINE_BYTES = _HEAD_BYTES - _SIZES.size
_Come = tuple[bytes, Tensor, float]  # header, payload, from when on they may be used [s, time.monotonic]
_TAG, _TAG_OF_THE_END = 0x9A55, 0x9A56


class Links:
    """All links of one rank.

    Args:
        wire: gloo process group with this rank and its neighbours in it; only carries these links' messages from one
            to the other, so several `Links`, of different neighbours or one after the other, may share it.
        rank: this process, global.
        peers: its neighbours, global ranks.
        device: where received tensors are put; payloads from elsewhere than the CPU go through pinned memory
            [CUDA, untested].
        failures: looked at while waiting.
        timeout_s: how long `receive` waits at most.
        emulated: by (source, target): a message can be received no earlier than over such a link. Ranks share a clock,
            so they must be on one machine.
    """

    def __init__(
        self,
        wire: dist.ProcessGroup,
        rank: int,
        peers: Iterable[int],
        *,
        device: torch.device,
        failures: FailureBoard,
        timeout_s: float,
        emulated: Mapping[tuple[int, int], Link] | None = None,
    ) -> None:
        self._wire = wire
        self._device = device
        self._failures = failures
        self._timeout_s = timeout_s
        self._broken = False
        emulated = emulated or {}
        self._senders: dict[int, _Sender] = {}
        self._receivers: dict[int, _Receiver] = {}
        for peer in sorted(set(peers)):
            at = dist.get_group_rank(wire, peer)
            self._senders[peer] = _Sender(wire, at, f"pipeline-send-{rank}-{peer}", device)
            self._receivers[peer] = _Receiver(
                wire, at, f"pipeline-receive-{peer}-{rank}", device, emulated.get((peer, rank))
            )

    def send(self, peer: int, message: Message) -> None:
        """Posts a message, does not wait for it to be out.

        Raises:
            RuntimeError: the peer is gone; names the cause.
            TypeError: a value that cannot travel.
        """
        sender = self._senders[peer]
        sender.post(message)
        if sender.broken is not None:
            raise self._failures.lost(peer, sender.broken)

    def flush(self, peer: int) -> None:
        """Waits until everything posted is out."""
        sender, deadline_s = self._senders[peer], time.monotonic() + self._timeout_s
        while not sender.wait_out(LOOK_S):
            if sender.broken is not None:
                raise self._failures.lost(peer, sender.broken)
            self._look(peer, deadline_s, "took nothing")

    def receive(self, peer: int) -> Message:
        """Waits for the next message.

        Raises:
            RuntimeError: a rank has failed, the peer is gone, or nothing came in time; names rank and cause.
        """
        receiver, deadline_s = self._receivers[peer], time.monotonic() + self._timeout_s
        while (came := receiver.take(LOOK_S)) is None:
            self._look(peer, deadline_s, "sent nothing")
        if isinstance(came, str):
            raise self._failures.lost(peer, came)
        header, payload, usable_s = came
        while (early_s := usable_s - time.monotonic()) > 0.0:  # over an emulated link it would still be on its way
            time.sleep(min(early_s, LOOK_S))
            if early_s > LOOK_S:
                self._failures.check()
        return unpack(header, payload.to(self._device, non_blocking=True))

    def close(self) -> None:
        """Ends the links when all has been sent and the neighbours do the same; they can be waited for. Idempotent.

        Raises:
            RuntimeError: a neighbour is gone, or does not close its links in time.
        """
        if self._broken:
            return
        for sender in self._senders.values():
            sender.post(None)
        deadline_s = time.monotonic() + self._timeout_s
        try:
            for peer, receiver in self._receivers.items():
                while not (receiver.join(LOOK_S) and self._senders[peer].join(LOOK_S)):
                    self._look(peer, deadline_s, "did not close its links")
        except BaseException:
            self.abort()
            raise
        self._broken = True

    def abort(self) -> None:
        """Ends the links at once, and with them all others that share the wire: neighbours that wait are told."""
        if self._broken:
            return
        self._broken = True
        for sender in self._senders.values():
            sender.give_up()
        # Gloo offers no abort for a receive under way, but closes its connections when any of its waits times out.
        for receiver in self._receivers.values():
            with contextlib.suppress(RuntimeError):  # always; and some are closed already
                end = torch.empty(1, dtype=torch.uint8)
                work: Any = self._wire.recv([end], receiver.peer, _TAG_OF_THE_END)
                work.wait(timedelta(milliseconds=1))
        # A send that was posted while the connection broke, gloo may never end: that thread (a daemon) is left alone.
        deadline_s = time.monotonic() + _ABORT_S
        for worker in (*self._receivers.values(), *self._senders.values()):
            worker.join(max(0.0, deadline_s - time.monotonic()))

    def _look(self, peer: int, deadline_s: float, what: str) -> None:
        self._failures.check()
        if time.monotonic() >= deadline_s:
            raise self._failures.lost(peer, f"it {what} for {self._timeout_s:g} s, the timeout")


class _Worker:
    """A thread for one direction of one link. A daemon: what it waits for may never come."""

    def __init__(self, wire: dist.ProcessGroup, peer: int, name: str, device: torch.device) -> None:
        self._wire: Any = wire  # torch's stubs do not know of send and recv
        self.peer = peer
        self._device = device
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        if self._device.type == "cuda":  # else pinned memory would belong to the first one [CUDA, untested]
            torch.cuda.set_device(self._device)
        self._work()

    def _work(self) -> None:
        raise NotImplementedError

    def join(self, timeout_s: float) -> bool:
        """Returns whether the thread has ended, after at most ``timeout_s``."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


class _Sender(_Worker):
    """Sends what is posted.

    Attributes:
        broken: why nothing can be sent any more; None as long as it can.
    """

    def __init__(self, wire: dist.ProcessGroup, peer: int, name: str, device: torch.device) -> None:
        super().__init__(wire, peer, name, device)
        self.broken: str | None = None
        self._posted: SimpleQueue[tuple[list[Tensor], list[Any], Any] | None] = SimpleQueue()
        self._under_way = 0
        self._out = threading.Condition()
        self._thread.start()

    def post(self, message: Message | None) -> None:
        """Posts a message; None: the last, without a header."""
        header, payload = (b"", torch.empty(0)) if message is None else pack(message)
        ready = None
        if payload.device.type != "cpu":  # [CUDA, untested]
            on_host = torch.empty(payload.shape, dtype=payload.dtype, pin_memory=True)
            on_host.copy_(payload, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
            payload = on_host
        head = bytearray(_HEAD_BYTES)
        _SIZES.pack_into(head, 0, len(header), payload.numel(), time.monotonic())
        parts = [torch.frombuffer(head, dtype=torch.uint8)]
        if len(header) <= _INLINE_BYTES:
            head[_SIZES.size : _SIZES.size + len(header)] = header
        else:
            parts.append(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        if payload.numel():
            parts.append(payload)
        with self._out:
            self._under_way += 1
        works: list[Any] = []
        if self._device.type == "cpu":  # else the thread sends it when it has been copied to the host
            try:
                works = self._send(parts)
            except RuntimeError as error:
                self.broken = first_line(error)
        self._posted.put((parts, works, ready))
        if message is None:
            self._posted.put(None)

    def give_up(self) -> None:
        """Lets the thread end after what it is at."""
        self._posted.put(None)

    def wait_out(self, timeout_s: float) -> bool:
        """Returns whether all is out, after at most ``timeout_s``."""
        with self._out:
            return self._out.wait_for(lambda: self._under_way == 0, timeout_s)

    def _work(self) -> None:
        try:
            while (job := self._posted.get()) is not None:
                parts, works, ready = job
                if ready is not None:
                    ready.synchronize()
                works = works or self._send(parts)
                while works:
                    works.pop(0).wait(FOREVER)
                del job, parts  # their memory must not live until the next one comes
                with self._out:
                    self._under_way -= 1
                    self._out.notify_all()
        except RuntimeError as error:
            self.broken = first_line(error)

    def _send(self, parts: list[Tensor]) -> list[Any]:
        return [self._wire.send([part], self.peer, _TAG) for part in parts]


class _Receiver(_Worker):
    """Takes in what comes."""

    def __init__(
        self, wire: dist.ProcessGroup, peer: int, name: str, device: torch.device, emulated: Link | None
    ) -> None:
        super().__init__(wire, peer, name, device)
        self._emulated = emulated
        self._free_s = 0.0  # when the emulated link is
        self._come: SimpleQueue[_Come | str] = SimpleQueue()
        self._thread.start()

    def take(self, timeout_s: float) -> _Come | str | None:
        """Returns what comes next, why none will come, or None after the timeout."""
        try:
            return self._come.get(timeout=timeout_s)
        except Empty:
            return None

    def _work(self) -> None:
        try:
            while (came := self._next()) is not None:
                self._come.put(came)
                del came  # its memory must not live until the next one comes
            self._come.put("it has closed its links")
        except RuntimeError as error:
            self._come.put(f"its connection is closed: {first_line(error)}")

    def _next(self) -> _Come | None:
        """Returns the next message; None after the last."""
        head = self._receive(_HEAD_BYTES).numpy().tobytes()
        header_bytes, payload_bytes, sent_s = _SIZES.unpack_from(head)
        if not header_bytes:
            return None
        if header_bytes <= _INLINE_BYTES:
            header = head[_SIZES.size : _SIZES.size + header_bytes]
        else:
            header = self._receive(header_bytes).numpy().tobytes()
        payload = self._receive(payload_bytes, pinned=self._device.type == "cuda")
        return header, payload, self._usable_s(sent_s, payload_bytes)

    def _receive(self, size_bytes: int, *, pinned: bool = False) -> Tensor:
        target = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pinned)
        if size_bytes:
            self._wire.recv([target], self.peer, _TAG).wait(FOREVER)
        return target

    def _usable_s(self, sent_s: float, size_bytes: int) -> float:
        """Returns when the message arrives over the emulated link, which carries one after the other."""
        if self._emulated is None:
            return 0.0
        self._free_s = max(sent_s, self._free_s) + size_bytes / self._emulated.bandwidth_bytes_per_s
        return self._free_s + self._emulated.latency_s
