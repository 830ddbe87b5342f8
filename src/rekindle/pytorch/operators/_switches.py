"""Read PyTorch's global settings that determine which kernels a CUDA device runs."""

from __future__ import annotations

from typing import Any

import torch

_C: Any = torch._C


def kernels_in_words() -> str:
    """Return a text with PyTorch's settings that affect the choice and cost of kernels."""
    precision = _C._get_fp32_precision_getter("cuda", "matmul")
    chosen = "benchmark" if _C._get_cudnn_benchmark() else "heuristics"
    settled = _C._get_cudnn_deterministic() or _C._get_deterministic_algorithms()
    return f"{precision}-{chosen}{'-deterministic' if settled else ''}"


def kernels_are_timed() -> bool:
    """Return True if cuDNN times several kernels and takes the fastest.

    Another call of the operator may then take another kernel and give other bits.
    """
    settled = _C._get_cudnn_deterministic() or _C._get_deterministic_algorithms()
    return _C._get_cudnn_benchmark() and not settled
