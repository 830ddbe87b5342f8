"""The interface to CUDA. Another accelerator would need another file with the same functions.

It uses `torch.cuda`, because `torch.accelerator` has no timed events, no page-locked host memory
and no generator states. Each call looks up its function in `torch.cuda`, so that tests can replace
these functions.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from rekindle._errors import OutOfBudget
from rekindle._types import Bytes

KIND = "cuda"

#: The same as `torch.cuda.current_stream`, but ten times as fast; None in a CPU-only PyTorch.
_current: Callable[[int], tuple[int, int, int]] | None = getattr(
    torch._C, "_cuda_getCurrentStream", None
)

#: Messages by which cuBLAS, the CUDA driver, cuDNN and NCCL report that memory is exhausted.
#: PyTorch raises them as other errors than `torch.OutOfMemoryError`.
_OUT_OF_MEMORY = (
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
    "CUDNN_STATUS_ALLOC_FAILED",
    "NCCL Error 1: unhandled cuda error: out of memory",
)


def is_accelerator(device: torch.device) -> bool:
    """Return True if `device` is a CUDA device."""
    return device.type == KIND


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if `error` says that the device or the host is out of memory.

    A host that overcommits memory raises such an error only for absurd sizes.
    """
    return is_full(error) or (type(error) is RuntimeError and "can't allocate memory" in str(error))


def is_full(error: BaseException) -> bool:
    """Return True if `error` of PyTorch or of a library says that the device is out of memory."""
    if isinstance(error, OutOfBudget):  # the budget is exhausted, but the device has free memory
        return False
    if isinstance(error, torch.OutOfMemoryError):
        return True
    kinds = (RuntimeError, getattr(torch, "AcceleratorError", RuntimeError))
    return type(error) in kinds and any(text in str(error) for text in _OUT_OF_MEMORY)


# -- devices -----------------------------------------------------------------------------------


def available() -> bool:
    """Return True if there is a CUDA device."""
    return torch.cuda.is_available()


def in_use() -> bool:
    """Return True if this process has used CUDA."""
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def count() -> int:
    """Return the number of CUDA devices that this process sees."""
    return torch.cuda.device_count()


def with_index(device: torch.device) -> torch.device:
    """Return `device` with its index; "cuda" becomes the current device, such as "cuda:0"."""
    if not is_accelerator(device) or device.index is not None:
        return device
    return torch.device(device.type, torch.cuda.current_device())


def name_of(device: torch.device) -> str:
    """Return the vendor's name of the device."""
    return torch.cuda.get_device_name(device)


# -- memory ------------------------------------------------------------------------------------


def allocated(device: torch.device) -> Bytes:
    """Return the bytes that PyTorch's allocator has given to tensors of this process.

    The nested statistics take a tenth of the time of `torch.cuda.memory_allocated`, which sorts all
    figures first. They exclude freed memory that another stream may still read (`record_stream`):
    it becomes available soon, so evicting for it is unnecessary.
    """
    return torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["current"]


#: PyTorch's allocator rounds sizes up to a multiple of this (bytes). A large block may be up to
#: 1 MiB larger than that, if the rest is too small to split off; this cannot be predicted.
GRAIN: Final = 512


def rounded(nbytes: Bytes, device: torch.device) -> Bytes:
    """Return the bytes that the allocator takes on `device` for a storage of `nbytes`."""
    return -(-nbytes // GRAIN) * GRAIN if is_accelerator(device) else nbytes


def obtainable(device: torch.device) -> tuple[Bytes, Bytes]:
    """Return the free bytes of the device, and the bytes that this process has reserved on it.

    Free pieces of reserved blocks that are partly in use do not count: they fit small tensors only.
    """
    free, _ = torch.cuda.mem_get_info(device)
    stats = torch.cuda.memory_stats(device)
    pieces: Bytes = stats.get("inactive_split_bytes.all.current", 0)
    return free, torch.cuda.memory_reserved(device) - pieces


class Piece(NamedTuple):
    """A block of device memory that PyTorch's allocator manages.

    Attributes:
        address: The address of its first byte.
        nbytes: Its size.
        used: True if a tensor has it, or may still read it in another stream.
    """

    address: int
    nbytes: Bytes
    used: bool


def segments(device: torch.device) -> list[list[Piece]]:
    """Return all blocks of PyTorch's allocator on `device`, in the order of addresses.

    This is slow ("potentially VERY expensive", says PyTorch), so call it only after an allocation
    has failed.

    Returns:
        One list of blocks for each segment (a piece of memory that the allocator got from CUDA).
        Empty if the allocator does not report blocks.
    """
    index = with_index(device).index
    try:
        snapshot: Any = torch.cuda.memory._snapshot()
    except RuntimeError:  # the allocator backend cudaMallocAsync does not report blocks
        return []
    return [
        [
            Piece(block["address"], block["size"], block["state"] != "inactive")
            for block in segment["blocks"]
        ]
        for segment in snapshot["segments"]
        if segment["device"] == index
    ]


def ranks_of_device(ranks: int) -> int:
    """Return how many processes share each device, if `ranks` on this machine use one device each.

    If `CUDA_VISIBLE_DEVICES` shows this process a single device, it is taken to be the only user.
    """
    if torch.cuda.device_count() == 1 and os.environ.get("CUDA_VISIBLE_DEVICES"):
        return 1
    return -(-ranks // max(1, torch.cuda.device_count()))


def identity(device: torch.device) -> str:
    """Return an identifier of the device that is the same in all processes of this machine."""
    return str(torch.cuda.get_device_properties(device).uuid)


def allocator_figures(device: torch.device) -> Mapping[str, Any]:
    """Return the statistics of PyTorch's allocator (`torch.cuda.memory_stats`)."""
    return torch.cuda.memory_stats(device)


def empty_cache() -> None:
    """Return unused memory of the allocator to the device."""
    torch.cuda.empty_cache()


def pinned(nbytes: Bytes) -> Tensor:
    """Return page-locked host memory, which allows asynchronous copies to and from the device."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


# -- time and order ----------------------------------------------------------------------------


def event() -> Any:
    """Return a new CUDA event with timing, not recorded yet."""
    return torch.cuda.Event(enable_timing=True)


def new_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


def stream(stream_id: int, device: int, kind: int) -> Any:
    """Return the existing stream with this id, device index and device type."""
    return torch.cuda.Stream(stream_id=stream_id, device_index=device, device_type=kind)


def current_stream(device: torch.device) -> Any:
    return torch.cuda.current_stream(device)


def current_stream_id(device: torch.device) -> int:
    """Return the id of the stream on which the next operator on `device` runs."""
    if _current is None:
        return torch.cuda.current_stream(device).stream_id
    return _current(torch.cuda.current_device() if device.index is None else device.index)[0]


def on_stream(stream: Any) -> AbstractContextManager[Any]:
    """While open, launch kernels on `stream`."""
    return torch.cuda.stream(stream)


def is_capturing() -> bool:
    """Return True during CUDA graph capture, in which synchronization is not allowed."""
    return torch.cuda.is_current_stream_capturing()


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    torch.cuda.synchronize(device)


# -- random numbers ----------------------------------------------------------------------------


def default_generator(device: torch.device) -> torch.Generator:
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def generator_states() -> list[Tensor]:
    """Return the states of the default random number generators of all CUDA devices."""
    return torch.cuda.get_rng_state_all()


def set_generator_states(states: list[Tensor]) -> None:
    torch.cuda.set_rng_state_all(states)
