"""Forward passes of `torch.autograd.Function`s as operators that can be recomputed.

Results of such a function are kept: nobody sees how they were made. A function that was chosen
(`recomputable`) becomes one operator for the core, a unit: its results are the outputs, what `ctx`
saved, and tensors among the attributes of `ctx`. The first time the real forward pass runs, with
the real context, so autograd finds everything as without a budget. A recomputation runs the forward
pass on a blank context and takes the tensors that it leaves.

Whether that is right the core finds out by a trial, at the first call with these shapes and these
arguments (native/ops/probation.h): the forward pass runs twice. It has to give the same bits, leave
its arguments and other memory as they are, and talk to no other process. Anything else stays as it
is without this, and the report says why. What is not seen: effects in Python (a counter, a list),
which happen once more for each recomputation.
"""

from __future__ import annotations

import functools
import random
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from enum import Enum
from fnmatch import fnmatchcase
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Final, TypeVar, final, overload
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd.function import Function, FunctionMeta
from torch.utils._python_dispatch import _pop_mode, _push_mode

from rekindle._errors import InvalidArgument
from rekindle.pytorch.native._higher import UNITS, hidden_key, is_seen
from rekindle.pytorch.online import Current, replace
from rekindle.pytorch.operators import TRIED, is_plain

#: Libraries whose functions are made of kernels that read their arguments and make results.
KNOWN: Final = (
    "liger_kernel.*",
    "flash_attn.*",
    "xformers.*",
    "apex.normalization.*",
    "unsloth.kernels.*",
)
#: Ways to call one function: beyond them it is called with ever other numbers, and not tried again.
_MOST_WAYS: Final = 256
#: Functions, of all that there ever were: programs may define them over and over.
_MOST_UNITS: Final = 1_000
_DEVICES: Final = ("cpu", "cuda")
#: Types of arguments that do not change, and say by themselves whether they are equal.
_FIXED: Final = (
    type(None), bool, int, complex, str, bytes, Enum,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
_ORIGINAL: Final = "__rekindle_original__"

F = TypeVar("F", bound=type[Function])


@overload
def recomputable(function: F) -> F: ...
@overload
def recomputable(function: str) -> None: ...
def recomputable(function: F | str) -> F | None:
    """Recompute the forward pass of a `torch.autograd.Function` as one operator.

    Without this, everything that a custom function returns and saves stays in memory. With it,
    those tensors may be evicted, and its forward pass runs again when they are needed. At its
    first call with new shapes or new arguments inside a budget the forward pass runs twice. Only
    if both runs give the same bits, leave the arguments and other memory as they were, and talk to
    no other process, it is ever run again. Otherwise it stays as it is, and `run.report()` says
    why.

    Names of a few libraries are known from the start: Liger, FlashAttention, xFormers, Apex's
    norms, Unsloth.

    Args:
        function: The class; or a pattern of names with the module in front, as `"my_kernels.*"`,
            for all classes of that name, also of modules that are imported later.

    Returns:
        The class itself, so that this is a decorator as well; None for a pattern.

    Raises:
        InvalidArgument: `function` is neither a class derived from `torch.autograd.Function` nor
            text.

    Example:
        @rekindle.recomputable
        class RMSNorm(torch.autograd.Function):
            ...

        rekindle.recomputable("my_kernels.*")
    """
    if isinstance(function, str):
        _patterns.append(function)
        if _session.now is not None:
            _session.now.find()
        return None
    if not (isinstance(function, type) and issubclass(function, Function)):
        raise InvalidArgument(
            f"rekindle.recomputable({function!r}): expected a class derived from "
            "torch.autograd.Function, or a pattern of names; write "
            'rekindle.recomputable(MyFunction) or rekindle.recomputable("my_kernels.*")'
        )
    _chosen.add(function)
    if _session.now is not None:
        _session.now.take(function)
    return function


_patterns: list[str] = [*KNOWN]
_chosen: WeakSet[type[Function]] = WeakSet()


@contextmanager
def functions_recomputed(core: ModuleType, kept: dict[str, str]) -> Iterator[None]:
    """Inside, the forward passes of functions that were chosen are operators of the core.

    Args:
        core: The native core.
        kept: Takes names of functions that were called and stay as they are, and why.
    """
    with ExitStack() as stack:
        session = _Session(core, kept, stack)
        stack.enter_context(_session.during(session))
        session.find()
        replace(stack, FunctionMeta, "__init__", _heard)
        yield


def _heard(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def defined(kind: type[Function], *args: Any, **kwargs: Any) -> None:
        original(kind, *args, **kwargs)
        if _session.now is not None and _is_wanted(kind):
            _session.now.take(kind)

    return defined


def _is_wanted(kind: type[Function]) -> bool:
    if kind in _chosen:
        return True
    name = _name_of(kind)
    return any(fnmatchcase(name, pattern) for pattern in _patterns)


def _name_of(kind: type[Function]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


@final
class _Session:
    """One budget, while it is entered."""

    def __init__(self, core: ModuleType, kept: dict[str, str], stack: ExitStack) -> None:
        self.core = core
        self.kept = kept
        self._stack = stack
        self._taken: WeakSet[type[Function]] = WeakSet()

    def find(self) -> None:
        """Take every class there is that is wanted."""
        waiting = [Function]
        while waiting:
            for kind in waiting.pop().__subclasses__():
                waiting.append(kind)
                if _is_wanted(kind):
                    self.take(kind)

    def take(self, kind: type[Function]) -> None:
        """From now on, until the budget is left, the forward pass of `kind` is a unit."""
        if kind not in self._taken:
            self._taken.add(kind)
            replace(self._stack, kind, "forward", lambda _: _routed(kind))


_session = Current[_Session]()


def _routed(kind: type[Function]) -> staticmethod[..., Any]:
    """Return a replacement for the forward pass of `kind` that refers to no budget."""
    original = kind.forward
    original = getattr(original, _ORIGINAL, original)  # that of a base, which was taken as well
    setup = kind.setup_context
    has_context = setup is Function.setup_context  # else it is set up afterwards

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        session = _session.now
        if session is None or kwargs or not is_seen():
            return original(*args, **kwargs)
        return _call(session, kind, original, args, has_context)

    setattr(forward, _ORIGINAL, original)
    return staticmethod(forward)


class _Stays(Exception):
    """A call stays as it is; why."""


@final
class _Call(threading.local):
    """The forward pass that this thread runs for the first time; none: None."""

    now: _FirstRun | None = None


_running = _Call()


def _call(
    session: _Session,
    kind: type[Function],
    original: Callable[..., Any],
    args: tuple[Any, ...],
    has_context: bool,
) -> Any:
    ctx, inputs = (args[0], args[1:]) if has_context else (None, args)
    needs_none = (
        not ctx.next_functions
        if ctx is not None
        else not any(isinstance(each, Tensor) and each.requires_grad for each in inputs)
    )
    if needs_none or _running.now is not None or torch.is_inference_mode_enabled():
        return original(*args)
    try:
        way = _unit_of(session, kind, original).way_of(ctx, inputs)
    except _Stays as why:
        session.kept[_name_of(kind)] = str(why)
        return original(*args)
    tensors = [each for each in inputs if isinstance(each, Tensor)]
    first = _running.now = _FirstRun(way, ctx, args, tensors)
    try:
        if torch._C._len_torch_dispatch_stack() == 0:
            way.unit.overload(tensors, way.number)
        else:
            with first.without_modes():
                way.unit.overload(tensors, way.number)
    finally:
        _running.now = None
    trusted, why = session.core.last_unit()
    way.is_trusted = way.is_trusted or trusted
    if why:
        way.why = way.why or why
        session.kept[_name_of(kind)] = way.why
    return first.outputs


@final
class _FirstRun:
    """One call of a function by the program."""

    def __init__(self, way: _Way, ctx: Any, args: tuple[Any, ...], tensors: list[Tensor]) -> None:
        self._way = way
        self._ctx = ctx
        self._args = args
        self._tensors = tensors
        self._over = False
        self._modes: list[Any] = []
        self.outputs: Any = None

    @contextmanager
    def without_modes(self) -> Iterator[None]:
        """Disable the program's dispatch modes.

        They see only the operators of the forward pass, as without a budget.
        """
        while torch._C._len_torch_dispatch_stack() > 0:
            self._modes.append(_pop_mode())
        try:
            yield
        finally:
            _push_all(self._modes)

    def is_it(self, tensors: list[Tensor]) -> bool:
        """Return whether the core runs this call, not another one again."""
        given = (
            zip(self._tensors, tensors, strict=True) if len(tensors) == len(self._tensors) else ()
        )
        return not self._over and bool(tensors) and all(a is b for a, b in given)

    def run(self) -> list[Tensor]:
        """Run the forward pass. Return the tensors that it made."""
        self._over = True
        before = None if self._way.is_trusted else _python_draws()
        modes, self._modes = self._modes, []
        _push_all(modes)
        try:
            self.outputs = self._way.unit.original(*self._args)
        finally:
            for _ in modes:
                self._modes.append(_pop_mode())
        if before is not None and _python_draws() != before:
            self._way.why = "it draws from a generator of Python's or NumPy's"
        if self._ctx is not None and self._ctx.dirty_tensors:
            self._way.why = "it writes its arguments (ctx.mark_dirty)"
        made = _made(self.outputs, self._ctx, self._tensors)
        if not all(_is_simple(each) for each in made):
            self._way.why = "it makes tensors that are not plain"
        return made


def _push_all(modes: list[Any]) -> None:
    for mode in reversed(modes):
        _push_mode(mode)


def _python_draws() -> tuple[Any, ...]:
    """Where the generators stand that no operator draws from."""
    numpy = sys.modules.get("numpy.random")
    if numpy is None:
        return (random.getstate(),)
    name, keys, *rest = numpy.get_state()
    return (random.getstate(), name, keys.tobytes(), *rest)


def _made(outputs: Any, ctx: Any, inputs: list[Tensor]) -> list[Tensor]:
    """Return each tensor that a forward pass left, and was not given, once."""
    left = [outputs]
    if ctx is not None:
        left += [ctx.to_save, getattr(ctx, "saved_for_forward", None), vars(ctx)]
    given = {id(each) for each in inputs}
    found: dict[int, Tensor] = {}
    _find(left, found)
    return [each for number, each in found.items() if number not in given]


def _find(value: Any, found: dict[int, Tensor]) -> None:
    """Add each tensor in `value`, and in containers in it, by its id."""
    if isinstance(value, Tensor):
        found.setdefault(id(value), value)
    elif isinstance(value, (tuple, list)):
        for each in value:
            _find(each, found)
    elif isinstance(value, dict):
        for each in value.values():
            _find(each, found)


def _is_simple(tensor: Tensor) -> bool:
    return (
        is_plain(type(tensor))
        and tensor.layout is torch.strided
        and tensor.device.type in _DEVICES
        and not tensor.is_quantized
    )


# -- units ----------------------------------------------------------------------------------------

_units: WeakKeyDictionary[type[Function], _Unit] = WeakKeyDictionary()
_lock = threading.Lock()
_made_so_far = 0


def _unit_of(session: _Session, kind: type[Function], original: Callable[..., Any]) -> _Unit:
    found = _units.get(kind)
    if found is None or found.original is not original:
        global _made_so_far
        with _lock:
            if _made_so_far == _MOST_UNITS:
                raise _Stays(f"there are {_MOST_UNITS} such functions already")
            _made_so_far += 1
            found = _units[kind] = _Unit(session.core, kind, original, _made_so_far)
    return found


@final
class _Unit:
    """The operator that stands for the forward pass of one function."""

    def __init__(
        self, core: ModuleType, kind: type[Function], original: Callable[..., Any], number: int
    ) -> None:
        self.original = original
        self.has_context = kind.setup_context is Function.setup_context
        self.context: type[Any] = kind._backward_cls  # type: ignore[attr-defined]
        self._ways: dict[Any, _Way] = {}
        name = f"{re.sub(r'[^A-Za-z0-9_]', '_', kind.__name__)}_{number}"
        self._library = torch.library.Library(UNITS, "FRAGMENT")
        self._library.define(
            f"{name}(Tensor[] tensors, int number) -> Tensor[]",
            tags=(torch.Tag.nondeterministic_seeded,),
        )
        for backend in ("CPU", "CUDA"):
            self._library.impl(name, self._run, backend)
        core.learn_traits(f"{UNITS}::{name}", TRIED)
        self.overload: OpOverload = getattr(getattr(torch.ops, UNITS), name).default

    def way_of(self, ctx: Any, inputs: tuple[Any, ...]) -> _Way:
        """Return what is known of calls like this one.

        Raises:
            _Stays: Such a call is not one that can be run again.
        """
        if torch._C._are_functorch_transforms_active():
            raise _Stays("it is called within a transform of torch.func")
        if torch._C._len_torch_function_stack() > 0:
            raise _Stays("it is called within a mode of torch.overrides, as torch.device(...) is")
        needs = None if ctx is None else ctx.needs_input_grad
        key = (needs, _autocast(), *map(_key_of, inputs))
        way = self._ways.get(key)
        if way is None:
            if len(self._ways) >= _MOST_WAYS:
                raise _Stays("its arguments change too often")
            way = self._ways[key] = _Way(self, needs, inputs)
        if way.why:
            raise _Stays(way.why)
        return way

    def _run(self, tensors: list[Tensor], number: int) -> list[Tensor]:
        first = _running.now
        if first is not None and first.is_it(tensors):
            return first.run()
        return _ways[number].run_again(tensors)


#: By their numbers. They stay, as the operators do: recipes of living graphs run them.
_ways: list[_Way] = []


@final
class _Way:
    """A way to call one function: all but the memory of its tensors."""

    def __init__(
        self, unit: _Unit, needs: tuple[bool, ...] | None, inputs: tuple[Any, ...]
    ) -> None:
        self.unit = unit
        self.why = ""  #: it stays as it is
        self.is_trusted = False  #: with tensors of one geometry at least
        self._needs = needs
        self._asks = [each.requires_grad for each in inputs if isinstance(each, Tensor)]
        self._rest = [_TENSOR if isinstance(each, Tensor) else deepcopy(each) for each in inputs]
        self._include = torch._C._dispatch_tls_local_include_set()
        self._exclude = torch._C._dispatch_tls_local_exclude_set() | hidden_key()
        self._dtypes = [torch.get_autocast_dtype(device) for device in _DEVICES]
        with _lock:
            self.number = len(_ways)
            _ways.append(self)

    def run_again(self, tensors: list[Tensor]) -> list[Tensor]:
        """Run the forward pass on a blank context. Return the tensors that it made."""
        if self.why:
            raise RuntimeError(self.why)  # to the trial
        for tensor, asks in zip(tensors, self._asks, strict=True):
            tensor.requires_grad = asks
        given = iter(tensors)
        inputs = [next(given) if each is _TENSOR else deepcopy(each) for each in self._rest]
        ctx = None
        if self.unit.has_context:
            ctx = self.unit.context()
            ctx.needs_input_grad = self._needs
            inputs.insert(0, ctx)
        with self._as_then():
            outputs = self.unit.original(*inputs)
        return _made(outputs, ctx, tensors)

    @contextmanager
    def _as_then(self) -> Iterator[None]:
        """Inside, operators dispatch, and autocast works, as when the program called."""
        caches = torch.is_autocast_cache_enabled()
        before = [torch.get_autocast_dtype(device) for device in _DEVICES]
        with torch._C._ForceDispatchKeyGuard(self._include, self._exclude):  # type: ignore[attr-defined]
            torch.set_autocast_cache_enabled(False)  # what is cast is not the program's
            _set_dtypes(self._dtypes)
            try:
                yield
            finally:
                _set_dtypes(before)
                torch.set_autocast_cache_enabled(caches)


def _set_dtypes(dtypes: list[torch.dtype]) -> None:
    for device, dtype in zip(_DEVICES, dtypes, strict=True):
        torch.set_autocast_dtype(device, dtype)


_TENSOR: Final = object()


def _autocast() -> tuple[Any, ...]:
    return tuple(
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        for device in _DEVICES
    )


def _key_of(argument: Any) -> Any:
    """Return what is equal for arguments that are the same to a forward pass.

    Raises:
        _Stays: Nobody knows whether it will be the same later.
    """
    if isinstance(argument, Tensor):
        if not _is_simple(argument):
            raise _Stays(f"it is given a tensor that is not plain ({type(argument).__name__})")
        return _TENSOR, argument.requires_grad
    if isinstance(argument, float):
        return float, argument.hex()
    if isinstance(argument, _FIXED):
        return type(argument), argument
    if isinstance(argument, (tuple, list)):
        return type(argument), *map(_item_key, argument)
    if isinstance(argument, BuiltinFunctionType) or (
        isinstance(argument, FunctionType) and argument.__closure__ is None
    ):
        return argument
    raise _Stays(
        f"it is given an object that may change ({type(argument).__qualname__}); numbers, text and "
        "tuples of those do not"
    )


def _item_key(item: Any) -> Any:
    if isinstance(item, Tensor):
        raise _Stays("it is given tensors within a list or a tuple")
    return _key_of(item)
