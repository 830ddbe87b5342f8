"""Tells the content of tensors apart by a few bytes of each, wherever they are."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from rekindle.pytorch.operators._signature import PLAIN_TENSORS

Fingerprint = bytes


def fingerprint_of(tensor: Tensor) -> Fingerprint:
    """Equal for equal bits, types and shapes; 0.0 and -0.0 differ. No dispatch mode sees it.

    Of what has no plain memory (sparse, quantized, subclasses) only type and shape count.
    """
    told = f"{type(tensor).__name__} {tensor.dtype} {tuple(tensor.shape)} {tensor.device.type}"
    digest = hashlib.blake2b(told.encode(), digest_size=16)
    plain = type(tensor) in PLAIN_TENSORS and tensor.layout is torch.strided
    if plain and not tensor.is_quantized and tensor.device.type != "meta" and tensor.numel():
        with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
            flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
            digest.update(flat.view(torch.uint8).cpu().numpy().data)
    return digest.digest()


def fingerprint_of_memory(home: torch.UntypedStorage) -> Fingerprint:
    """Of all bytes of a storage."""
    with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
        return fingerprint_of(whole(home))


def whole(home: torch.UntypedStorage) -> Tensor:
    """The bytes of `home` as a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=home.device).set_(home)  # type: ignore[call-overload]
