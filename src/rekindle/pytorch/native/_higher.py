"""Make higher-order operators and code compiled by Inductor visible to the native core.

A higher-order operator has a kernel for each dispatch key. This file adds a kernel for the core's
key that passes the call on, so the core sees the operators inside. Of an operator that is not known
to write nothing, the arguments count as written, and the operators inside get no recipes.

Compiled code runs no operators. This file makes each compiled region one operator (R12, compiled
regions). The region's graph tells which arguments the region writes, and how large its results will
be.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from operator import index
from typing import Any, Final, final

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload, _compute_keyset, _higher_order_ops
from torch.utils._pytree import tree_leaves

from rekindle.pytorch.native._module import Core
from rekindle.pytorch.native._watched import is_watched
from rekindle.pytorch.online import perhaps_written, replace
from rekindle.pytorch.operators import (
    COMPILED,
    FUNCTIONAL,
    REGION,
    TRIED,
    Region,
    region_of,
    regions_shown,
    when_imported,
)
from rekindle.pytorch.tensors import sees

#: namespace of operators that stand for compiled regions that may be recomputed
AGAIN: Final = "rekindle_regions"
#: namespace of operators that stand for forward passes of custom functions (`_functions`)
UNITS: Final = "rekindle_units"
#: namespace of operators that stand for compiled regions that must not be recomputed
ONCE: Final = "rekindle_regions_once"
_STATISTICS, _ATOMICS = 256, 8192  # flags of an operator, as in `operators._traits`
_READ, _WRITTEN, _NUMBER, _NOTHING = range(4)  # kinds of arguments of a compiled region


def shown_name(name: str) -> str:
    """Return the name of an operator to show to users.

    All compiled regions have the same name. An operator that stands for a custom function has the
    name of the function.
    """
    if name.startswith(UNITS):
        return f"{name.partition('::')[2].rpartition('_')[0]}.forward"
    return REGION if name.startswith(AGAIN) else name


_key: list[torch._C.DispatchKey] = []


def is_seen() -> bool:
    """Return True if the core sees the operators that this thread calls now.

    The core does not see operators outside of a budget, nor those that another operator calls. It
    watches some of the latter, which does not count.
    """
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set()
    seen = bool(_key) and included.has(_key[0]) and not excluded.has(_key[0])
    return seen and not is_watched()


def hidden_key() -> torch._C.DispatchKeySet:
    """Return the dispatch keys whose exclusion hides operators from the native core."""
    return torch._C.DispatchKeySet(_key[0])  # type: ignore[attr-defined]


def hidden() -> AbstractContextManager[object]:
    """Inside the block, hide operators of this thread from the core."""
    return torch._C._ExcludeDispatchKeyGuard(hidden_key())  # type: ignore[attr-defined]


@contextmanager
def higher_order_operators_taught(core: Core, keys: torch._C.DispatchKeySet) -> Iterator[None]:
    """Inside the block, let the core see calls of all higher-order operators.

    Some are defined inside the block: by the program, or by PyTorch's compiler when the program
    imports it.
    """
    if not _key:
        _key.append(keys.highestPriorityTypeId())
        sees(keys)
    for each in _higher_order_ops.values():
        _teach(core, each)

    def taught(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def made(higher: HigherOrderOperator, *args: Any, **kwargs: Any) -> None:
            original(higher, *args, **kwargs)
            _teach(core, higher)

        return made

    def covered(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def py_impl(higher: HigherOrderOperator, key: Any) -> Any:
            kernel = higher.py_kernels.get(key)
            return kernel.cover if isinstance(kernel, _Kernel) else original(higher, key)

        return py_impl

    with ExitStack() as stack:
        replace(stack, HigherOrderOperator, "__init__", taught)
        replace(stack, HigherOrderOperator, "py_impl", covered)
        yield


def _teach(core: Core, higher: HigherOrderOperator) -> None:
    """Add a kernel for the core's dispatch key to `higher`. It stays there after the budget."""
    behind = higher.py_kernels.get(_key[0])
    if not isinstance(behind, _Kernel):
        higher.py_kernels[_key[0]] = _Kernel(core, higher, behind)
        higher._dispatch_cache.clear()


@final
class _Kernel:
    """The kernel of a higher-order operator for the core's dispatch key.

    It covers PyTorch's own kernel there, `behind`, which is for fake tensors.
    """

    def __init__(
        self, core: Core, higher: HigherOrderOperator, behind: Callable[..., Any] | None
    ) -> None:
        self._core = core
        self._higher = higher
        self._behind = behind

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        higher = self._higher
        if self._behind is not None and self._core.is_fake_call(*tree_leaves((args, kwargs))):
            return self._behind(*args, **kwargs)
        if not is_seen():
            return self._pass(args, kwargs)
        if higher.name() == COMPILED:
            return _run_region(self._core, args[0], args[1])
        if higher.name() in FUNCTIONAL:
            return self._pass(args, kwargs)
        with perhaps_written(higher.name(), [*args, *kwargs.values()]):
            return self._pass(args, kwargs)

    def cover(self, behind: Callable[..., Any]) -> Callable[..., Any]:
        """Cover `behind`, a kernel that PyTorch registers only now, as a decorator."""
        self._behind = behind
        self._higher._dispatch_cache.clear()
        return behind

    def _pass(self, args: Any, kwargs: Any) -> Any:
        """Call the kernel of the higher-order operator for the next dispatch key."""
        keys = _compute_keyset(args, kwargs, self._higher.non_fallthrough_keys)
        return self._higher.dispatch(keys.remove(_key[0]).highestPriorityTypeId(), *args, **kwargs)


@contextmanager
def compiled_regions_seen() -> Iterator[None]:
    """Make PyTorch run code that it compiles inside the block as a higher-order operator."""
    with regions_shown(), when_imported("torch._inductor.output_code", _as_in_a_mode):
        yield


@contextmanager
def _as_in_a_mode(output_code: Any) -> Iterator[None]:
    """Make regions that Inductor compiled run as one higher-order operator, which the core sees.

    PyTorch does so only where `is_in_torch_dispatch_mode` returns True. Inside the block this
    function returns True also where the core sees operators.
    """
    inside = output_code.is_in_torch_dispatch_mode

    def seen() -> bool:
        return inside() or is_seen()

    output_code.is_in_torch_dispatch_mode = seen
    try:
        yield
    finally:
        output_code.is_in_torch_dispatch_mode = inside


# -- compiled regions -----------------------------------------------------------------------------


def _run_region(core: Core, compiled: Any, inputs: list[Any]) -> Any:
    """Run the code of a compiled region as one operator."""
    region = region_of(compiled)
    tried = region.may_differ([each for each in inputs if isinstance(each, Tensor)])
    found = _operators.get((region, tried))
    if found is None:
        found = _operators[region, tried] = _RegionOperator(core, region, tried=tried)
    arguments = list(inputs)
    # Keep no references here, so that inputs can be freed while the region runs, as in PyTorch's
    # own kernel.
    inputs.clear()
    with torch._C._AutoDispatchBelowAutograd(), torch.set_grad_enabled(region.training):  # type: ignore[attr-defined]
        return found.run(arguments)


#: Operators by region and `tried`. They are kept forever, with their code, because recipes of
#: living graphs may run it.
_operators: dict[tuple[Region, bool], _RegionOperator] = {}


@final
class _RegionOperator:
    """The operator of the core that runs one compiled region.

    Its arguments are the tensors that the region reads, the tensors that it writes, the numbers,
    and the kind of each original argument. With `tried`, the region is recomputed only after a
    trial has shown that it gives the same bits.
    """

    def __init__(self, core: Core, region: Region, *, tried: bool) -> None:
        namespace = ONCE if region.opaque else AGAIN
        self._library = torch.library.Library(namespace, "FRAGMENT")
        self._written = {position for position, _ in region.written}
        # `.results`: the results of the region's last run in this thread, with `_TENSOR` in place
        # of each tensor.
        self._last = threading.local()
        name = f"region_{len(_operators)}"
        written = "Tensor(a!)[]" if self._written else "Tensor[]"
        self._library.define(
            f"{name}(Tensor[] read, {written} written, int[] numbers, int[] places) -> Tensor[]",
            tags=(torch.Tag.nondeterministic_seeded,),
        )
        for backend in ("CPU", "CUDA"):
            self._library.impl(name, self._kernel(region.func), backend)
        self._library.impl(name, self._kernel(region.predicting), "Meta")
        traits = (_STATISTICS if region.statistics else 0) | (TRIED if tried else 0)
        traits |= _ATOMICS if tried and region.by_atomics else 0
        if traits:
            core.learn_traits(f"{namespace}::{name}", traits)
        self._overload: OpOverload = getattr(getattr(torch.ops, namespace), name).default

    def run(self, arguments: Sequence[Any]) -> tuple[Any, ...]:
        """Run the region on its original arguments, and return its results."""
        read, written, numbers, places = [], [], [], []
        for position, argument in enumerate(arguments):
            if isinstance(argument, Tensor):
                is_written = position in self._written
                (written if is_written else read).append(argument)
                places.append(_WRITTEN if is_written else _READ)
            elif argument is None:
                places.append(_NOTHING)
            else:
                numbers.append(index(argument))
                places.append(_NUMBER)
        tensors = iter(self._overload(read, written, numbers, places))
        return tuple(next(tensors) if each is _TENSOR else each for each in self._last.results)

    def _kernel(self, code: Callable[..., Any]) -> Callable[..., list[Tensor]]:
        """Return the operator's kernel, which calls `code` with the original arguments."""

        def kernel(
            read: list[Tensor], written: list[Tensor], numbers: list[int], places: list[int]
        ) -> list[Tensor]:
            sources = {_READ: iter(read), _WRITTEN: iter(written), _NUMBER: iter(numbers)}
            nothing = iter(())
            results = code(*(next(sources.get(place, nothing), None) for place in places))
            self._last.results = [_TENSOR if isinstance(e, Tensor) else e for e in results]
            return [each for each in results if isinstance(each, Tensor)]

        return kernel


_TENSOR: Final = object()
