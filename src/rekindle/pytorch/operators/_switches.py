"""PyTorch's switches that choose among a device's kernels."""

from __future__ import annotations

from typing import Any

import torch

_C: Any = torch._C


def kernels_in_words() -> str:
    """What a device's kernels are chosen by, and so what they cost."""
    precision = _C._get_fp32_precision_getter("cuda", "matmul")
    chosen = "benchmark" if _C._get_cudnn_benchmark() else "heuristics"
    settled = _C._get_cudnn_deterministic() or _C._get_deterministic_algorithms()
    return f"{precision}-{chosen}{'-deterministic' if settled else ''}"


def kernels_are_timed() -> bool:
    """Whether cuDNN tries its kernels and takes the quickest, which may be another one later."""
    settled = _C._get_cudnn_deterministic() or _C._get_deterministic_algorithms()
    return _C._get_cudnn_benchmark() and not settled
