"""Where recomputation runs: beneath the modes of the program, as each operator did the first time.

The runtime's mode sees an operator after all modes that were entered later have changed it, and
those that were entered before see what the runtime runs. Recomputation starts there again: a mode
that scales, counts or caches (as those of selective checkpointing) acts once. Within a mode it has
to be: kernels that call other operators (`linalg_pinv`) round differently where there is none.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any, Final, final

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from rekindle.pytorch.online._leaves import unwatched
from rekindle.pytorch.operators import operator

Modes = tuple[TorchDispatchMode, ...]

_C: Any = torch._C


@final
class _Passing(TorchDispatchMode):
    """Stands where the budget's own mode stood when an operator ran the first time."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        run = operator(func).func if type(func) is OpOverload else func
        return run(*args, **(kwargs or {}))


_PASSING: Final = _Passing()


@final
class Work:
    """Which operators are the runtime's own: those that it runs again, and for copies."""

    def __init__(self) -> None:
        self.thread = 0  #: the thread that they run in, if they do
        self._below: Modes = ()  #: dispatch modes around the context
        self._own: weakref.ref[TorchDispatchMode] | None = None

    def opens(self, mode: TorchDispatchMode) -> None:
        """`mode` is the budget's own, and about to be entered."""
        self._below, self._own = dispatch_modes(), weakref.ref(mode)

    @property
    def mine(self) -> bool:
        """Whether the operators of this thread are the runtime's own."""
        return self.thread == get_ident()

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Inside they are, and no mode of the program's sees them. With the driver's lock only."""
        before, self.thread = self.thread, get_ident()
        try:
            with self._beneath_the_program_s():
                yield
        finally:
            self.thread = before

    @contextmanager
    def _beneath_the_program_s(self) -> Iterator[None]:
        """Inside there are the modes around the context, one that passes everything on, and no
        others; and no function mode hears of anything."""
        found = dispatch_modes()
        with unwatched():
            own = self._own and self._own()  # passes on what is its runtime's
            if own is not None and found == (*self._below, own):
                yield
                return
            _exchange((*self._below, _PASSING))
            try:
                yield
            finally:
                _exchange(found)


@contextmanager
def pushed(mode: TorchDispatchMode) -> Iterator[None]:
    """Inside, `mode` is one of this thread's. PyTorch's note of modes does not tell of it: that is
    one for all threads, and each puts back what it found, so that it would stay set for good where
    a thread that began within another mode outlives that."""
    _push_mode(mode)
    try:
        yield
    finally:
        _pop_mode()


def dispatch_modes() -> Modes:
    """Those of this thread, the outermost first."""
    return tuple([_C._get_dispatch_stack_at(i) for i in range(_C._len_torch_dispatch_stack())])


def _exchange(modes: Modes) -> None:
    while _C._len_torch_dispatch_stack():
        _pop_mode()
    for mode in modes:
        _push_mode(mode)
