"""Acts on a module when the program imports it, so that nobody has to import it for the program."""

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
    """Enter `act(module)` now if the program has imported the module `name`, else once it has.

    What was entered is left where this is left, whichever thread imported the module.
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
    """Stands before the finders of modules; finds none itself."""

    def __init__(self, name: str, imported: Callable[[ModuleType], object]) -> None:
        self._name = name
        self._imported: Callable[[ModuleType], object] | None = imported

    def end(self) -> None:
        """Do nothing from now on."""
        self._imported = None
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As other finders have it: what the next one says, which will tell when it is done."""
        if name != self._name:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                self._tell_after(spec)
                return spec
        return None

    def _tell_after(self, spec: ModuleSpec) -> None:
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_tell(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)  # several may have replaced it
            execute(module)
            if self._imported is not None:
                self._imported(module)

        loader.exec_module = execute_and_tell
