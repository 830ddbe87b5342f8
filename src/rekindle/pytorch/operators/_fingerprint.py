"""Compute hashes of tensor contents on the device of the tensor."""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any

import torch
from torch import Tensor

from rekindle.pytorch.operators._signature import PLAIN_TENSORS
from rekindle.pytorch.tensors import privately, whole

Fingerprint = bytes

_WORDS = 1 << 20  #: number of 8-byte words to sum at a time, so that temporary memory takes 16 MiB
#: factor of the hash, 2**64 / golden ratio as a signed number: its multiples differ in all bits
_GOLDEN = -7046029254386353131


def fingerprint_of(tensor: Tensor) -> Fingerprint:
    """Return a hash of the contents of `tensor`, equal for equal bits, dtypes and shapes.

    0.0 and -0.0 differ. For tensors without plain memory (sparse, quantized, subclasses), the hash
    covers only type and shape. The computation is hidden from dispatch modes.
    """
    header = f"{type(tensor).__name__} {tensor.dtype} {tuple(tensor.shape)} {tensor.device.type}"
    digest = hashlib.blake2b(header.encode(), digest_size=16)
    plain = type(tensor) in PLAIN_TENSORS and tensor.layout is torch.strided
    if plain and not tensor.is_quantized and tensor.device.type != "meta" and tensor.numel():
        with privately():
            flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
            memory = flat.view(torch.uint8)
            for part in [memory] if memory.device.type == "cpu" else _sums(memory):
                on_cpu = part.cpu()
                digest.update(_bytes_of(on_cpu))
    return digest.digest()


def _bytes_of(memory: Tensor) -> Any:
    """Return the bytes of `memory` without a copy. `memory` must be alive while they are read.

    An array of NumPy would mark the storage for good, as memory that NumPy may write.
    """
    return (ctypes.c_ubyte * memory.numel()).from_address(memory.data_ptr())


def _sums(memory: Tensor) -> list[Tensor]:
    """Return a sum of 8 bytes for each 8 MiB of `memory`, and the last bytes of `memory`.

    The sums are computed on the device of `memory`, so that few bytes are copied to the host. Each
    word of 8 bytes is multiplied by an odd factor that depends on its position, modulo 2**64. A sum
    is the same in any order of summation, and changes if a single word changes.
    """
    end = memory.numel() // 8 * 8
    aligned = memory[:end] if memory.storage_offset() % 8 == 0 else memory[:end].clone()
    words = aligned.view(torch.int64)
    places = torch.arange(min(_WORDS, words.numel()), device=memory.device) + 1
    factors = (places * _GOLDEN).bitwise_xor(places << 31) | 1
    sums = [(part * factors[: part.numel()]).sum() for part in words.split(_WORDS)]
    return [torch.stack(sums), memory[end:]]


def fingerprint_of_memory(home: torch.UntypedStorage) -> Fingerprint:
    """Return the fingerprint of all bytes of a storage."""
    with privately():
        return fingerprint_of(whole(home))
