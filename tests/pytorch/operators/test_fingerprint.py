"""Tests of checksums (fingerprints) of tensors: each byte and the order of bytes count.

One kind of checksum is computed on a device, which may add in any order.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rekindle.pytorch.operators import _fingerprint, fingerprint_of


def by_sums(memory: Tensor) -> list[list[int]]:
    return [part.tolist() for part in _fingerprint._sums(memory)]


def by_hash(memory: Tensor) -> bytes:
    return fingerprint_of(memory)


@pytest.mark.parametrize("fingerprint", [by_sums, by_hash])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 64, 16 * 8 + 3, 40 * 8])
def test_fingerprint_differs_for_each_flipped_bit_and_order(
    monkeypatch: pytest.MonkeyPatch, fingerprint, length: int
) -> None:
    monkeypatch.setattr(_fingerprint, "_WORDS", 16)  # large enough for several partial sums
    torch.manual_seed(0)
    memory = torch.randint(0, 256, (length,), dtype=torch.uint8)
    first = fingerprint(memory)
    assert fingerprint(memory.clone()) == first
    for place in range(length):
        for bit in range(8):
            memory[place] ^= 1 << bit
            assert fingerprint(memory) != first
            memory[place] ^= 1 << bit
    words = memory[: length // 8 * 8].view(-1, 8)
    for one in range(len(words)):
        for other in range(one):
            swapped = memory.clone()
            swapped[: len(words) * 8].view(-1, 8)[[one, other]] = words[[other, one]]
            assert fingerprint(swapped) != first


@pytest.mark.parametrize("offset", [0, 4, 8])
def test_fingerprint_does_not_depend_on_alignment(offset: int) -> None:
    content = torch.arange(100, dtype=torch.uint8)
    memory = torch.zeros(200, dtype=torch.uint8)
    memory[offset : offset + 100] = content
    assert by_sums(memory[offset : offset + 100]) == by_sums(content)
    assert by_hash(memory[offset : offset + 100]) == by_hash(content)


def test_empty_tensor_has_fingerprint() -> None:
    assert fingerprint_of(torch.empty(0)) == fingerprint_of(torch.empty(0))
    assert fingerprint_of(torch.tensor(0.0)) != fingerprint_of(torch.tensor(-0.0))
