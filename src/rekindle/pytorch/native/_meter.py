"""What operators take inside themselves on the CPU, for the core in Python: the other counts."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any, final

from rekindle._types import Bytes, Nanoseconds
from rekindle.pytorch.native._core import core
from rekindle.pytorch.online import Used, Workspaces
from rekindle.pytorch.operators import Operator, is_roomy_on_host


@final
class OnHost:
    """Asks the wrapper around PyTorch's allocator for the CPU, which counts for all threads."""

    in_single = True

    def __init__(self, core: ModuleType) -> None:
        self._core = core

    def begin(self) -> Any:
        return self._core.watch() or None

    def end(self, begun: Any) -> Used:
        kept, most = self._core.watched()
        return Used(most - kept, kept)

    def suspects(self, operator: Operator) -> bool:
        return is_roomy_on_host(operator.name)


def workspaces_on_host() -> Workspaces | None:
    """None where nobody can count: the core is not there, or another allocator insists."""
    module = core(build=False)
    if module is None:
        return None
    return Workspaces(OnHost(module)) if module.count_allocations() else None


def seen_natively() -> Iterator[tuple[str, tuple[tuple[int, ...], ...], Nanoseconds, Bytes]]:
    """Of each signature that ran on the native core what `seen_here` says of those of the other."""
    module = core(build=False)
    if module is not None:
        yield from module.seen()
