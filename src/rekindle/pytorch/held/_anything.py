"""`rekindle.budget(..., evict="anything")`: what the program holds is evicted as well.

Dynamic Tensor Rematerialization as its paper has it (Kirisame et al., ICLR 2021): any tensor, with
or without autograd. The paper wraps tensors; here they stay PyTorch's own, and their storages are
emptied (`_shells`). A second dispatch mode, around that of the budget, brings back what an operator
is about to read, and `_escapes` knows the ways around the dispatcher.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, final

from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from rekindle._errors import OutOfBudget
from rekindle.pytorch.held._escapes import escapes_seen
from rekindle.pytorch.held._shells import Shells
from rekindle.pytorch.online import Runtime
from rekindle.pytorch.operators import EFFECTS, takes_itself_apart

Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]


@contextmanager
def anything(runtime: Runtime) -> Iterator[tuple[Pack, Unpack]]:
    """Inside, what the program holds may be let go; afterwards all of it is back.

    Gives what saved-tensor hooks are to call in the place of the runtime's own.
    """
    driver = runtime.driver
    shells = driver.table.shells = Shells(driver)
    runtime.without_grad = True
    process = os.getpid()

    def pack(tensor: Tensor) -> Any:
        with shells.present((tensor,)):
            return runtime.pack(tensor)

    def unpack(handle: Any) -> Tensor:
        tensor = runtime.unpack(handle)
        if shells.open:
            shells.stays(tensor)
        return tensor

    with Touching(shells), escapes_seen(shells), shells.threads.in_mode(lambda: Touching(shells)):
        try:
            yield pack, unpack
        finally:
            runtime.without_grad = False
            if os.getpid() == process:
                shells.close()
            else:  # forked: what is empty belongs to the parent, and raises here
                shells.abandon()


@final
class Touching(TorchDispatchMode):
    """Brings back what an operator reads or writes before it runs, and keeps it until it has."""

    supports_higher_order_operators = True

    def __init__(self, shells: Shells) -> None:
        super().__init__()
        self._shells = shells

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as that of the budget

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if types and any(map(takes_itself_apart, types)):
            return NotImplemented
        kwargs = kwargs or {}
        shells = self._shells
        with shells.lock:
            if not shells.open or shells.busy:
                return func(*args, **kwargs)
            plain = type(func) is OpOverload
            tensors = list(_tensors(args, kwargs))
            if plain and func.namespace in EFFECTS:  # may go on reading after it has returned
                for tensor in tensors:
                    shells.keep(tensor)
            locked = shells.bring(tensors)
            try:
                result = self._run(func, args, kwargs)
            finally:
                shells.done(locked)
            shells.made(_tensors((result,), {}))
            if plain and func._schema.is_mutable:
                shells.made(tensors)
            return result

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return func(*args, **kwargs)
        except OutOfBudget:
            # Room is made before an operator runs, so that it can begin anew; others may not.
            native = type(func) is OpOverload and func.namespace == "aten"
            if not native or not self._shells.give_up_sources():
                raise
        return func(*args, **kwargs)


def _tensors(args: Iterable[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors in the arguments, or in a result."""
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, list | tuple):
            yield from _tensors(arg, {})
        elif isinstance(arg, dict):
            yield from _tensors((), arg)
