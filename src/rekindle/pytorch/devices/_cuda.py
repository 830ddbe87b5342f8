"""CUDA, by the few things that are asked of it. Another accelerator would be another such file.

`torch.accelerator` has no events with times, no memory of the host that is pinned, and no state of
generators: those are `torch.cuda`'s. Attributes are looked up at each call, for tests put others in
their places.
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
IS_BUILT = torch.backends.cuda.is_built()  #: whether this PyTorch could have such a device

#: What `torch.cuda.current_stream` asks, at a tenth of the price; not in a PyTorch for CPUs.
_current: Callable[[int], tuple[int, int, int]] | None = getattr(
    torch._C, "_cuda_getCurrentStream", None
)

#: What a library says in the place of `torch.OutOfMemoryError`: cuBLAS, the driver, NCCL.
_OUT_OF_MEMORY = (
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
    "CUDNN_STATUS_ALLOC_FAILED",
    "NCCL Error 1: unhandled cuda error: out of memory",
)


def is_accelerator(device: torch.device) -> bool:
    """Whether `device` queues what it is told, and has an allocator that can be asked."""
    return device.type == KIND


def is_out_of_memory(error: BaseException) -> bool:
    """Whether there was no memory to be had, of the device or of the host.

    On a host that gives out more than it has, an allocation fails only for being absurd.
    """
    return is_full(error) or (type(error) is RuntimeError and "can't allocate memory" in str(error))


def is_full(error: BaseException) -> bool:
    """Whether the device has no more memory: for PyTorch's allocator, or for a library's own."""
    if isinstance(error, OutOfBudget):  # the budget has no more; the device may have
        return False
    if isinstance(error, torch.OutOfMemoryError):
        return True
    kinds = (RuntimeError, getattr(torch, "AcceleratorError", RuntimeError))
    return type(error) in kinds and any(text in str(error) for text in _OUT_OF_MEMORY)


# -- which there are ---------------------------------------------------------------------------


def available() -> bool:
    """Whether there is one."""
    return torch.cuda.is_available()


def in_use() -> bool:
    """Whether this process has used it."""
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def count() -> int:
    """How many there are."""
    return torch.cuda.device_count()


def with_index(device: torch.device) -> torch.device:
    """`device` as tensors on it name it: "cuda" is the current one."""
    if not is_accelerator(device) or device.index is not None:
        return device
    return torch.device(device.type, torch.cuda.current_device())


def name_of(device: torch.device) -> str:
    """What it is, as its maker calls it."""
    return torch.cuda.get_device_name(device)


# -- memory ------------------------------------------------------------------------------------


def allocated(device: torch.device) -> Bytes:
    """Bytes that the allocator has given out, to whomever.

    The nested form costs a tenth of `torch.cuda.memory_allocated`, which sorts all figures first.
    What was freed while another stream may still read it (`record_stream`) is not among them: it
    comes back by itself, and evicting for it ended programs that run well without.
    """
    return torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["current"]


#: The allocator gives out no less, and multiples of it. Of large blocks it may give out more, up to
#: a MiB that would be of no use by itself: that is not known before.
GRAIN: Final = 512


def rounded(nbytes: Bytes, device: torch.device) -> Bytes:
    """What a tensor's memory of `nbytes` takes there."""
    return -(-nbytes // GRAIN) * GRAIN if is_accelerator(device) else nbytes


def obtainable(device: torch.device) -> tuple[Bytes, Bytes]:
    """Bytes that are free, and those that this process has for tensors already.

    Pieces of blocks that are partly in use are of use only to what fits there, and do not count.
    """
    free, _ = torch.cuda.mem_get_info(device)
    stats = torch.cuda.memory_stats(device)
    pieces: Bytes = stats.get("inactive_split_bytes.all.current", 0)
    return free, torch.cuda.memory_reserved(device) - pieces


class Piece(NamedTuple):
    """A block of the allocator: where it begins, its bytes, and whether somebody has it."""

    address: int
    nbytes: Bytes
    used: bool


def segments(device: torch.device) -> list[list[Piece]]:
    """All blocks that the allocator has there, segment by segment, in the order of addresses.

    Looks at every one of them ("potentially VERY expensive", says PyTorch): for when an allocation
    has failed. None where the allocator does not tell.
    """
    index = with_index(device).index
    try:
        snapshot: Any = torch.cuda.memory._snapshot()
    except RuntimeError:  # the allocator of another backend (cudaMallocAsync) does not tell
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
    """How many of `ranks` processes on this machine share a device, each of which has one.

    A process to which a single device is shown may be the only one that sees it.
    """
    if torch.cuda.device_count() == 1 and os.environ.get("CUDA_VISIBLE_DEVICES"):
        return 1
    return -(-ranks // max(1, torch.cuda.device_count()))


def identity(device: torch.device) -> str:
    """Tells it from all others of this machine, whatever number it has in this process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def allocator_figures(device: torch.device) -> Mapping[str, Any]:
    """What the allocator says of itself."""
    return torch.cuda.memory_stats(device)


def empty_cache() -> None:
    """What the allocator keeps for later goes back to the device."""
    torch.cuda.empty_cache()


def pinned(nbytes: Bytes) -> Tensor:
    """Memory of the host that the device can copy from and to while others compute."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


# -- time and order ----------------------------------------------------------------------------


def event() -> Any:
    """One that knows when it happened, not recorded yet."""
    return torch.cuda.Event(enable_timing=True)


def new_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


def stream(stream_id: int, device: int, kind: int) -> Any:
    """The one that has those numbers."""
    return torch.cuda.Stream(stream_id=stream_id, device_index=device, device_type=kind)


def current_stream(device: torch.device) -> Any:
    return torch.cuda.current_stream(device)


def current_stream_id(device: torch.device) -> int:
    """Of the stream that the next operator on `device` will run on."""
    if _current is None:
        return torch.cuda.current_stream(device).stream_id
    return _current(torch.cuda.current_device() if device.index is None else device.index)[0]


def on_stream(stream: Any) -> AbstractContextManager[Any]:
    """Inside, what is launched goes there."""
    return torch.cuda.stream(stream)


def is_capturing() -> bool:
    """Whether what is launched now goes into a graph, and nothing may be asked of the device."""
    return torch.cuda.is_current_stream_capturing()


def synchronize(device: torch.device) -> None:
    """Waits until the device has done all that it was told."""
    torch.cuda.synchronize(device)


# -- random numbers ----------------------------------------------------------------------------


def default_generator(device: torch.device) -> torch.Generator:
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def generator_states() -> list[Tensor]:
    """Of the default generators of all of them."""
    return torch.cuda.get_rng_state_all()


def set_generator_states(states: list[Tensor]) -> None:
    torch.cuda.set_rng_state_all(states)
