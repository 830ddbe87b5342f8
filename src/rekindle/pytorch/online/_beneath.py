"""Where recomputation runs: beneath the modes of the program, as each operator did the first time.

The runtime's mode sees an operator after all modes that were entered later have changed it, and
those that were entered before see what the runtime runs. Recomputation starts there again: a mode
that scales, counts or caches (as those of selective checkpointing) acts once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

Modes = tuple[TorchDispatchMode, ...]

_C: Any = torch._C

#: Inside, neither function modes nor subclasses of tensors hear of what is called. Of an operator
#: they heard when the program called it, and of what autograd calls they hear nothing.
unwatched: Any = _C.DisableTorchFunction


@final
class Work:
    """Which operators are the runtime's own: those that it runs again, and for copies."""

    def __init__(self) -> None:
        self.thread = 0  #: the thread that they run in, if they do
        self.below: Modes = ()  #: dispatch modes around the context

    @property
    def mine(self) -> bool:
        """Whether the operators of this thread are the runtime's own."""
        return self.thread == get_ident()

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Inside they are, and no mode of the program's sees them. With the driver's lock only."""
        before, self.thread = self.thread, get_ident()
        try:
            with _beneath(self.below):
                yield
        finally:
            self.thread = before


def dispatch_modes() -> Modes:
    """Those of this thread, the outermost first."""
    return tuple([_C._get_dispatch_stack_at(i) for i in range(_C._len_torch_dispatch_stack())])


@contextmanager
def _beneath(modes: Modes) -> Iterator[None]:
    """Inside, `modes` are the only dispatch modes, and no function mode hears of anything."""
    found = dispatch_modes()
    with unwatched():
        if found == modes:
            yield
            return
        _exchange(modes)
        try:
            yield
        finally:
            _exchange(found)


def _exchange(modes: Modes) -> None:
    while _C._len_torch_dispatch_stack():
        _pop_mode()
    for mode in modes:
        _push_mode(mode)
