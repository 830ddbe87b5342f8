"""Recompute the forward pass of a custom `torch.autograd.Function` as one operator.

By default, the results of such a function are never evicted, because its kernels may bypass the
dispatcher. The user chooses functions by `rekindle.recomputable`. The forward pass of a chosen
function becomes one operator for the core: a unit. The results of a unit are the outputs of the
function, the tensors that `ctx` saved, and tensors among the attributes of `ctx`. The first run of
a call uses the real context, so autograd works as without a budget. A recomputation runs the
forward pass on a blank context, and takes the tensors that it makes.

At the first call with new shapes or arguments, the core makes a trial (native/ops/probation.h): it
runs the forward pass twice. The call may be recomputed only if both runs give the same bits, leave
the arguments and other memory unchanged, and communicate with no other process. Otherwise its
results are never evicted, and the report says why. A trial does not detect effects in Python (a
counter, a list), which are repeated by each recomputation.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any, Final, TypeVar, final, overload
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd.function import Function, FunctionMeta
from torch.utils._python_dispatch import _pop_mode, _push_mode

from rekindle._errors import InvalidArgument
from rekindle.pytorch.native._higher import UNITS, is_seen
from rekindle.pytorch.native._module import Core
from rekindle.pytorch.native._watched import declared, is_declared
from rekindle.pytorch.online import Current, replace
from rekindle.pytorch.operators import TRIED, is_plain

#: Largest number of argument variants of one function whose calls are recomputed. With more
#: variants, the arguments probably change in each call, and each new variant would cost a trial.
_MOST_VARIANTS: Final = 256
#: Most functions that are recomputed in one process. Some programs define new functions all the
#: time, and the native core never removes one.
_MOST_UNITS: Final = 1_000
_DEVICES: Final = ("cpu", "cuda")
#: Completes messages about a tensor for which `_is_simple` is false.
_UNUSUAL: Final = "a subclass with __torch_dispatch__, sparse, quantized, or not on the CPU or CUDA"
#: Why results are kept of a function that was not tried yet.
_NOT_TRIED: Final = "the budget has had no room for its trial, the results of a second run"
#: Types of arguments that are immutable and can be compared.
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

    By default, all tensors that a custom function returns and saves stay in memory. With
    `recomputable`, these tensors may be evicted, and the forward pass runs again when they are
    needed.

    At the first call with new shapes or arguments inside a budget, the forward pass runs twice. It
    is recomputed later only if both runs give the same bits, leave the arguments and other memory
    unchanged, and communicate with no other process. Otherwise its tensors stay in memory, and
    `run.report()` says why.

    Functions of Liger, FlashAttention, xFormers, Apex's norms and Unsloth are chosen by default.

    Custom operators need no declaration: they are recomputed after such a trial. Declare an
    operator, by a pattern such as `"my_kernels::*"`, to say what a trial cannot find out: that it
    reads tensors that are not among its arguments but never change, that it waits only for threads
    that answer each time, or, with more than one rank, that a body in C++ does not communicate.

    Args:
        function: The class, or a pattern of its qualified name, such as `"my_kernels.*"`, or of the
            names of operators, such as `"my_kernels::*"`. A pattern also applies to classes and
            operators that are defined later.

    Returns:
        The class itself, so that `recomputable` can be used as a decorator. None for a pattern.

    Raises:
        InvalidArgument: `function` is neither a class derived from `torch.autograd.Function` nor a
            string.

    Example:
        @rekindle.recomputable
        class RMSNorm(torch.autograd.Function):
            ...

        rekindle.recomputable("my_kernels.*")
        rekindle.recomputable("my_kernels::*")
    """
    if isinstance(function, str):
        declared.append(function)
        if _session.now is not None:
            _session.now.find()
        return None
    if not (isinstance(function, type) and issubclass(function, Function)):
        raise InvalidArgument(
            f"rekindle.recomputable({function!r}): expected a class derived from "
            "torch.autograd.Function, or a pattern of the names of such classes; write "
            'rekindle.recomputable(MyFunction) or rekindle.recomputable("my_kernels.*")'
        )
    _chosen.add(function)
    if _session.now is not None:
        _session.now.take(function)
    return function


_chosen: WeakSet[type[Function]] = WeakSet()
#: Number of the patterns in `declared` that the core's trials have taken into account.
_n_declared = len(declared)


@contextmanager
def functions_recomputed(
    core: Core, kept: dict[str, str], register: Callable[[list[Tensor]], None]
) -> Iterator[None]:
    """Inside the block, make the forward pass of each chosen function one operator of the core.

    Args:
        core: The native core.
        kept: Receives the names of called functions whose results are kept, and why.
        register: Counts the memory of tensors that are no results of the operator.
    """
    with ExitStack() as stack:
        session = _Session(core, kept, register, stack)
        stack.enter_context(_session.during(session))
        session.find()
        replace(stack, FunctionMeta, "__init__", _init_that_chooses)
        yield


def _init_that_chooses(original: Callable[..., None]) -> Callable[..., None]:
    """Return `FunctionMeta.__init__`, extended to handle each newly defined function class."""

    @functools.wraps(original)
    def defined(kind: type[Function], *args: Any, **kwargs: Any) -> None:
        original(kind, *args, **kwargs)
        if _session.now is not None and _is_wanted(kind):
            _session.now.take(kind)

    return defined


def _is_wanted(kind: type[Function]) -> bool:
    """Return True if the user chose the function class `kind`, directly or by a pattern."""
    if kind in _chosen:
        return True
    return is_declared(_name_of(kind))


def _name_of(kind: type[Function]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


@final
class _Session:
    """The replaced forward passes of custom functions in one budget, from its start to its end."""

    def __init__(
        self,
        core: Core,
        kept: dict[str, str],
        register: Callable[[list[Tensor]], None],
        stack: ExitStack,
    ) -> None:
        self.core = core
        self.kept = kept
        self._register = register
        self._stack = stack
        self._taken: WeakSet[type[Function]] = WeakSet()

    def find(self) -> None:
        """Replace the forward pass of every existing function class that the user chose.

        Operators that the user declared since the last budget are tried again.
        """
        global _n_declared
        if _n_declared != len(declared):
            _n_declared = len(declared)
            self.core.reopen_trials()
        waiting = [Function]
        while waiting:
            for kind in waiting.pop().__subclasses__():
                waiting.append(kind)
                if _is_wanted(kind):
                    self.take(kind)

    def take(self, kind: type[Function]) -> None:
        """Run the forward pass of `kind` as one operator (a unit) until the budget ends."""
        if kind not in self._taken:
            self._taken.add(kind)
            replace(self._stack, kind, "forward", lambda _: _replacement_of(kind))

    def call(
        self,
        kind: type[Function],
        original: Callable[..., Any],
        args: tuple[Any, ...],
        has_context: bool,
    ) -> Any:
        """Run a call of `original`, the forward pass of `kind`, as a unit if possible."""
        ctx, inputs = (args[0], args[1:]) if has_context else (None, args)
        needs_none = (
            not ctx.next_functions
            if ctx is not None
            else not any(isinstance(each, Tensor) and each.requires_grad for each in inputs)
        )
        if needs_none or _running.now is not None or torch.is_inference_mode_enabled():
            return original(*args)
        try:
            variant = self._unit_of(kind, original).variant_of(ctx, inputs)
        except _NotRecomputable as why:
            self.kept[_name_of(kind)] = str(why)
            return original(*args)
        tensors = [each for each in inputs if isinstance(each, Tensor)]
        first = _running.now = _FirstRun(variant, ctx, args, tensors)
        try:
            if torch._C._len_torch_dispatch_stack() == 0:
                variant.unit.overload(tensors, variant.number)
            else:
                with first.without_modes():
                    variant.unit.overload(tensors, variant.number)
        finally:
            _running.now = None
        trusted, why = self.core.last_unit()
        variant.is_trusted = variant.is_trusted or trusted
        if why:
            variant.why = variant.why or why
        self._note(_name_of(kind), trusted, variant.why or first.kept)
        if first.hidden:
            self._register(first.hidden)
        return first.outputs

    def _note(self, name: str, trusted: bool, why: str) -> None:
        """Note why results of the function `name` are kept, or that they were tried at last."""
        if why:
            self.kept[name] = why
        elif not trusted:
            self.kept.setdefault(name, _NOT_TRIED)
        elif self.kept.get(name) == _NOT_TRIED:
            del self.kept[name]

    def _unit_of(self, kind: type[Function], original: Callable[..., Any]) -> _Unit:
        """Return the operator that runs the forward pass of the autograd function `kind`.

        The operator (a unit) is made when the function is first called.

        Raises:
            _NotRecomputable: This process has made as many units as it may.
        """
        found = _units.get(kind)
        if found is None or found.original is not original:
            global _made_so_far
            with _lock:
                if _made_so_far == _MOST_UNITS:
                    raise _NotRecomputable(
                        f"{_MOST_UNITS} other autograd functions are recomputed in this process, "
                        "the most that Rekindle allows"
                    )
                _made_so_far += 1
                found = _units[kind] = _Unit(self.core, kind, original, _made_so_far)
        return found


_session = Current[_Session]()


def _replacement_of(kind: type[Function]) -> staticmethod[..., Any]:
    """Return a replacement for the forward pass of `kind` that has no reference to a budget."""
    original = kind.forward
    # An inherited forward pass may be the replacement that was already set on a base class.
    original = getattr(original, _ORIGINAL, original)
    setup = kind.setup_context
    # If the class defines `setup_context`, that method fills `ctx` after the forward pass.
    has_context = setup is Function.setup_context

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        session = _session.now
        if session is None or kwargs or not is_seen():
            return original(*args, **kwargs)
        return session.call(kind, original, args, has_context)

    setattr(forward, _ORIGINAL, original)
    return staticmethod(forward)


class _NotRecomputable(Exception):
    """A call cannot run as one operator, for the reason in the message: it runs as in PyTorch."""


@final
class _Call(threading.local):
    """The forward pass that this thread runs as one operator for the program, or None."""

    now: _FirstRun | None = None


_running = _Call()


@final
class _FirstRun:
    """The program's own call of a function, not a trial or a recomputation.

    The forward pass then runs with the program's `ctx`.
    """

    def __init__(
        self, variant: _CallVariant, ctx: Any, args: tuple[Any, ...], tensors: list[Tensor]
    ) -> None:
        self._variant = variant
        self._ctx = ctx
        self._args = args
        self._tensors = tensors
        self._over = False
        self._modes: list[Any] = []
        self.outputs: Any = None
        #: tensors in objects on `ctx`, which are no results of the unit
        self.hidden: list[Tensor] = []
        #: why some tensors are kept although the call is recomputed, or ""
        self.kept = ""

    @contextmanager
    def without_modes(self) -> Iterator[None]:
        """Disable the program's dispatch modes inside the block.

        The modes must not see the unit. `run` enables them for the operators of the forward pass.
        """
        while torch._C._len_torch_dispatch_stack() > 0:
            self._modes.append(_pop_mode())
        try:
            yield
        finally:
            _push_all(self._modes)

    def is_it(self, tensors: list[Tensor]) -> bool:
        """Return True if `tensors` are the arguments of the program's own call of the function."""
        given = (
            zip(self._tensors, tensors, strict=True) if len(tensors) == len(self._tensors) else ()
        )
        return not self._over and bool(tensors) and all(a is b for a, b in given)

    def run(self) -> list[Tensor]:
        """Run the forward pass with the program's own `ctx`. Return the tensors that it made."""
        self._over = True
        modes, self._modes = self._modes, []
        _push_all(modes)
        try:
            self.outputs = self._variant.unit.original(*self._args)
        finally:
            for _ in modes:
                self._modes.append(_pop_mode())
        if self._ctx is not None and self._ctx.dirty_tensors:
            self._variant.why = "it writes to its arguments (ctx.mark_dirty)"
        made = _tensors_made(self.outputs, self._ctx, self._tensors)
        if not all(_is_simple(each) for each in made):
            self._variant.why = f"it makes a tensor that is {_UNUSUAL}"
        if any(each.grad_fn is not None for each in made):
            self.kept = "it runs an autograd graph of its own, whose saved tensors are not evicted"
        self._look_into_objects(made)
        return made

    def _look_into_objects(self, made: list[Tensor]) -> None:
        """Find tensors that objects or closures on `ctx` hold, and that are not among `made`."""
        known = {id(each) for each in (*made, *self._tensors)}
        for value in () if self._ctx is None else vars(self._ctx).values():
            found: dict[int, Tensor] = {}
            _find(_held_by(value), found)
            new = [each for number, each in found.items() if number not in known]
            if new:
                self.hidden += new
                self.kept = (
                    f"it stores tensors in a {type(value).__name__} on ctx, where Rekindle cannot "
                    "replace them; pass them to ctx.save_for_backward"
                )


def _push_all(modes: list[Any]) -> None:
    """Enable the program's dispatch modes again that were popped into `modes`."""
    for mode in reversed(modes):
        _push_mode(mode)


def _tensors_made(outputs: Any, ctx: Any, inputs: list[Tensor]) -> list[Tensor]:
    """Return the distinct tensors that a forward pass returned or saved, without its inputs."""
    left = [outputs]
    if ctx is not None:
        left += [ctx.to_save, getattr(ctx, "saved_for_forward", None), vars(ctx)]
    given = {id(each) for each in inputs}
    found: dict[int, Tensor] = {}
    _find(left, found)
    return [each for number, each in found.items() if number not in given]


def _find(value: Any, found: dict[int, Tensor]) -> None:
    """Add each tensor in `value` and in nested containers to `found`, by its id."""
    if isinstance(value, Tensor):
        found.setdefault(id(value), value)
    elif isinstance(value, (tuple, list)):
        for each in value:
            _find(each, found)
    elif isinstance(value, dict):
        for each in value.values():
            _find(each, found)


def _held_by(value: Any) -> list[Any]:
    """Return the attributes of an object that is no module, and the variables of a closure."""
    if isinstance(value, (Tensor, torch.nn.Module, type)):
        return []
    held = [*getattr(value, "__dict__", {}).values()]
    for cell in getattr(value, "__closure__", None) or ():
        with suppress(ValueError):  # the variable was deleted
            held.append(cell.cell_contents)
    return held


def _is_simple(tensor: Tensor) -> bool:
    """Return True for a strided tensor on the CPU or CUDA without its own `__torch_dispatch__`."""
    return (
        is_plain(type(tensor))
        and tensor.layout is torch.strided
        and tensor.device.type in _DEVICES
        and not tensor.is_quantized
    )


# -- units: forward passes as operators -----------------------------------------------------------

_units: WeakKeyDictionary[type[Function], _Unit] = WeakKeyDictionary()
_lock = threading.Lock()
_made_so_far = 0


@final
class _Unit:
    """The operator that runs the forward pass of one custom function, registered for the core."""

    def __init__(
        self, core: Core, kind: type[Function], original: Callable[..., Any], number: int
    ) -> None:
        self.original = original
        self.has_context = kind.setup_context is Function.setup_context
        self.context: type[Any] = kind._backward_cls  # type: ignore[attr-defined]
        self._variants: dict[Any, _CallVariant] = {}
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

    def variant_of(self, ctx: Any, inputs: tuple[Any, ...]) -> _CallVariant:
        """Return the variant of this call. All calls with equal arguments share one object.

        Raises:
            _NotRecomputable: The call cannot be recomputed.
        """
        if torch._C._are_functorch_transforms_active():
            raise _NotRecomputable("it is called inside a transform of torch.func")
        if torch._C._len_torch_function_stack() > 0:
            raise _NotRecomputable(
                "it is called inside a mode of torch.overrides, such as torch.device(...)"
            )
        needs = None if ctx is None else ctx.needs_input_grad
        key = (needs, *map(_key_of, inputs))
        variant = self._variants.get(key)
        if variant is None:
            if len(self._variants) >= _MOST_VARIANTS:
                raise _NotRecomputable("its arguments change too often")
            variant = self._variants[key] = _CallVariant(self, needs, inputs)
        if variant.why:
            raise _NotRecomputable(variant.why)
        return variant

    def _run(self, tensors: list[Tensor], number: int) -> list[Tensor]:
        """Run the forward pass as the operator's kernel: for the program, or to recompute it."""
        first = _running.now
        if first is not None and first.is_it(tensors):
            return first.run()
        return _variants[number].run_again(tensors)


#: All variants of calls, by number. They are never removed, because recipes of living autograd
#: graphs refer to them.
_variants: list[_CallVariant] = []


@final
class _CallVariant:
    """One way to call a custom function: its arguments without the tensors."""

    def __init__(
        self, unit: _Unit, needs: tuple[bool, ...] | None, inputs: tuple[Any, ...]
    ) -> None:
        self.unit = unit
        self.why = ""  #: why calls of this variant are not recomputed; empty: they may be
        self.is_trusted = False  #: a trial of this variant passed, with at least one set of shapes
        self._needs = needs
        self._asks = [each.requires_grad for each in inputs if isinstance(each, Tensor)]
        self._rest = [_TENSOR if isinstance(each, Tensor) else deepcopy(each) for each in inputs]
        with _lock:
            self.number = len(_variants)
            _variants.append(self)

    def run_again(self, tensors: list[Tensor]) -> list[Tensor]:
        """Run the forward pass on a blank context. Return the tensors that it made."""
        if self.why:
            # This error ends the trial (second run) of the call. The core then never recomputes
            # such calls.
            raise RuntimeError(self.why)
        for tensor, asks in zip(tensors, self._asks, strict=True):
            tensor.requires_grad = asks
        given = iter(tensors)
        inputs = [next(given) if each is _TENSOR else deepcopy(each) for each in self._rest]
        ctx = None
        if self.unit.has_context:
            ctx = self.unit.context()
            ctx.needs_input_grad = self._needs
            inputs.insert(0, ctx)
        outputs = self.unit.original(*inputs)
        return _tensors_made(outputs, ctx, tensors)


_TENSOR: Final = object()


def _key_of(argument: Any) -> Any:
    """Return a key. Arguments have equal keys only if a forward pass does the same with them.

    Raises:
        _NotRecomputable: The argument may change before a recomputation.
    """
    if isinstance(argument, Tensor):
        if not _is_simple(argument):
            raise _NotRecomputable(
                f"it is given a tensor ({type(argument).__name__}) that is {_UNUSUAL}"
            )
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
    raise _NotRecomputable(
        f"it is given an object that may change ({type(argument).__qualname__}); numbers, text and "
        "tuples of those do not"
    )


def _item_key(item: Any) -> Any:
    """Return the key of an item of a tuple or list argument, which must not be a tensor."""
    if isinstance(item, Tensor):
        raise _NotRecomputable("it is given tensors inside a list or a tuple; pass each by itself")
    return _key_of(item)
