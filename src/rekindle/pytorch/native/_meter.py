"""What the native core knows of the operators that ran so far."""

from __future__ import annotations

from collections.abc import Iterator

from rekindle._types import Bytes, Nanoseconds
from rekindle.pytorch.native._core import core


def signatures_seen() -> Iterator[tuple[str, tuple[tuple[int, ...], ...], Nanoseconds, Bytes]]:
    """Yield the name, sizes, cost and workspace of each signature that ran.

    The name is that of the operator, the sizes are those of its tensors.
    """
    module = core(build=False)
    if module is not None:
        yield from module.seen()
