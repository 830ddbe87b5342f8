"""Read PyTorch's global settings that determine which kernels a CUDA device runs."""

from __future__ import annotations

from typing import Any

import torch

_C: Any = torch._C


def kernels_in_words() -> str:
    """Return the settings that affect the choice of kernels, and thus costs, as a text."""
    precision = _C._get_fp32_precision_getter("cuda", "matmul")
    chosen = "benchmark" if _C._get_cudnn_benchmark() else "heuristics"
    settled = _C._get_cudnn_deterministic() or _C._get_deterministic_algorithms()
    return f"{precision}-{chosen}{'-deterministic' if settled else ''}"


def kernels_are_timed() -> bool:
    """Return True if cuDNN times its kernels and takes the fastest, which may change later."""
    settled = _C._get_cudnn_deterministic() or _C._get_deterministic_algorithms()
    return _C._get_cudnn_benchmark() and not settled
