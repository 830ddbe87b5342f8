"""What operators take inside themselves on the CPU, for the core in Python: the other counts."""

from __future__ import annotations

from types import ModuleType
from typing import Any, final

from rekindle.pytorch.native._core import core
from rekindle.pytorch.online import Used, Workspaces


@final
class OnHost:
    """Asks the wrapper around PyTorch's allocator for the CPU, which counts for all threads."""

    def __init__(self, core: ModuleType) -> None:
        self._core = core

    def begin(self) -> Any:
        return self._core.watch()

    def end(self, begun: Any) -> Used:
        now, most = self._core.watched()
        return Used(max(0, most - now), now - begun)


def workspaces_on_host() -> Workspaces | None:
    """None where nobody counts, which is so unless somebody asked the core to
    (`count_allocations`): budgets that are just enough on a CPU are not, with what operators of
    theirs take inside themselves."""
    module = core(build=False)
    return None if module is None or module.watch() is None else Workspaces(OnHost(module))
