"""NCCL's rules as a process group: what it refuses, and that it does operations in the order of their issue.

Each communicator has a stream and a thread, which takes operations in the order in which they were issued and does
each to its end, over an inner gloo group; ``serial``: one thread for all communicators of the device, as if kernels
could not run beside one another. Point-to-point operations match in order, tags are ignored. Every operation is
written down for `check`. As on a GPU, ``wait`` makes the current stream wait; here the host waits, too, until the
operation has been done, which is not counted: on a GPU it goes on.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from tests.simgpu.sim.check import Entry
from tests.simgpu.sim.kernels import current, is_far
from tests.simgpu.sim.order import order
from tests.simgpu.sim.races import held, uses
from tests.simgpu.sim.syncs import place, syncs

_Group: Any = dist.ProcessGroup  # its stub names arguments otherwise than torch's Python calls them
_Gloo: Any = c10d.ProcessGroupGloo

entries: list[Entry] = []  # of this rank, in order
_lock = threading.Lock()
_serial: queue.SimpleQueue[Callable[[], None]] | None = None


def _serve(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()


def _server(name: str) -> Any:
    jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_serve, args=(jobs,), daemon=True, name=name).start()
    return jobs


class _Work(dist.Work):
    def __init__(self, group: _Nccl, issue: int, tensors: list[Tensor]) -> None:
        super().__init__()
        self.group, self.issue, self.tensors = group, issue, tensors
        self.ended = threading.Event()
        self.error: BaseException | None = None
        # Completed on the communicator's stream: who waits for it has the current stream wait, in C++.
        self.future: torch.futures.Future[Any] = torch.futures.Future(devices=[group.bound_device_id])
        self.clock: dict[Any, int] = {}  # of the stream, with this operation
        self.held: list[Tensor] = []  # NCCL keeps them until somebody waits
        self.barrier = self.noted = False

    def get_future(self) -> Any:
        return self.future

    def result(self) -> list[Tensor]:
        return self.tensors

    def is_completed(self) -> bool:
        if not self.ended.is_set():
            return False
        self.known()
        return True

    def known(self) -> None:
        """Notes that the host knows of the end, without which nothing that it issues later comes after it."""
        order().host_knows(self.clock)
        if not self.noted:
            self.noted = True
            with _lock:
                entries.append(Entry("known", self.issue))

    def is_success(self) -> bool:
        return self.error is None

    def exception(self) -> Any:
        return self.error

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        while not self.ended.wait(1.0):
            if self.group.aborted:
                raise RuntimeError("NCCL communicator was aborted")
        order().waits(current(self.group.bound_device_id.index), self.clock)
        held(self.held, (self.group.bound_device_id.index, self.group.stream.stream_id), False)
        self.held = []
        if self.error is not None:
            raise RuntimeError(str(self.error))
        if self.barrier:  # the one operation for whose end the host waits
            syncs.note("barrier of NCCL")
            order().host_waits(current(self.group.bound_device_id.index))
        return True

    def synchronize(self) -> None:
        self.wait()


class _Options:
    def __init__(self, *_: Any, **__: Any) -> None:
        self._timeout: timedelta | None = None
        self.is_high_priority_stream = False


class _Nccl(_Group):
    Options = _Options
    supports_splitting = True

    def __init__(self, store: Any, rank: int, size: int, options: Any = None) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._store = rank, size, store
        self.aborted = False
        self.bound = torch.device("cuda", torch.cuda.current_device())
        self.members: list[int] = list(getattr(options, "global_ranks_in_group", None) or range(size))
        self.label = str(getattr(options, "group_name", ""))
        timeout = getattr(options, "_timeout", None) or timedelta(seconds=600)
        self.inner = _Gloo(store, rank, size, timeout=timeout)
        self.stream = torch.cuda.Stream(self.bound)
        self._met = False
        self._jobs: Any = _serial if _serial is not None else _server(f"nccl {self.label}")

    # ---- what torch asks of a backend

    def _get_backend(self, device: Any = None) -> Any:
        return self

    def eager_connect_single_device(self, device: Any) -> None:
        self._meet()

    def perform_nocolor_split(self, device: Any) -> None: ...

    def _set_sequence_number_for_group(self) -> None: ...

    def getBackendName(self) -> str:
        return "nccl"

    def _has_hooks(self) -> bool:
        return False

    def abort(self) -> None:
        self.aborted = True

    def shutdown(self) -> None:
        if self._jobs is not _serial:
            self._jobs.put(None)
        self.aborted = True

    _shutdown = shutdown

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cuda")]

    @property
    def group_name(self) -> str:
        return self.label

    @property
    def bound_device_id(self) -> torch.device:
        return self.bound

    @bound_device_id.setter
    def bound_device_id(self, device: torch.device | None) -> None:
        self.bound = device if device is not None else self.bound

    def _set_group_name(self, name: str) -> None:
        self.label = str(name)

    def _set_group_desc(self, description: str) -> None: ...

    def _set_default_backend(self, backend: Any) -> None: ...

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    # ---- rules

    def _meet(self) -> None:
        """On first use: no two ranks on one device."""
        if self._met:
            return
        self._met = True
        self._store.set(f"device/{self._rank}", f"{os.uname().nodename}/{self.bound.index}")
        seen: dict[bytes, int] = {}
        for rank in range(self._size):
            device = self._store.get(f"device/{rank}")
            if device in seen:
                raise RuntimeError(
                    f"ncclInvalidUsage: Duplicate GPU detected : rank {seen[device]} and rank {rank} "
                    f"both on CUDA device {device.decode()}"
                )
            seen[device] = rank

    def _check(self, op: str, tensors: Sequence[Tensor]) -> None:
        for t in tensors:
            if not is_far(t):
                raise RuntimeError(
                    f"No backend type associated with device type {t.device.type} ({op} of NCCL)"
                )
            if t.device != self.bound:
                raise RuntimeError(f"{op}: tensor on {t.device}, the communicator is bound to {self.bound}")
            if not t.is_contiguous():
                raise ValueError("Tensors must be contiguous")

    def _issue(
        self,
        op: str,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        do: Callable[[list[Tensor], list[Tensor]], Any],
        peer: int | None = None,
        sizes_differ: bool = False,
    ) -> _Work:
        """Issues an operation.

        Args:
            op: its name.
            reads, writes: its tensors; those that it changes in place are among ``writes`` only.
            do: does it, on the host's aliases of both.
            peer: of a point-to-point operation, in this group.
            sizes_differ: ranks may give tensors of several sizes.
        """
        tensors = [*reads, *writes]
        self._check(op, tensors)
        self._meet()
        orders, device = order(), self.bound.index
        stream = (device, self.stream.stream_id)
        near_reads, near_writes = ([torch.ops.simgpu.near(t) for t in some] for some in (reads, writes))
        with _lock:
            orders.waits(stream, orders.now(current(device)))
            uses([*((t, False) for t in reads), *((t, True) for t in writes)], stream, op)
            held(tensors, stream, True)
            shapes = () if sizes_differ else tuple((tuple(t.shape), str(t.dtype)) for t in tensors)
            entry = Entry(
                "op", len(entries), self.label, tuple(self.members), op,
                None if peer is None else self.members[peer], shapes, place(), threading.current_thread().name,
            )  # fmt: skip
            entries.append(entry)
            work = _Work(self, entry.issue, list(writes) or list(reads))
            work.held, work.clock = tensors, orders.now(stream)

            def job() -> None:
                try:
                    if self.aborted:
                        raise RuntimeError("NCCL communicator was aborted")
                    do(near_reads, near_writes)
                except Exception as error:
                    work.error = error
                work.ended.set()
                if work.error is not None:
                    work.future.set_exception(work.error)
                    return
                with torch.cuda.device(self.bound), torch.cuda.stream(self.stream):
                    work.future.set_result(work.tensors)

            self._jobs.put(job)
        return work

    # ---- operations

    def allreduce(self, tensors: Any, opts: Any = None, *_: Any, **__: Any) -> _Work:
        opts = opts if opts is not None else c10d.AllreduceOptions()
        mean = opts.reduceOp == dist.ReduceOp.AVG  # gloo has none
        if mean:
            opts.reduceOp = dist.ReduceOp.SUM

        def do(_: Any, writes: list[Tensor]) -> None:
            self.inner.allreduce(writes, opts).wait()
            for t in writes if mean else ():
                t.div_(self._size, rounding_mode=None if t.is_floating_point() else "trunc")

        return self._issue("mean" if mean else "allreduce", [], _several(tensors), do)

    def broadcast(self, tensors: Any, opts: Any, *_: Any, **__: Any) -> _Work:
        return self._issue("broadcast", [], _several(tensors), lambda _, out: self.inner.broadcast(out, opts).wait())

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> _Work:
        rows, given = [list(row) for row in outputs], list(inputs)
        flat = [t for row in rows for t in row]

        def do(reads: list[Tensor], writes: list[Tensor]) -> None:
            parts = iter(writes)
            self.inner.allgather([[next(parts) for _ in row] for row in rows], reads, c10d.AllgatherOptions()).wait()

        return self._issue("allgather", given, flat, do)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> _Work:
        def do(reads: list[Tensor], writes: list[Tensor]) -> None:
            rows = [list(writes[0].view(-1).chunk(self._size))]
            self.inner.allgather(rows, [reads[0].view(-1)], c10d.AllgatherOptions()).wait()

        return self._issue("allgather", [input], [output], do)

    all_gather_single = _allgather_base

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> _Work:
        def do(reads: list[Tensor], writes: list[Tensor]) -> None:
            given = c10d.AllToAllOptions()
            self.inner.alltoall_base(writes[0], reads[0], output_sizes, input_sizes, given).wait()

        return self._issue("alltoall", [input], [output], do, sizes_differ=True)

    def reduce(self, tensors: Any, opts: Any) -> _Work:
        return self._issue("reduce", [], _several(tensors), lambda _, out: self.inner.reduce(out, opts).wait())

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> _Work:
        options: Any = c10d.AllreduceOptions()
        options.reduceOp = opts.reduceOp if opts is not None else dist.ReduceOp.SUM

        def do(reads: list[Tensor], writes: list[Tensor]) -> None:
            total = reads[0].clone()
            self.inner.allreduce([total], options).wait()
            writes[0].view(-1).copy_(total.view(-1).chunk(self._size)[self._rank])

        return self._issue("reduce_scatter", [input], [output], do)

    def barrier(self, opts: Any = None) -> _Work:
        one = torch.zeros(1, device=self.bound)  # as NCCL's, which sums a number
        work = self._issue("barrier", [], [one], lambda *_: self.inner.barrier().wait())
        work.barrier = True
        return work

    def send(self, tensors: Any, dst: int, tag: int = 0) -> _Work:
        def do(reads: list[Tensor], _: Any) -> None:
            self.inner.send(reads, dst, 7).wait(timedelta(seconds=600))

        return self._issue("send", list(tensors), [], do, dst)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> _Work:
        def do(_: Any, writes: list[Tensor]) -> None:
            self.inner.recv(writes, src, 7).wait(timedelta(seconds=600))

        return self._issue("recv", [], list(tensors), do, src)


def _several(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def install(serial: bool) -> None:
    """Makes ``"nccl"`` a backend of this process."""
    global _serial
    if serial:
        _serial = _server("nccl of the device")
    # Asked for by torch.cuda.nccl.version(), which Lightning and the doctor print.
    torch._C._nccl_version = lambda: (2 << 32) | (28 << 16)  # pyright: ignore[reportAttributeAccessIssue]
    torch._C._nccl_version_suffix = lambda: b""  # pyright: ignore[reportAttributeAccessIssue]
    modules: tuple[Any, ...] = (c10d, dist)
    for module in modules:
        module.is_nccl_available = lambda: True
        module.ProcessGroupNCCL = _Nccl
