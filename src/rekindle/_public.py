"""Set the module that a public class or function reports as its own.

With this, `help` and tracebacks show the path that users write, such as `rekindle.trace.Trace` for
a class of `rekindle.trace._model`. Pickles refer to that path too. The packages whose names are
public call `publish`.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import FunctionType


def publish(module: str, values: Iterable[object]) -> None:
    """Set `__module__` of each class and function of Rekindle in `values`.

    Args:
        module: The public module, which has each of these values as an attribute of its own name.
        values: Classes and functions. Other objects, such as modules and constants, are ignored.
    """
    for value in values:
        if isinstance(value, type | FunctionType) and value.__module__.startswith("rekindle."):
            value.__module__ = module
