"""Higher-order operators and compiled regions, which know nothing of the core's dispatch key.

A higher-order operator asks each key for a kernel. Here it gets one that passes it on: what it runs
in its turn is seen, operator by operator. Compiled code is not made of operators: each region
becomes one, with the graph's word for what it writes and how large its results will be (R12).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import index
from types import ModuleType
from typing import Any, Final, final

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload, _compute_keyset, _higher_order_ops

from rekindle.pytorch.operators import (
    COMPILED,
    REGION,
    Region,
    check_higher_order,
    region_of,
    regions_shown,
    when_imported,
)
from rekindle.pytorch.tensors import sees

AGAIN: Final = "rekindle_regions"
ONCE: Final = "rekindle_regions_once"  #: the core never runs again what is in there
_STATISTICS: Final = 256  # as in `_traits`
_READ, _WRITTEN, _NUMBER, _NOTHING = range(4)  # what an argument of a region is


def shown_name(name: str) -> str:
    """Of an operator, as the program is told: all regions have one."""
    return REGION if name.startswith(AGAIN) else name


_taught: set[str] = set()
_key: list[Any] = []


def is_seen() -> bool:
    """Whether operators of this thread are: not amid one."""
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set()
    return bool(_key) and included.has(_key[0]) and not excluded.has(_key[0])


def hidden() -> AbstractContextManager[Any]:
    """Inside, operators of this thread are not seen."""
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_key[0]))  # type: ignore[attr-defined]


@contextmanager
def higher_order_operators_taught(core: ModuleType, keys: Any) -> Iterator[None]:
    """Inside, the core knows all there are; some come with the compiler, once that is imported."""

    @contextmanager
    def taught(module: object) -> Iterator[None]:
        _teach_higher_order_operators(core, keys)
        yield

    with taught(torch), when_imported("torch._dynamo", taught):
        yield


def _teach_higher_order_operators(core: ModuleType, keys: Any) -> None:
    """All there are by now. `keys`: that of the core, for which Python has no name."""
    if _higher_order_ops.keys() <= _taught:
        return
    if not _key:
        _key.append(keys.highestPriorityTypeId())
        sees(keys)
    for name, each in _higher_order_ops.items():
        each.py_kernels[_key[0]] = _Kernel(core, each)
        each._dispatch_cache.clear()
        _taught.add(name)


@final
class _Kernel:
    """What a higher-order operator does at the key of the core."""

    def __init__(self, core: ModuleType, higher: HigherOrderOperator) -> None:
        self._core = core
        self._higher = higher

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        higher = self._higher
        if not is_seen():
            return self._pass(args, kwargs)
        if higher.name() == COMPILED:
            return _run_region(self._core, args[0], args[1])
        check_higher_order(higher)
        return self._pass(args, kwargs)

    def _pass(self, args: Any, kwargs: Any) -> Any:
        keys = _compute_keyset(args, kwargs, self._higher.non_fallthrough_keys)
        return self._higher.dispatch(keys.remove(_key[0]).highestPriorityTypeId(), *args, **kwargs)


@contextmanager
def compiled_regions_seen() -> Iterator[None]:
    """Inside, what is compiled shows itself as a higher-order operator, and is seen as one."""
    with regions_shown(), when_imported("torch._inductor.output_code", _as_in_a_mode):
        yield


@contextmanager
def _as_in_a_mode(output_code: Any) -> Iterator[None]:
    """Inside, compiled code takes what the core sees for what a dispatch mode sees."""
    inside = output_code.is_in_torch_dispatch_mode

    def seen() -> bool:
        return inside() or is_seen()

    output_code.is_in_torch_dispatch_mode = seen
    try:
        yield
    finally:
        output_code.is_in_torch_dispatch_mode = inside


# -- regions --------------------------------------------------------------------------------------


def _run_region(core: ModuleType, compiled: Any, inputs: list[Any]) -> Any:
    """Runs the code of a region as the operator that stands for it."""
    region = region_of(compiled)
    once = region.opaque or region.may_differ([each for each in inputs if isinstance(each, Tensor)])
    found = _operators.get((region, once))
    if found is None:
        found = _operators[region, once] = _RegionOperator(core, region, once=once)
    arguments = list(inputs)
    inputs.clear()  # PyTorch's way to let go of them
    with torch._C._AutoDispatchBelowAutograd(), torch.set_grad_enabled(region.training):  # type: ignore[attr-defined]
        return found.run(arguments)


#: By region, and whether it runs only once. They stay, and with them the code: recipes of graphs
#: that are still there run it.
_operators: dict[tuple[Region, bool], _RegionOperator] = {}


@final
class _RegionOperator:
    """One operator for one region. Its arguments: what is read, what is written, the numbers, and
    which of these comes at each place. `once`: it never runs again."""

    def __init__(self, core: ModuleType, region: Region, *, once: bool) -> None:
        namespace = ONCE if once else AGAIN
        self._library = torch.library.Library(namespace, "FRAGMENT")
        self._written = {position for position, _ in region.written}
        self._last = threading.local()  # .results: of the last run, with a mark for each tensor
        name = f"region_{len(_operators)}"
        written = "Tensor(a!)[]" if self._written else "Tensor[]"
        self._library.define(
            f"{name}(Tensor[] read, {written} written, int[] numbers, int[] places) -> Tensor[]",
            tags=(torch.Tag.nondeterministic_seeded,),
        )
        for backend in ("CPU", "CUDA"):
            self._library.impl(name, self._kernel(region.func), backend)
        self._library.impl(name, self._kernel(region.predicting), "Meta")
        if region.statistics:
            core.learn_traits(f"{namespace}::{name}", _STATISTICS)
        self._overload: OpOverload = getattr(getattr(torch.ops, namespace), name).default

    def run(self, arguments: Sequence[Any]) -> tuple[Any, ...]:
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
