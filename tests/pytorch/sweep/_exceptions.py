"""List samples of operators whose results may differ, with reasons.

Each exception names one case that shows the difference. Tests run that case, and it must have the
listed outcome. An exception that is not needed fails the tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch


class Exempt(NamedTuple):
    """Cases of an entry whose outcome may be `kind` instead of "same"."""

    kind: str
    shown_by: str  #: name of a case with this outcome
    reason: str


#: Uninitialized memory differs from run to run; PyTorch has a setting that fills it.
WITHOUT_CONTENT = {
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "linalg.lstsq",  # LAPACK reads uninitialized rows: the last bits differ from run to run
    "linalg.lstsq.grad_oriented",
    "new_empty",
    "new_empty_strided",
}


@contextmanager
def filled(entry: str) -> Iterator[None]:
    """Fill the uninitialized memory that an entry makes."""
    if entry not in WITHOUT_CONTENT:
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


#: Entries of a database (such as one operator) without a sample that runs on a CPU.
NOT_HERE = {
    "jiterator_2inputs_2outputs": "for GPUs only",
    "jiterator_4inputs_with_extra_args": "for GPUs only",
    "jiterator_binary": "for GPUs only",
    "jiterator_binary_return_by_ref": "for GPUs only",
    "jiterator_unary": "for GPUs only",
    "nn.functional.batch_norm.without_cudnn": "for GPUs only: it has no samples here",
    "torch.ops.aten._efficient_attention_forward": "for GPUs only: it has no samples here",
    "torch.ops.aten._flash_attention_forward": "for GPUs only: it has no samples here",
}

_NO_TENSOR = "its result is no tensor, and it saves nothing"
_ZEROS = "zeros without an observed write are never evicted: a kernel may have added to them"
_EMPTY = "uninitialized memory is never evicted: a kernel may have filled it"

#: Entries of which no sample recomputes anything, if only the first sample of each entry is
#: differentiated twice, as in CI.
NOTHING_TO_RECOMPUTE = {
    "allclose": _NO_TENSOR,
    "broadcast_shapes": _NO_TENSOR,
    "empty": _EMPTY,
    "empty_like": _EMPTY,
    "empty_permuted": _EMPTY,
    "empty_strided": _EMPTY,
    "equal": _NO_TENSOR,
    "item": _NO_TENSOR,
    "new_empty": _EMPTY,
    "new_empty_strided": _EMPTY,
    "new_zeros": _ZEROS,
    "resize_": "results of operators that resize memory are never evicted",
    "resize_as_": "results of operators that resize memory are never evicted",
    "zeros": _ZEROS,
    "zeros_like": _ZEROS,
}

_ANY_MODE = "as in any mode"
_COMPOSED = "its gradient is composed of other operators while any dispatch mode is active"
_CHUNKED = "other kernels multiply its chunks while any dispatch mode is active"

#: Entries for which PyTorch uses another code path while any dispatch mode is active. These tests
#: evict everything after each operator by a dispatch mode. So the last bits (for `ormqr`, the
#: strides) equal those under a mode that does nothing: the verdict "as in any mode". `linalg.eigh`
#: fails under both modes.
OPINFO: dict[str, Exempt] = {
    "cumprod": Exempt(_ANY_MODE, "float64 sample 0 twice", _COMPOSED),
    "linalg.det": Exempt(_ANY_MODE, "complex128 sample 2 twice", _COMPOSED),
    "linalg.eig": Exempt(_ANY_MODE, "float64 sample 0 twice", _COMPOSED),
    "linalg.eigh": Exempt(_ANY_MODE, "complex128 sample 0 twice", _COMPOSED),
    "linalg.vander": Exempt(_ANY_MODE, "float64 sample 2 twice", _COMPOSED),
    "masked.cumprod": Exempt(_ANY_MODE, "float64 sample 1 twice", _COMPOSED),
    "masked.prod": Exempt(_ANY_MODE, "complex128 sample 13", _COMPOSED),
    "masked_fill": Exempt(_ANY_MODE, "complex128 sample 6", _COMPOSED),
    "matrix_exp": Exempt(_ANY_MODE, "complex128 sample 0 twice", _COMPOSED),
    "ormqr": Exempt(_ANY_MODE, "float64 sample 0", _COMPOSED),
    "prod": Exempt(_ANY_MODE, "float64 sample 4", _COMPOSED),
}
MODULES: dict[str, Exempt] = {
    "nn.LinearCrossEntropyLoss": Exempt(_ANY_MODE, "float64 training input 47", _CHUNKED),
}
OPTIMIZERS: dict[str, Exempt] = {}
