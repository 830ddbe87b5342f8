"""Hide operators that Rekindle runs itself from dispatch modes and from the native core."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

_C: Any = torch._C

#: Dispatch keys of everything that observes operators: dispatch modes, tensor subclasses, and the
#: native core once it is loaded.
_seeing: list[Any] = [
    _C.DispatchKeySet(_C.DispatchKey.Python) | _C.DispatchKeySet(_C.DispatchKey.PythonTLSSnapshot)
]


def privately() -> AbstractContextManager[Any]:
    """Inside the block, hide this thread's operators from dispatch modes and the native core."""
    return _C._ExcludeDispatchKeyGuard(_seeing[0])


def sees(keys: Any) -> None:
    """Add dispatch keys from whose kernels `privately` must hide operators too."""
    _seeing[0] |= keys
