"""Run Rekindle's own operators on the program's tensors without anything observing them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

_C: Any = torch._C

#: Keys that observe operators: dispatch modes, subclasses, and the native core once it is loaded.
_seeing: list[Any] = [
    _C.DispatchKeySet(_C.DispatchKey.Python) | _C.DispatchKeySet(_C.DispatchKey.PythonTLSSnapshot)
]


def privately() -> AbstractContextManager[Any]:
    """While open, hide operators of this thread from modes, subclasses and the native core."""
    return _C._ExcludeDispatchKeyGuard(_seeing[0])


def sees(keys: Any) -> None:
    """Add dispatch keys of an observer, which `privately` then excludes."""
    _seeing[0] |= keys
