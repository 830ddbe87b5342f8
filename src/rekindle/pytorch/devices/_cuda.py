"""The interface to CUDA. Support for another accelerator would be another such file.

It uses `torch.cuda`, because `torch.accelerator` has no timed events, no page-locked host memory
and no generator states. It looks attributes up at each call, so that tests can replace them.
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
IS_BUILT = torch.backends.cuda.is_built()  #: True if this PyTorch was built for such a device

#: The same as `torch.cuda.current_stream`, ten times as fast; None in a CPU-only PyTorch.
_current: Callable[[int], tuple[int, int, int]] | None = getattr(
    torch._C, "_cuda_getCurrentStream", None
)

#: Errors of libraries in place of `torch.OutOfMemoryError`: cuBLAS, the driver, cuDNN, NCCL.
_OUT_OF_MEMORY = (
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
    "CUDNN_STATUS_ALLOC_FAILED",
    "NCCL Error 1: unhandled cuda error: out of memory",
)


def is_accelerator(device: torch.device) -> bool:
    """Return True if `device` runs asynchronously and has an allocator with statistics."""
    return device.type == KIND


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if memory of the device or of the host was exhausted.

    A host that overcommits memory refuses only absurd sizes.
    """
    return is_full(error) or (type(error) is RuntimeError and "can't allocate memory" in str(error))


def is_full(error: BaseException) -> bool:
    """Return True if the device is out of memory, by PyTorch's allocator or by a library."""
    if isinstance(error, OutOfBudget):  # only the budget is exhausted
        return False
    if isinstance(error, torch.OutOfMemoryError):
        return True
    kinds = (RuntimeError, getattr(torch, "AcceleratorError", RuntimeError))
    return type(error) in kinds and any(text in str(error) for text in _OUT_OF_MEMORY)


# -- devices -----------------------------------------------------------------------------------


def available() -> bool:
    """Return True if there is a device."""
    return torch.cuda.is_available()


def in_use() -> bool:
    """Return True if this process has used a device."""
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def count() -> int:
    """Return the number of devices."""
    return torch.cuda.device_count()


def with_index(device: torch.device) -> torch.device:
    """Return `device` as its tensors name it: "cuda" means the current device."""
    if not is_accelerator(device) or device.index is not None:
        return device
    return torch.device(device.type, torch.cuda.current_device())


def name_of(device: torch.device) -> str:
    """Return the vendor's name of the device."""
    return torch.cuda.get_device_name(device)


# -- memory ------------------------------------------------------------------------------------


def allocated(device: torch.device) -> Bytes:
    """Return the bytes that the allocator has handed out in this process.

    The nested statistics take a tenth of the time of `torch.cuda.memory_allocated`, which sorts all
    figures first. They exclude memory that was freed while another stream may still read it
    (`record_stream`). Such memory becomes free without eviction, and counting it made programs
    fail that run well without a budget.
    """
    return torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["current"]


#: Granularity of PyTorch's allocator in bytes. For large blocks it may hand out up to a MiB more,
#: a rest too small for other tensors; that cannot be known before.
GRAIN: Final = 512


def rounded(nbytes: Bytes, device: torch.device) -> Bytes:
    """Return the bytes that a storage of `nbytes` takes on `device`."""
    return -(-nbytes // GRAIN) * GRAIN if is_accelerator(device) else nbytes


def obtainable(device: torch.device) -> tuple[Bytes, Bytes]:
    """Return the free bytes of the device, and the bytes that this process has reserved.

    Free pieces of blocks in use do not count, because only small tensors fit there.
    """
    free, _ = torch.cuda.mem_get_info(device)
    stats = torch.cuda.memory_stats(device)
    pieces: Bytes = stats.get("inactive_split_bytes.all.current", 0)
    return free, torch.cuda.memory_reserved(device) - pieces


class Piece(NamedTuple):
    """A block of the allocator.

    Attributes:
        address: Where it begins.
        nbytes: Its size.
        used: True if it is handed out.
    """

    address: int
    nbytes: Bytes
    used: bool


def segments(device: torch.device) -> list[list[Piece]]:
    """Return all blocks of the allocator, by segment, in the order of addresses.

    This is slow ("potentially VERY expensive", says PyTorch), so call it only after an allocation
    has failed.

    Returns:
        One list for each segment; nothing if the allocator does not report blocks.
    """
    index = with_index(device).index
    try:
        snapshot: Any = torch.cuda.memory._snapshot()
    except RuntimeError:  # another backend (cudaMallocAsync) does not report blocks
        return []
    return [
        [
            Piece(block["address"], block["size"], block["state"] != "inactive")
            for block in segment["blocks"]
        ]
        for segment in snapshot["segments"]
        if segment["device"] == index
    ]


def ranks_beside(ranks: int) -> int:
    """Return how many of `ranks` processes on this machine share a device, if each uses one.

    A process that sees a single device by `CUDA_VISIBLE_DEVICES` is taken for its only user.
    """
    if torch.cuda.device_count() == 1 and os.environ.get("CUDA_VISIBLE_DEVICES"):
        return 1
    return -(-ranks // max(1, torch.cuda.device_count()))


def identity(device: torch.device) -> str:
    """Return an identifier of the device that is the same in all processes of this machine."""
    return str(torch.cuda.get_device_properties(device).uuid)


def allocator_figures(device: torch.device) -> Mapping[str, Any]:
    """Return the allocator's statistics."""
    return torch.cuda.memory_stats(device)


def empty_cache() -> None:
    """Return unused memory of the allocator to the device."""
    torch.cuda.empty_cache()


def pinned(nbytes: Bytes) -> Tensor:
    """Return page-locked host memory, which the device copies from and to asynchronously."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


# -- time and order ----------------------------------------------------------------------------


def event() -> Any:
    """Return a timed event, not recorded yet."""
    return torch.cuda.Event(enable_timing=True)


def new_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


def stream(stream_id: int, device: int, kind: int) -> Any:
    """Return the stream with these numbers."""
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
    """Return True if kernels are captured into a graph, when no synchronization is allowed."""
    return torch.cuda.is_current_stream_capturing()


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    torch.cuda.synchronize(device)


# -- random numbers ----------------------------------------------------------------------------


def default_generator(device: torch.device) -> torch.Generator:
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def generator_states() -> list[Tensor]:
    """Return the states of the default generators of all devices."""
    return torch.cuda.get_rng_state_all()


def set_generator_states(states: list[Tensor]) -> None:
    torch.cuda.set_rng_state_all(states)
