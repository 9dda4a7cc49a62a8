"""Does a copy to the GPU wait for what is queued before it? Pinned, pageable; from 1 kB to 256 MB."""

from __future__ import annotations

import time

import torch

from tests.gpu.check.found import detail, found, is_dry

QUEUE_S = 0.05


def _cycles() -> int:
    """Returns for how many cycles a kernel of `QUEUE_S` spins."""
    cycles = 10_000_000
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    torch.cuda.synchronize()
    return int(cycles * 1e3 * QUEUE_S / max(start.elapsed_time(end), 1e-3))


def copies() -> None:
    """Notes the host's time of ``.to(non_blocking=True)`` behind a queue of 50 ms, and of a D2H copy."""
    cycles = 1000 if is_dry() else _cycles()
    waits: dict[str, dict[int, float]] = {}
    sizes = [2**k for k in ((10, 16) if is_dry() else (10, 14, 16, 18, 20, 22, 24, 26, 28))]
    for kind in ("pageable", "pinned"):
        for size in sizes:
            host = torch.empty(size, dtype=torch.uint8, pin_memory=kind == "pinned")
            torch.cuda.synchronize()
            torch.cuda._sleep(cycles)
            started_s = time.perf_counter()
            there = host.to("cuda", non_blocking=True)
            waits.setdefault(f"{kind} to the GPU", {})[size] = round(1e3 * (time.perf_counter() - started_s), 3)
            torch.cuda.synchronize()
            back = torch.empty(size, dtype=torch.uint8, pin_memory=kind == "pinned")
            torch.cuda._sleep(cycles)
            started_s = time.perf_counter()
            back.copy_(there, non_blocking=True)
            waits.setdefault(f"{kind} to the host", {})[size] = round(1e3 * (time.perf_counter() - started_s), 3)
            torch.cuda.synchronize()
    detail(host_ms=waits)
    for kind, by_size in waits.items() if not is_dry() else ():
        waiting = [size for size, ms in by_size.items() if ms > 0.8e3 * QUEUE_S]
        found(**{kind: f"waits from {waiting[0]} B on" if waiting else "never waits"})
