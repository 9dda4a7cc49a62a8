"""`lightning_hetero.measure.device` on a machine without an accelerator: what needs none."""

from __future__ import annotations

import pytest
import torch

from lightning_hetero.measure.device import autocast_kinds, device_in_use, device_of, is_out_of_memory, page_locked

SHORT = [
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
    "HIP out of memory. Tried to allocate 2.00 GiB.",
    "MPS backend out of memory (MPS allocated: 17.18 GB, other allocations: 1.00 GB, max allowed: 18.13 GB).",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    "CUDA error: CUSPARSE_STATUS_ALLOC_FAILED when calling `cusparseCreate(handle)`",
    "cuFFT error: CUFFT_ALLOC_FAILED",
    "NCCL error in: ProcessGroupNCCL.cpp:3356, unhandled cuda error\nCuda failure 2 'out of memory'",
    "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate",
]
OTHER = [
    "CUDA error: device-side assert triggered",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`",
    "cuDNN error: CUDNN_STATUS_BAD_PARAM",
    "mat1 and mat2 shapes cannot be multiplied (4x3 and 4x3)",
]


@pytest.mark.parametrize("text", SHORT)
def test_a_lack_of_memory_is_known_by_its_words(text: str) -> None:
    assert is_out_of_memory(RuntimeError(text))
    assert is_out_of_memory(torch.distributed.DistBackendError(text))
    assert not is_out_of_memory(ValueError(text))


@pytest.mark.parametrize("text", OTHER)
def test_other_errors_are_no_lack_of_memory(text: str) -> None:
    assert not is_out_of_memory(RuntimeError(text))
    assert is_out_of_memory(torch.OutOfMemoryError(text))


def test_who_tunes_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert device_of("cuda").tunes_each_shape() and not device_of("cpu").tunes_each_shape()
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    assert not device_of("cuda").tunes_each_shape()


def test_without_an_accelerator_the_host_is_in_use() -> None:
    host = device_in_use()
    assert host.device == torch.device("cpu") and not host.asynchronous
    host.here()()
    assert host.random_state() is None and host.host_bytes(3).shape == (3,)
    assert autocast_kinds()[:2] == ("cpu", "cuda")
    assert device_of("cpu:0") is device_of("cpu:0") and not device_of("mps:0").asynchronous


def test_a_batch_is_page_locked_by_what_torchs_loader_uses() -> None:
    """``torch.utils.data._utils.pin_memory`` is private: looked at with torch 2.13."""
    from torch.utils.data import dataloader

    from lightning_hetero.measure import device

    assert device.pin_memory is dataloader._utils.pin_memory.pin_memory
    batch = {"x": torch.zeros(2)}
    assert page_locked(batch) is batch  # there is no device to copy it to
