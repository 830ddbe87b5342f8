"""Tells the content of tensors apart by a few bytes of each, wherever they are."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from rekindle.pytorch.operators._signature import PLAIN_TENSORS
from rekindle.pytorch.tensors import privately, whole

Fingerprint = bytes

_WORDS = 1 << 20  #: of 8 bytes, that a device sums up at a time: 16 MiB are taken for it
_GOLDEN = -7046029254386353131  #: 2**64 over the golden ratio: multiples of it differ in all bits


def fingerprint_of(tensor: Tensor) -> Fingerprint:
    """Equal for equal bits, types and shapes; 0.0 and -0.0 differ. No dispatch mode sees it.

    Of what has no plain memory (sparse, quantized, subclasses) only type and shape count.
    """
    told = f"{type(tensor).__name__} {tensor.dtype} {tuple(tensor.shape)} {tensor.device.type}"
    digest = hashlib.blake2b(told.encode(), digest_size=16)
    plain = type(tensor) in PLAIN_TENSORS and tensor.layout is torch.strided
    if plain and not tensor.is_quantized and tensor.device.type != "meta" and tensor.numel():
        with privately():
            flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
            memory = flat.view(torch.uint8)
            for part in [memory] if memory.device.type == "cpu" else _sums(memory):
                digest.update(part.cpu().numpy().data)
    return digest.digest()


def _sums(memory: Tensor) -> list[Tensor]:
    """8 bytes for each 8 MiB of `memory`, made where that is, so that little is copied; its end.

    Sums of words, each times an odd number that only its place decides (64 bits, what overflows is
    lost): a word alone cannot change without its sum, in whatever order a device adds.
    """
    end = memory.numel() // 8 * 8
    aligned = memory[:end] if memory.storage_offset() % 8 == 0 else memory[:end].clone()
    words = aligned.view(torch.int64)
    places = torch.arange(min(_WORDS, words.numel()), device=memory.device) + 1
    factors = (places * _GOLDEN).bitwise_xor(places << 31) | 1
    sums = [(part * factors[: part.numel()]).sum() for part in words.split(_WORDS)]
    return [torch.stack(sums), memory[end:]]


def fingerprint_of_memory(home: torch.UntypedStorage) -> Fingerprint:
    """Of all bytes of a storage."""
    with privately():
        return fingerprint_of(whole(home))
