"""Export the costs and workspaces of operators that the native core measured."""

from __future__ import annotations

from collections.abc import Iterator

from rekindle._types import Bytes, Nanoseconds
from rekindle.pytorch.native._core import core


def signatures_seen() -> Iterator[tuple[str, tuple[tuple[int, ...], ...], Nanoseconds, Bytes]]:
    """Iterate over the signatures of all operators that ran in this process.

    Yields:
        The operator's name, the sizes of its tensors, its cost (ns) and its workspace (bytes).
    """
    module = core(build=False)
    if module is not None:
        yield from module.seen()
