"""The end of a link on a device, with two threads: what must wait for the device does so during computation (layer T).

    training thread   send ──► copy to the host, during computation ──► sending thread ──► gloo
                      receive ◄── queue ◄── copy to the device, during it ◄── receiving thread ◄── gloo

Between devices that have a `DirectWay` the head alone goes over gloo, and the payload never leaves the devices; except
the first messages of a kind, during which the devices may still have to load what they are going to run.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor

from lightning_hetero.measure.device import Stamp, device_of, is_out_of_memory
from lightning_hetero.pipeline.runtime.execute.direct_ways import DirectWay
from lightning_hetero.pipeline.runtime.execute.messages import Message, pack, unpack
from lightning_hetero.pipeline.runtime.execute.stage_link import CLOSED, HEAD_BYTES, STAMP, Job, StageLink
from lightning_hetero.transport.awake import awake_s
from lightning_hetero.transport.failures import LOOK_S
from lightning_hetero.transport.sockets import FOREVER, first_line

_TAG_CLEAR = 0x9A57
_Come = tuple[bytes, Tensor, Stamp | None]  # header, payload, after what on the device it may be used


class DeviceLink(StageLink):
    """This rank's end of the link to one neighbour, for layers on a device.

    Args:
        wire, peer: see `StageLink`.
        way: from device to device; None: payloads go over the wire.
        **given: see there.
    """

    def __init__(self, wire: Any, peer: int, *, way: DirectWay | None, **given: Any) -> None:
        self._way = way
        self._seen: set[Any] = set()  # kinds of messages
        self._direct: set[Any] = set()  # those that go directly
        self._streams = [given["device"].side_stream() for _ in range(2)]
        self._come: SimpleQueue[_Come | str | Exception] = SimpleQueue()
        super().__init__(wire, peer, **given)
        self._receiver = threading.Thread(
            target=self._take_in, name=f"pipeline-receive-{peer}-{given['rank']}", daemon=True
        )
        self._receiver.start()

    _at_once = False

    # ---- out ---------------------------------------------------------------------------------------------------------

    def _post(self, message: Message) -> None:
        way, device = self._way, self._device
        self._seen.add(message.kind)
        if way is not None and message.kind in self._direct:
            header, payload = pack(message)
            direct, ready = (payload.to(device.device), device.stamp()) if payload.numel() else (None, None)
            parts = self._parts(header, torch.empty(HEAD_BYTES, dtype=torch.uint8), payload.numel())
            self._put(Job(parts, [], ready, direct))
            return
        header, block = pack(message, front_bytes=HEAD_BYTES)
        ready = None
        if device_of(block.device).asynchronous:
            block, ready = self._on_host(block)
        self._put(Job(self._parts(header, block), [], ready))

    def _on_host(self, block: Tensor) -> tuple[Tensor, Stamp]:
        """Starts to copy a block to the host, during computation; returns where to, and after what it is there."""
        device = self._device
        room, packed = device.host_bytes(block.numel()), device.stamp()
        with device.on(self._streams[0]):
            packed.hold()
            device.keep_for_stream(block)
            room[HEAD_BYTES:].copy_(block[HEAD_BYTES:], non_blocking=True)
            return room, device.stamp()

    def settle(self) -> None:
        """Ends a step: all that goes directly is out, and messages of the kinds that it had go so from now on.

        Before, they go over the hosts: so nothing that a device runs for the first time waits for a neighbour. And what
        comes behind it, e.g. sums of gradients, is not begun before what the neighbours need for theirs.

        Raises:
            RuntimeError: a rank has failed, or a peer is gone.
        """
        if self._way is None:
            return
        all_out, deadline_s = threading.Event(), self._watch.deadline_s()
        self._posted.put(all_out)
        while not all_out.wait(LOOK_S):
            if self._broken is not None:
                raise self._watch.lost(self.peer, self._broken)
            self._watch.look(self.peer, deadline_s, "took nothing")
        self._direct |= self._seen

    def _send_on(self) -> None:
        self._device.make_current()  # else pinned memory would belong to the first one
        super()._send_on()

    def _let_out(self, job: Job) -> None:
        if job.ready is not None:
            job.ready.wait()
            STAMP.pack_into(job.parts[0].numpy().data, 0, time.monotonic(), self.clock.least_s)
        if job.direct is not None and self._way is not None:
            self._way.send(job.direct, partial(self._announce, job))
        else:
            job.works.extend(self._begun(job.parts))
            super()._let_out(job)

    def _announce(self, job: Job) -> None:
        """Says that a payload comes over the direct way, and waits until there is room."""
        job.works.extend(self._begun(job.parts))
        super()._let_out(job)
        self._begun_to_receive(torch.empty(1, dtype=torch.uint8), _TAG_CLEAR).wait(FOREVER)

    # ---- in ----------------------------------------------------------------------------------------------------------

    def receive(self) -> Message:
        deadline_s = self._watch.deadline_s()
        came = None
        while came is None:
            try:
                came = self._come.get(timeout=LOOK_S)
            except Empty:
                self._watch.look(self.peer, deadline_s, "sent nothing")
        if not isinstance(came, tuple):
            raise self._watch.lost(self.peer, came)
        header, payload, arrived = came
        if arrived is not None:
            arrived.hold()
        self._device.keep_for_stream(payload)
        return unpack(header, payload)

    def _lost(self, error: RuntimeError) -> Exception:
        return error

    def _wait(self, work: Any, what: str) -> None:
        work.wait(FOREVER)

    def _take_in(self) -> None:
        """The thread: takes in what comes."""
        device = self._device
        device.make_current()
        try:
            while (came := self._next("")) is not None:
                if came.direct:
                    assert self._way is not None
                    payload = self._way.receive(came.size_bytes, self._clear)
                    self._time(came.times, came.size_bytes, time.monotonic(), waited=False)
                    self._come.put((came.header, payload, None))
                else:
                    with device.on(self._streams[1]):
                        payload = came.payload.to(device.device, non_blocking=True)
                        self._come.put((came.header, payload, device.stamp()))
                del came, payload  # their memory must not live until the next one comes
            while self._blocks:
                self._blocks.popleft()[1].wait(FOREVER)
            self._come.put(CLOSED)
        except Exception as error:  # whatever it is, the training thread is told
            gloos = isinstance(error, RuntimeError) and not is_out_of_memory(error)
            self._broken = why = f"its connection is closed: {first_line(error)}" if gloos else error
            self._come.put(why)

    def _clear(self) -> None:
        self._wire.send([torch.empty(1, dtype=torch.uint8)], self._there, _TAG_CLEAR).wait(FOREVER)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def wait_closed(self) -> None:
        self._join(self._receiver, "did not close its links")
        if self._broken is not None:
            raise self._watch.lost(self.peer, self._broken)
        super().wait_closed()

    def abort(self) -> None:
        super().abort()
        if self._way is not None:
            self._way.abort()

    def forget(self, deadline_s: float) -> None:
        self._receiver.join(max(0.0, deadline_s - awake_s()))
        super().forget(deadline_s)
