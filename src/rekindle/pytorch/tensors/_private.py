"""Work of our own on the program's tensors: nobody sees the operators that do it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

_C: Any = torch._C

#: What sees operators: dispatch modes and subclasses, and the native core once it is there.
_seeing: list[Any] = [
    _C.DispatchKeySet(_C.DispatchKey.Python) | _C.DispatchKeySet(_C.DispatchKey.PythonTLSSnapshot)
]


def privately() -> AbstractContextManager[Any]:
    """Inside, operators of this thread are PyTorch's alone: no mode and no core sees them."""
    return _C._ExcludeDispatchKeyGuard(_seeing[0])


def sees(keys: Any) -> None:
    """Whoever is called at these dispatch keys sees operators, and is not to see ours."""
    _seeing[0] |= keys
