"""`Undo`: a dispatch mode that restores weights, optimizer state and generators after steps."""

from __future__ import annotations

from typing import Any, final

from torch.utils._python_dispatch import TorchDispatchMode

from rekindle.pytorch.observed._before import Before


@final
class Undo(TorchDispatchMode):
    """While entered, save storages before operators overwrite them; `restore()` writes them back.

    See `Before` for the state that it restores.
    """

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
