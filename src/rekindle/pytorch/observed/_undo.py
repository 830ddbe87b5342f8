"""Run training steps and restore the program afterwards: weights, state, generators."""

from __future__ import annotations

from typing import Any, final

from torch.utils._python_dispatch import TorchDispatchMode

from rekindle.pytorch.observed._before import Before


@final
class Undo(TorchDispatchMode):
    """While entered, save what operators overwrite; `restore()` writes it back (see `Before`)."""

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
