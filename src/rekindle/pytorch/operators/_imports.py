"""Run code when the program imports a Python module, without importing that module earlier."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, final

Act = Callable[[Any], AbstractContextManager[Any]]


@contextmanager
def when_imported(name: str, act: Act) -> Iterator[None]:
    """Enter the context manager `act(module)` once the program has imported the module `name`.

    If the module is already imported, enter `act(module)` at once. The context manager is exited at
    the end of the `with` block, in the thread of that block, even if another thread imported the
    module.
    """
    with ExitStack() as stack:
        module = sys.modules.get(name)
        if module is not None:
            stack.enter_context(act(module))
            yield
            return
        watch = _Watch(name, lambda module: stack.enter_context(act(module)))
        sys.meta_path.insert(0, watch)
        stack.callback(watch.end)
        yield


@final
class _Watch:
    """A finder on `sys.meta_path` that wraps the loader that other finders give one module."""

    def __init__(self, name: str, imported: Callable[[ModuleType], object]) -> None:
        self._name = name
        self._imported: Callable[[ModuleType], object] | None = imported

    def end(self) -> None:
        """Remove this finder from `sys.meta_path`, and do not call `imported` any more."""
        self._imported = None
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module spec of a later finder, with a loader that calls `imported`."""
        if name != self._name:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                self._tell_after(spec)
                return spec
        return None

    def _tell_after(self, spec: ModuleSpec) -> None:
        """Make the loader of `spec` call `imported` after it has executed the module."""
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_tell(module: ModuleType) -> None:
            # Several `_Watch` objects may have replaced this loader's method.
            vars(loader).pop("exec_module", None)
            execute(module)
            if self._imported is not None:
                self._imported(module)

        loader.exec_module = execute_and_tell
