"""What the program holds is evicted as well: at any time, or when nothing else is left.

Dynamic Tensor Rematerialization as its paper has it (Kirisame et al., ICLR 2021): any tensor, with
or without autograd. The paper wraps tensors; here they stay PyTorch's own, and their storages are
emptied (`_shells`). A second dispatch mode, around that of the budget, brings back what an operator
is about to read, and `_escapes` knows the ways around the dispatcher.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, final

from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from rekindle._errors import OutOfBudget
from rekindle.pytorch.held._any_time import AnyTime
from rekindle.pytorch.held._escapes import escapes_seen
from rekindle.pytorch.held._last_resort import LastResort
from rekindle.pytorch.held._shells import Shells, tensors_within
from rekindle.pytorch.online import Runtime, pushed
from rekindle.pytorch.operators import EFFECTS, takes_itself_apart


@contextmanager
def anything(runtime: Runtime) -> Iterator[Anything]:
    """Inside, what the program holds may be let go; afterwards all of it is back."""
    shells = runtime.driver.table.shells = AnyTime(runtime.driver, runtime.record_without_grad)
    runtime.record_without_grad(True)
    with Touching(shells), escapes_seen(shells), _closing(shells):
        try:
            yield Anything(runtime, shells)
        finally:
            runtime.record_without_grad(False)


@contextmanager
def last_resort(runtime: Runtime) -> Iterator[None]:
    """Inside, it may be let go when nothing else is left; afterwards all of it is back."""
    driver = runtime.driver
    shells = driver.resort = driver.table.shells = LastResort(driver)
    with escapes_seen(shells.lending), _closing(shells):
        yield


@contextmanager
def _closing(shells: Shells) -> Iterator[None]:
    process = os.getpid()
    try:
        yield
    finally:
        if os.getpid() == process:
            shells.close()
        else:  # forked: what is empty belongs to the parent, and raises here
            shells.abandon()


@final
class Anything:
    """What a context that lets go of anything does in each of its threads."""

    def __init__(self, runtime: Runtime, shells: AnyTime) -> None:
        self._runtime = runtime
        self._shells = shells

    def pack(self, tensor: Tensor) -> Any:
        """The saved-tensor hook, in the place of the runtime's own."""
        with self._shells.present((tensor,)):
            return self._runtime.pack(tensor)

    def unpack(self, handle: Any) -> Tensor:
        """The other one."""
        tensor = self._runtime.unpack(handle)
        if self._shells.open:
            self._shells.stays(tensor)
        return tensor

    def enter(self, stack: ExitStack) -> Touching:
        """Until `stack` unwinds, the thread that runs this is within, too."""
        stack.enter_context(self._shells.threads.this_one_known())
        touching = Touching(self._shells)
        stack.enter_context(pushed(touching))
        return touching


@final
class Touching(TorchDispatchMode):
    """Brings back what an operator reads or writes before it runs, and keeps it until it has."""

    supports_higher_order_operators = True

    def __init__(self, shells: AnyTime) -> None:
        super().__init__()
        self.shells: AnyTime | None = shells  #: None: the budget is over, and this thread goes on

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as that of the budget

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # likewise: what is compiled stays so

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if types and any(map(takes_itself_apart, types)):
            return NotImplemented
        kwargs = kwargs or {}
        shells = self.shells
        if shells is None:
            return func(*args, **kwargs)
        with shells.lock:
            acting = shells.open and not shells.busy
            if acting and getattr(func, "namespace", "") != "profiler":
                return _touch(shells, func, args, kwargs)
        return func(*args, **kwargs)


def _touch(shells: AnyTime, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    plain = type(func) is OpOverload
    tensors = list(tensors_within(args, kwargs))
    if plain and func.namespace in EFFECTS:  # may go on reading after it has returned
        for tensor in tensors:
            shells.keep(tensor)
    locked = shells.bring(tensors)
    try:
        result = _run(shells, func, args, kwargs)
    finally:
        shells.done(locked)
    made = list(tensors_within(result))
    shells.made(made)
    if any(tensor.is_quantized for tensor in made):  # the scales of its channels are within
        for tensor in tensors:
            shells.keep(tensor)
    if plain and func._schema.is_mutable:
        shells.made(tensors)
    return result


def _run(shells: AnyTime, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return func(*args, **kwargs)
    except OutOfBudget:
        # Room is made before an operator runs, so that it can begin anew; others may not.
        native = type(func) is OpOverload and func.namespace == "aten"
        if not native or not shells.give_up_sources():
            raise
    return func(*args, **kwargs)
