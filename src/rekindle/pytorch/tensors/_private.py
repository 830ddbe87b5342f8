"""Hide operators that Rekindle itself runs from dispatch modes and from the native core."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

_C: Any = torch._C

#: Dispatch keys of observers of operators: dispatch modes, tensor subclasses, and the native core
#: once it is loaded.
_seeing: list[Any] = [
    _C.DispatchKeySet(_C.DispatchKey.Python) | _C.DispatchKeySet(_C.DispatchKey.PythonTLSSnapshot)
]


def privately() -> AbstractContextManager[Any]:
    """While open, hide operators of this thread from dispatch modes and from the native core."""
    return _C._ExcludeDispatchKeyGuard(_seeing[0])


def sees(keys: Any) -> None:
    """Add the dispatch keys of another observer, from which `privately` then hides operators."""
    _seeing[0] |= keys
