"""Detect that other code gets write access to a tensor's memory, or writes it without an operator.

Writes through NumPy arrays, DLPack capsules and storages bypass the dispatcher. Inside a budget
this file replaces the functions that give such access, or write themselves. The replacements report
the memory to the runtime first, so that values with recipes stay correct
(`native/memory/sources/sources.h`).

`data_ptr()` is not replaced, because kernels use it far more often for reading than for writing.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, final

import torch
from torch import Tensor, UntypedStorage
from torch._C._dynamo import eval_frame
from torch.utils import dlpack
from torch.utils._pytree import tree_leaves

from rekindle.pytorch.online._fsdp import NEVER
from rekindle.pytorch.operators import is_plain
from rekindle.pytorch.tensors import homes_of

P = ParamSpec("P")
T = TypeVar("T")
#: Dynamo compiles neither a function with this strategy nor the functions that it calls.
_AS_IT_IS = eval_frame._FrameExecStrategy(
    eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP
)
Wrap = Callable[[Any], Any]
#: Called with a storage before other code gets write access to it, or before other code writes it.
GivenAway = Callable[[UntypedStorage], None]


class Listener(Protocol):
    """The methods of the native driver (the state of one budget) that this file uses."""

    def mark_externally_writable(self, home: UntypedStorage) -> None:
        """Record that other code may write to the storage `home` from now on."""
        ...

    def about_to_write_unseen(self, home: UntypedStorage) -> None:
        """Prepare for one write to the storage `home` that no operator makes."""
        ...

    def about_to_resize(
        self, home: UntypedStorage, nbytes: int, newest: int, /
    ) -> Callable[[], None] | None:
        """Prepare for other memory of the storage `home`. Return a function to call afterwards."""
        ...

    def version_raised(self, home: UntypedStorage) -> None:
        """Record that the program has raised the version of the tensors in `home`."""
        ...

    def unknown_runs(self, name: str, tensors: list[Tensor]) -> AbstractContextManager[None]:
        """Inside the block, keep `tensors` and what the higher-order operator `name` makes."""
        ...


#: The functions that `Tensor.__dlpack__` calls, by module. They make capsules for other libraries.
CAPSULES = {
    torch._C: ("_to_dlpack", "_to_dlpack_versioned"),
    dlpack: ("to_dlpack",),
    torch: ("to_dlpack",),
}
#: Methods of `UntypedStorage` that share it with another process. Sending a tensor to another
#: process uses these methods.
_SHARING = ("_share_cuda_", "_share_fd_cpu_", "_share_filename_cpu_")
#: Methods of `UntypedStorage` that write to the storage.
_WRITES_OF_STORAGES = ("__setitem__", "_byteswap", "_set_from_file", "copy_", "fill_")
#: Methods of a tensor that write to it by a Python function, without any operator.
_WRITES_OF_TENSORS = ("apply_", "map_", "map2_")
#: Parts of the paths of PyTorch's files that raise the versions of what a custom operator or a
#: compiled region writes, before it runs. Generated code has such a path, but no module.
_BEFORE_WRITES = ("torch/_library/custom_ops", "torch/_functorch/_aot_autograd")


@final
class Current(Generic[T]):
    """A value that the replacements of functions look up when they are called.

    A replacement has no reference to the budget itself, because other code may keep the replacement
    forever (compiled code does).
    """

    def __init__(self) -> None:
        #: the value for the active budget, or None while no budget is active
        self.now: T | None = None

    @contextmanager
    def during(self, value: T) -> Iterator[None]:
        """Inside the block, let the replacements of functions see `value`."""
        before, self.now = self.now, value
        try:
            yield
        finally:
            self.now = before


_listener = Current[Listener]()


#: Storages of which a DLPack capsule was made, by address.
_exported: dict[int, weakref.ref[UntypedStorage]] = {}


def exported() -> list[UntypedStorage]:
    """Return the living storages of which a DLPack capsule was made, in or before a budget.

    Other libraries may have the address of their memory. (PyTorch marks the storage itself if it
    makes a NumPy array or shares memory.)
    """
    homes = [each() for each in list(_exported.values())]
    return [home for home in homes if home is not None]


def _remembering(original: Any) -> Any:
    """Return a function that makes a DLPack capsule as `original`, and remembers the storage.

    In a budget, it tells the listener.
    """

    @functools.wraps(original)
    def export(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        listener = _listener.now
        if listener is not None and not by_rekindle(2):
            hand_out(listener.mark_externally_writable, tensor)
        capsule = original(tensor, *args, **kwargs)
        for home in homes_of([tensor]):
            forget = functools.partial(_exported.pop, home._cdata)
            _exported[home._cdata] = weakref.ref(home, forget)
        return capsule

    return not_compiled(export)


def _remember_exports() -> None:
    """Remember from now on which storages are exported by DLPack, also outside of budgets."""
    for module, names in CAPSULES.items():
        for name in names:
            if hasattr(module, name):
                setattr(module, name, _remembering(getattr(module, name)))


@contextmanager
def handing_out_seen(listener: Listener) -> Iterator[None]:
    """Inside the block, tell `listener` before other code writes or may write a tensor's memory.

    Args:
        listener: The native driver.
    """

    def lent(original: Any) -> Any:
        @functools.wraps(original)
        def lend(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            listener = _listener.now
            if listener is not None and not by_rekindle(2):
                hand_out(listener.mark_externally_writable, tensor)
            return original(tensor, *args, **kwargs)

        return lend

    def filled(original: Any) -> Any:
        @functools.wraps(original)
        def fill(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            listener = _listener.now
            if listener is not None:
                hand_out(listener.about_to_write_unseen, tensor)
            return original(tensor, *args, **kwargs)

        return fill

    def shared(original: Any) -> Any:
        @functools.wraps(original)
        def share(home: UntypedStorage, *args: Any, **kwargs: Any) -> Any:
            listener = _listener.now
            if listener is not None:
                listener.mark_externally_writable(home)
            return original(home, *args, **kwargs)

        return share

    def written(original: Any) -> Any:
        @functools.wraps(original)
        def write(home: UntypedStorage, *args: Any, **kwargs: Any) -> Any:
            listener = _listener.now
            if listener is not None:
                listener.about_to_write_unseen(home)
            return original(home, *args, **kwargs)

        return write

    def exchanged(original: Any) -> Any:
        @functools.wraps(original)
        def exchange(home: UntypedStorage, other: UntypedStorage) -> Any:
            listener = _listener.now
            if listener is None:
                return original(home, other)
            for each in (home, other):
                listener.about_to_write_unseen(each)
            known = (listener.about_to_resize(each, each.nbytes(), NEVER) for each in (home, other))
            rebound = next(filter(None, known), None)
            result = original(home, other)
            if rebound is not None:
                rebound()
            return result

        return exchange

    def raised(original: Any) -> Any:
        @functools.wraps(original)
        def increment(tensors: Iterable[Tensor]) -> None:
            listener = _listener.now
            # Operators of `torch.library.custom_op` and compiled regions call this function before
            # they run. The native core sees what they write.
            if listener is None or _raises_before_write(2):
                original(tensors)
                return
            listed = tuple(tensors)
            original(listed)
            for tensor in listed:
                hand_out(listener.version_raised, tensor)

        return increment

    with _listener.during(listener), ExitStack() as stack:
        replace(stack, Tensor, "numpy", lent)
        # Hide this exchange API, which consumers prefer over `__dlpack__`. Without it they use
        # `__dlpack__`, which is replaced.
        hide(stack, Tensor, "__dlpack_c_exchange_api__")
        for name in _WRITES_OF_TENSORS:
            replace(stack, Tensor, name, filled)
        for name in _WRITES_OF_STORAGES:
            replace(stack, UntypedStorage, name, written)
        replace(stack, torch._C, "_increment_version", raised)
        if hasattr(UntypedStorage, "_swap_data_ptr_"):
            replace(stack, UntypedStorage, "_swap_data_ptr_", exchanged)
        for name in _SHARING:
            if hasattr(UntypedStorage, name):
                replace(stack, UntypedStorage, name, shared)
        yield


def perhaps_written(name: str, arguments: object) -> AbstractContextManager[None]:
    """Prepare for the higher-order operator `name`, which may write its arguments unseen.

    Returns:
        A context manager around the call.
    """
    listener = _listener.now
    if listener is None:
        return nullcontext()
    tensors = [each for each in tree_leaves(arguments) if isinstance(each, Tensor)]
    for each in tensors:
        hand_out(listener.about_to_write_unseen, each)
    return listener.unknown_runs(name, tensors)


def hand_out(given_away: GivenAway, tensor: Tensor) -> None:
    """Report the storage of `tensor` to `given_away`, if the tensor has plain memory."""
    if is_plain(type(tensor)) and tensor.layout is torch.strided and tensor.device.type != "meta":
        given_away(tensor.untyped_storage())


def by_rekindle(depth: int) -> bool:
    """Return True if the caller `depth` frames up is code of Rekindle."""
    return str(sys._getframe(depth).f_globals.get("__name__", "")).startswith("rekindle.")


def _raises_before_write(depth: int) -> bool:
    """Return True if the code above the caller, `depth` frames up, is that of `_BEFORE_WRITES`."""
    path = sys._getframe(depth + 1).f_code.co_filename.replace("\\", "/")
    return any(part in path for part in _BEFORE_WRITES)


def replace(stack: ExitStack, owner: Any, name: str, wrap: Wrap) -> None:
    """Replace `owner.name` by `wrap(owner.name)` until `stack` unwinds.

    If `owner` inherits the attribute, the replacement is set on `owner` itself.
    """
    own = vars(owner).get(name)
    replacement = wrap(getattr(owner, name) if own is None else own)
    if hasattr(replacement, "__code__"):
        not_compiled(replacement)
    setattr(owner, name, replacement)
    stack.callback(_put_back, owner, name, own)


def not_compiled(function: Callable[P, T]) -> Callable[P, T]:
    """Let compiled code call `function` as it is; Dynamo must not compile it in its turn.

    Dynamo's helpers call functions that Rekindle replaces (`numpy`). So a replacement that Dynamo
    compiled would call itself without end.

    Returns:
        The same function.
    """
    eval_frame.set_code_exec_strategy(function.__code__, _AS_IT_IS)
    return function


def not_traced(function: Callable[P, T]) -> Callable[P, T]:
    """Let Dynamo call `function` between two pieces of compiled code, instead of tracing it.

    `torch.compiler.disable` does the same, but it imports Dynamo, which takes seconds.

    Returns:
        The same function.
    """
    not_compiled(function)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def hide(stack: ExitStack, owner: Any, name: str) -> None:
    """Delete the attribute `name` of `owner` itself until `stack` unwinds."""
    own = vars(owner).get(name)
    if own is not None:
        delattr(owner, name)
        stack.callback(_put_back, owner, name, own)


def _put_back(owner: Any, name: str, own: Any) -> None:
    """Set the attribute `name` of `owner` to `own`; delete it if `own` is None (inherited)."""
    if own is None:
        delattr(owner, name)
    else:
        setattr(owner, name, own)


_remember_exports()
