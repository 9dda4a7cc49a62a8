"""Workers and a server of the stale engine in one process, for tests: real threads, or a scripted clock.

`Threads` runs every worker in a thread over the in-process transport. `Script` runs them one at a time in the order of
a virtual clock, so that who is late, dies or stops is written down and happens in every run alike:

    worker thread -- call(request) --> waits            the script: pop the earliest event, hand it to the server,
                  <-- reply ---------  runs on until    resume whoever was answered, note when it will call again
                                       its next call
"""

from __future__ import annotations

import copy
import heapq
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hetero.stale.decide.coordinator import Coordinator
from lightning_hetero.stale.decide.effects import Effect, Updated
from lightning_hetero.stale.decide.policy import Policy
from lightning_hetero.stale.runtime.layout import FlatLayout
from lightning_hetero.stale.runtime.serve.server import ParameterServer
from lightning_hetero.stale.runtime.start import serve
from lightning_hetero.stale.runtime.work.worker import Worker
from lightning_hetero.transport.base import Arrived, Ask, Gone, Joined, Reply, Request, Say, ServerLostError
from lightning_hetero.transport.flags import PushFlag
from lightning_hetero.transport.link import RemoteLink, WorkerLink
from lightning_hetero.transport.seqlock import ParameterArea, Slot
from tests.ranks.transport.in_process import InProcess

MakeOptimizers = Callable[[nn.Module], Sequence[Optimizer]]
Step = Callable[["Trainee", Reply, list[int]], Reply]


def spans(numbers: Sequence[int]) -> list[int]:
    """Returns the positions that flat spans name."""
    return [i for start, end in zip(numbers[::2], numbers[1::2], strict=True) for i in range(start, end)]


def ends_of(samples: int, batch: int) -> list[int]:
    """Returns the global steps' ends of an epoch."""
    return [min(samples, end) for end in range(batch, samples + batch, batch)]


def adopt(layout: FlatLayout, area: Tensor, tensors: Sequence[Tensor]) -> None:
    """Moves tensors (parameters, then buffers, as in the layout) into ``area``, as a server has them."""
    for view, tensor in zip(layout.views(area), tensors, strict=True):
        view.copy_(tensor.detach())
        tensor.data = view


class Pusher(Worker):
    """A worker that knows where it is and what it was granted, so that a test need not say so with every push."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._place, self._grant, self._substep = (0, 0), Reply(kind=Say.PASSED), 0

    def claim(self, epoch: int, global_step: int) -> Reply:
        self._place = epoch, global_step
        return self.granted(super().claim(epoch, global_step))

    def granted(self, reply: Reply) -> Reply:
        """Takes the answer to a claim, however that was made."""
        self._grant, self._substep = reply, 0
        return reply

    def push(self, flags: PushFlag = PushFlag.FINAL, **said: Any) -> Reply:  # type: ignore[override]
        samples = said.get("samples", len(spans(self._grant.numbers)))
        values = {
            "epoch": self._place[0], "global_step": self._place[1], "substep": self._substep,
            "assignment": self._grant.assignment,
            "samples": samples, "weight": float(samples), **said,
        }  # fmt: skip
        self._substep += 1
        reply = super().push(Request(kind=Ask.PUSH, flags=flags, **values), lambda: 0.5)
        return self.granted(reply) if flags & PushFlag.FINAL else reply


@dataclass
class Trainee:
    """One worker with its own copy of the model.

    Attributes:
        log: (lease, base, positions) of every final push.
        words: of each global step gone by.
        texts: notices of the server.
    """

    rank: int
    model: nn.Module
    optimizers: Sequence[Optimizer]
    worker: Pusher
    step: Step
    before: Callable[[Trainee, int, int], None] = lambda trainee, epoch, global_step: None
    log: list[tuple[int, int, list[int]]] = field(default_factory=list)
    words: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    global_step: int = 0

    def epoch(self, epoch: int, ends: Sequence[int], *, global_step: int = 0, applied: Any = ()) -> None:
        """Goes through the global steps of an epoch."""
        reply = self.worker.begin_epoch(epoch, ends, global_step=global_step, applied=applied)
        self.global_step = global_step
        while self.global_step < len(ends):
            self.before(self, epoch, self.global_step)
            reply = self.worker.claim(epoch, self.global_step)
            while reply.kind is Say.ASSIGNED:
                self.texts += [reply.text] if reply.text else []
                self.worker.pull()
                positions = spans(reply.numbers)
                if positions:
                    self.log.append((reply.assignment, reply.version, positions))
                    reply = self.step(self, reply, positions)
                else:
                    reply = self.worker.claim(epoch, self.global_step)
            self.texts += [reply.text] if reply.text else []
            assert reply.kind is Say.PASSED and reply.numbers
            self.words += reply.numbers
            self.global_step += len(reply.numbers)


def automatic(
    x: Tensor,
    y: Tensor,
    loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor],
    *,
    accumulate: int = 1,
    **options: Any,
) -> Step:
    """Returns what Lightning's automatic optimization does in a batch."""

    def step(trainee: Trainee, grant: Reply, positions: list[int]) -> Reply:
        global_step = trainee.global_step
        loss = loss_of(trainee.model, x[positions], y[positions]) / accumulate
        loss.backward()
        steps = int((global_step + 1) % accumulate == 0)
        if steps and "clip" in options:
            trainee.worker.clip(0, options["clip"])
        return trainee.worker.push(steps=steps, zeroes=int(global_step % accumulate == 0))

    return step


class Recorder(Coordinator):
    """Remembers its updates."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.updates: list[Updated] = []

    def _update(self, now: float) -> list[Effect]:
        effects = super()._update(now)
        self.updates += [effect for effect in effects if isinstance(effect, Updated)]
        return effects


class Setting:
    """A model on a server and on workers.

    Args:
        model: initial values; copied.
        make: the optimizers of a copy.
        policy, workers: who decides, how many.
        compression, options: of the layout; of the server.
    """

    def __init__(
        self, model: nn.Module, make: MakeOptimizers, policy: Policy, workers: int = 1, *, compression: Any = None,
        ahead: int = 0, liveness_s: float = 5.0, **options: Any,
    ) -> None:  # fmt: skip
        self.make, self.initial = make, model
        self.model = copy.deepcopy(model)
        self.optimizers = list(make(self.model))
        named, buffers = list(self.model.named_parameters()), list(self.model.named_buffers())
        self.layout = FlatLayout.of(named, buffers, optimizers=self.optimizers, compression=compression)
        self.area = torch.zeros(self.layout.bytes, dtype=torch.uint8)
        adopt(self.layout, self.area, [t for _, t in named] + [t for _, t in buffers])
        self.coordinator = Recorder(policy, workers=range(workers), ahead=ahead, liveness_s=liveness_s)
        self.options = options
        self.trainees: list[Trainee] = []

    def serve_on(self, listener: Any) -> ParameterServer:
        self.server = ParameterServer(
            layout=self.layout, area=self.area, parameters=list(self.model.parameters()), optimizers=self.optimizers,
            listener=listener, coordinator=self.coordinator, **self.options,
        )  # fmt: skip
        return self.server

    def trainee(self, rank: int, link: WorkerLink, step: Step, **options: Any) -> Trainee:
        model = copy.deepcopy(self.initial)
        optimizers = list(self.make(model))
        buffers = lambda: [b for _, b in model.named_buffers()]  # noqa: E731
        worker = Pusher(
            link, self.layout, list(model.parameters()), buffers, optimizers, **options
        )
        trainee = Trainee(rank, model, optimizers, worker, step)
        self.trainees.append(trainee)
        return trainee


class _Thread(threading.Thread):
    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__()
        self._work, self.error = work, None

    def run(self) -> None:
        torch.set_num_threads(1)
        try:
            self._work()
        except BaseException as error:
            self.error = error


@contextmanager
def threads(
    setting: Setting, step: Step, body: Callable[[Trainee], None], *, workers: int = 1, **options: Any
) -> Iterator[InProcess]:
    """Runs ``body`` for every worker in a thread, over the in-process transport; raises the first error at the end."""
    transport = InProcess(workers, setting.layout.slot_bytes, setting.layout.bytes)
    server = setting.serve_on(transport.listener)
    links = [transport.link(rank) for rank in range(workers)]
    trainees = [setting.trainee(rank, link, step, **options) for rank, link in enumerate(links)]

    def work(trainee: Trainee) -> None:
        try:
            body(trainee)
            trainee.worker.leave()
        except BaseException as error:
            trainee.worker.abort(repr(error))
            raise
        finally:
            trainee.worker.link.close()

    running = [_Thread(lambda: serve(server, transport.listener, time.monotonic))]
    running += [_Thread(lambda trainee=trainee: work(trainee)) for trainee in trainees]
    for thread in running:
        thread.start()
    try:
        yield transport
    finally:
        for thread in running[1:]:
            thread.join()
        running[0].join(20.0)
        transport.listener.close()
        running[0].join()
        for trainee in trainees:
            trainee.worker.detach()
    for thread in running:
        if thread.error is not None:
            raise thread.error


class _ScriptLink(RemoteLink):
    def __init__(self, rank: int, script: Script) -> None:
        layout = script.setting.layout
        self.rank, self._script = rank, script
        self.slot = Slot(torch.zeros(Slot.size(layout.slot_bytes), dtype=torch.uint8), layout.slot_bytes)
        self.gradient = self.slot.data
        self.asked, self.go = threading.Semaphore(0), threading.Semaphore(0)
        self.request: Request | None = None
        self.answer: Reply | None = None
        self.killed = False

    def open_slot(self) -> None:
        self.slot.open()

    def ready(self, start: int, stop: int) -> None:
        assert 0 <= start <= stop <= self.gradient.numel()
        self._script.ready.append((self.rank, start, stop))

    def close_slot(self) -> int:
        return self.slot.close()

    def call(self, request: Request) -> Reply:
        packed = request.pack()
        self.request = Request.unpack(packed[: Request.SIZE], packed[Request.SIZE :])
        self.asked.release()
        self.go.acquire()
        if self.killed:
            raise ServerLostError("killed")
        assert self.answer is not None
        answer, self.answer = self.answer, None
        return answer

    def read_parameters(self, into: Tensor) -> int:
        return self._script.parameters.read(into)

    def newest_version(self) -> int:
        return self._script.parameters.newest()

    def read_state(self) -> bytes:
        return self._script.state

    def close(self) -> None:
        pass


class Script:
    """Runs workers on a virtual clock; no thread ever runs beside another.

    Args:
        setting: server and model.
        step: what a worker does in a batch.
        work_s: time from a grant to the push, of a rank and its samples [s].
        kill: ``{rank: time}``: its process dies then.
        rest_s: time from a sub-step's answer to the next push of the batch, of a rank [s].
    """

    def __init__(
        self, setting: Setting, step: Step, body: Callable[[Trainee], None], *, workers: int,
        work_s: Callable[[int, int, float], float], kill: dict[int, float] | None = None,
        rest_s: Callable[[int, float], float] = lambda rank, now_s: 0.0, **options: Any,
    ) -> None:  # fmt: skip
        self.setting, self.work_s, self.rest_s, self.kill = setting, work_s, rest_s, dict(kill or {})
        layout = setting.layout
        self.parameters = ParameterArea(
            torch.zeros(ParameterArea.size(layout.bytes), dtype=torch.uint8), layout.bytes
        )
        self.state = b""
        self.ready: list[tuple[int, int, int]] = []
        self.replies: dict[int, Reply] = {}
        self.links = [_ScriptLink(rank, self) for rank in range(workers)]
        self.server = setting.serve_on(self)
        self.trainees = [setting.trainee(rank, link, step, **options) for rank, link in enumerate(self.links)]
        self._threads = [_Thread(lambda t=trainee: self._live(t, body)) for trainee in self.trainees]
        self.now_s = 0.0

    def _live(self, trainee: Trainee, body: Callable[[Trainee], None]) -> None:
        link = self.links[trainee.rank]
        try:
            body(trainee)
            trainee.worker.leave()
        except ServerLostError:
            if not link.killed:
                raise
        finally:
            link.request = None
            link.asked.release()

    def run(self) -> Script:
        """Runs to the end; raises the first error of a worker."""
        server, queue = self.server, []
        for link, thread in zip(self.links, self._threads, strict=True):
            server.handle(Joined(link.rank), 0.0)
            thread.start()
            link.asked.acquire()
            heapq.heappush(queue, (0.0, 1, link.rank))
        for rank, at_s in self.kill.items():
            heapq.heappush(queue, (at_s, 0, rank))
        while not server.finished:
            wake_s = server.wake_s()
            if queue and queue[0][0] <= wake_s:
                self.now_s, kind, rank = heapq.heappop(queue)
                link = self.links[rank]
                if kind == 0:
                    link.killed = True
                    server.handle(Gone(rank, "killed"), self.now_s)
                elif link.request is None:
                    server.handle(Gone(rank, "ended"), self.now_s)
                elif not link.killed:
                    server.handle(Arrived(rank, link.request), self.now_s)
            elif math.isfinite(wake_s):
                assert wake_s >= self.now_s or server.wake_s() <= self.now_s
                self.now_s = max(self.now_s, wake_s)
                server.wake(self.now_s)
            else:
                raise RuntimeError(f"deadlock at {self.now_s} s in global step {server.coordinator.global_step}")
            for rank, reply in sorted(self.replies.items()):
                del self.replies[rank]
                self._resume(rank, reply, queue)
        self.close()
        return self

    def _resume(self, rank: int, reply: Reply, queue: list[tuple[float, int, int]]) -> None:
        link = self.links[rank]
        link.answer = reply
        link.go.release()
        link.asked.acquire()
        samples = len(spans(reply.numbers)) if reply.kind is Say.ASSIGNED else 0
        busy_s = self.work_s(rank, samples, self.now_s) if samples else 0.0
        if reply.kind is Say.APPLIED:
            busy_s = self.rest_s(rank, self.now_s)
        heapq.heappush(queue, (self.now_s + busy_s, 1, rank))

    # ---- the listener -----------------------------------------------------------------------------------------

    def events(self, timeout_s: float) -> list[Any]:
        raise NotImplementedError

    def reply(self, rank: int, reply: Reply) -> None:
        assert rank not in self.replies
        packed = reply.pack()
        if not self.links[rank].killed:
            self.replies[rank] = Reply.unpack(packed[: Reply.SIZE], packed[Reply.SIZE :])

    def gradient(self, rank: int, slot: int) -> Tensor:
        return self.links[rank].slot.check(slot)

    def publish(self, version: int, parameters: Tensor) -> None:
        self.parameters.publish(version, parameters)

    def share_state(self, data: bytes) -> None:
        self.state = data

    def dismiss(self, rank: int, reason: str) -> None:
        raise NotImplementedError

    def close(self) -> None:
        for link, thread in zip(self.links, self._threads, strict=True):
            while thread.is_alive():
                link.killed = True
                link.go.release()
                thread.join(0.01)
        self.server.close()
        for thread in self._threads:
            if thread.error is not None:
                raise thread.error
