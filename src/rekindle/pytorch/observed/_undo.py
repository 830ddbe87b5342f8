"""Runs steps of training and leaves the program as it was: nothing that they learn stays."""

from __future__ import annotations

from typing import Any, final

from torch.utils._python_dispatch import TorchDispatchMode

from rekindle.pytorch.observed._before import Before


@final
class Undo(TorchDispatchMode):
    """While it is entered operators run as ever; `restore()` then puts back what `Before` does."""

    def __init__(self) -> None:
        super().__init__()
        self._before = Before()
        self.restore = self._before.restore

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self._before.about_to_run(func, args, kwargs)
        return func(*args, **kwargs)
