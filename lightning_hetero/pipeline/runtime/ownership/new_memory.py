"""Memory that nothing has been written to is made ready beside those that will write it (layer T).

The kernel gives a process a page when it is first touched, and clears it: of what layers need where they arrive that
takes longer than copying them. Between two batches processors are idle, so a thread does it, from the far end: whoever
writes begins at the near one.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

__all__ = ["made_ready"]

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14: pages get memory, what is in them stays
_AT_ONCE_BYTES = 2**20


@contextmanager
def made_ready(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Lets a thread touch the memory of tensors while the body fills them; ends it with the body.

    What cannot be made ready, e.g. by an older kernel, is touched by who writes it.

    Args:
        tensors: on the CPU and contiguous, in the order in which they are filled.
    """
    stop = threading.Event()
    places = [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors if tensor.nbytes >= _AT_ONCE_BYTES]
    if not places:
        yield
        return
    thread = threading.Thread(target=_touch, args=(places, stop), name="pipeline-memory", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _touch(places: Sequence[tuple[int, int]], stop: threading.Event) -> None:
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for start, size_bytes in reversed(places):
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (start + size_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        for at in range(first, end, _AT_ONCE_BYTES):
            if stop.is_set() or advise(at, min(_AT_ONCE_BYTES, end - at), _POPULATE_WRITE):
                return
