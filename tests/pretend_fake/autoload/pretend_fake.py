"""Load the stand-in for PyTorch's FakeTensor in C++ with each `import torch`.

PyTorch calls `load`, because the folder is on PYTHONPATH and names it as a backend of torch.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_loaded: list[ctypes.CDLL] = []


def load() -> None:
    """Load the library, and let Python's FakeTensorMode clear the dispatch key when it ends."""
    from torch.utils._python_dispatch import TorchDispatchMode

    library = ctypes.CDLL(os.environ["PRETENDED_FAKE"], mode=ctypes.RTLD_GLOBAL)
    _loaded.append(library)
    ends: Callable[..., Any] = TorchDispatchMode.__exit__

    def clears(mode: TorchDispatchMode, *error: Any) -> Any:
        result = ends(mode, *error)
        if type(mode).__name__ == "FakeTensorMode":
            library.exit_mode()
        return result

    TorchDispatchMode.__exit__ = clears  # type: ignore[method-assign]


@contextmanager
def mode() -> Iterator[None]:
    """Inside the block, operators make fake tensors."""
    _loaded[0].enter_mode()
    try:
        yield
    finally:
        _loaded[0].exit_mode()


def calls() -> int:
    """Return how many operators have run on fake tensors."""
    return int(_loaded[0].n_calls())
