"""Watch the first run of an operator that is not PyTorch's own (R9, everything else runs once).

The native core sees the operators that the body of such an operator calls (`Effects` in C++).
This file sees what else the body calls in Python: functions that communicate with other processes
or wait for other threads, and random generators of Python and NumPy. If the body did any of that,
its results are never recomputed.

A body in C++ cannot be watched, nor can a body that calls the C code of an unknown library. With
more than one rank they might communicate. Then their results are recomputed only if the program
declares the operator (`rekindle.recomputable`).
"""

from __future__ import annotations

import functools
import importlib
import pickle
import random
import sys
import threading
from collections.abc import Iterator
from fnmatch import fnmatchcase
from types import CodeType, FrameType, FunctionType
from typing import Any, Final, final

import torch
from torch._library import custom_ops, simple_registry

#: Functions and operators of these libraries are recomputable by default: they only read their
#: arguments and make results.
KNOWN: Final = (
    "liger_kernel.*",
    "flash_attn.*",
    "xformers.*",
    "apex.normalization.*",
    "unsloth.kernels.*",
    "flash_attn*::*",
    "torchvision::*",
    "xformers*::*",
)
#: Patterns of the names of functions and operators that the program declared to be recomputable.
declared: list[str] = [*KNOWN]

_COMMUNICATES: Final = "it communicates with other processes"
_WAITS: Final = "it waits for another thread or process"
_DRAWS: Final = "it draws from a generator of Python's or NumPy's"
#: Python functions that wait.
_WAITING: Final[dict[CodeType, str]] = {
    each.__code__: f"{_WAITS} ({each.__qualname__})"
    for each in (threading.Condition.wait, threading.Thread.join)
}
#: Modules in C whose functions communicate or wait -> these functions; all if empty.
_IN_C: Final[dict[str, tuple[str, ...]]] = {
    "torch._C._distributed_c10d": (
        "set", "get", "add", "wait", "check", "compare_set", "append", "multi_get", "multi_set",
        "delete_key", "queue_push", "queue_pop", "synchronize", "barrier", "monitored_barrier",
        "send", "recv", "recv_anysource", "put_signal", "wait_signal", "rendezvous",
    ),
    "torch._C._distributed_rpc": (),
    "mpi4py": (),
    "horovod": (),
    "_queue": ("get",),
    "_socket": (),
    "_ssl": (),
    "select": (),
    "time": ("sleep",),
    "_multiprocessing": (),
    "_posixsubprocess": (),
    "posix": ("fork", "waitpid", "wait"),
}  # fmt: skip
#: Module in Python through whose pipes processes communicate.
_PIPES: Final = "multiprocessing.connection"
_IMPORT: Final[CodeType] = importlib._bootstrap._find_and_load.__code__  # type: ignore[attr-defined]
#: Libraries whose C functions compute only, or are listed above.
_COMPUTING: Final = frozenset(
    {*sys.stdlib_module_names, "torch", "numpy", "triton", "pybind11_builtins"}
) - {"ctypes", "_ctypes"}
#: Namespaces of the operators that Rekindle defines, for functions and for compiled regions.
_OURS: Final = ("rekindle_units::", "rekindle_regions::")


def is_declared(name: str) -> bool:
    """Return True if the program declared the function or operator `name` to be recomputable."""
    return _matches(name, len(declared))


@functools.lru_cache(maxsize=4096)
def _matches(name: str, patterns: int) -> bool:
    """Return True if `name` matches one of the first `patterns` patterns, which never change.

    Each budget asks this of all function classes in the process, of which there may be hundreds.
    """
    return any(fnmatchcase(name, pattern) for pattern in declared[:patterns])


@final
class _Watch:
    """Records what the body of one operator calls in Python, in its first run.

    Attributes:
        found: Why the operator must not run a second time; empty if nothing was seen.
    """

    def __init__(self, name: str) -> None:
        self.found = ""
        # The program declares an autograd function, or PyTorch compiled the code of a region.
        self._is_declared = name.startswith(_OURS) or is_declared(name)
        self._name = name
        self._ranks = 1 if self._is_declared else _ranks()
        self._generators = [*_generators_of(name)]
        self._numpy = sys.modules.get("numpy.random")  # None: the body may import it meanwhile
        self._states = self._random_states()
        self._is_profiled = False
        self._imports = 0  # how many imports run now, one inside the other

    def begin(self) -> str:
        """Begin to watch this thread. Return why the operator must not run a second time, or ""."""
        if _has_effects(self._name):
            return "PyTorch's registry of effects lists it"
        # Another profiler of Python's calls cannot be replaced for a while: some are written in C.
        can_watch = sys.getprofile() is None
        if self._ranks > 1 and not (can_watch and _is_in_python(self._name)):
            return self._unknown("its body is not in Python")
        if can_watch:
            self._is_profiled = True
            sys.setprofile(self._note)
        return ""

    def end(self, read: str) -> str:
        """End the watch. Return why the operator must not run a second time, or ""."""
        if self._is_profiled:
            sys.setprofile(None)
        if read and not self._is_declared and not self.found:
            self.found = (
                f"it reads a tensor that is not among its arguments ({read}); if no such tensor "
                f'ever changes, write rekindle.recomputable("{self._name}")'
            )
        if not self.found and self._random_states() != self._states:
            self.found = _DRAWS
        return self.found

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        """Note a call in this thread (a profile function of Python)."""
        if frame.f_code is _IMPORT:
            self._imports += {"call": 1, "return": -1}.get(event, 0)
        if self.found or self._imports > 0:
            return
        if event == "call":
            if frame.f_globals.get("__name__") == _PIPES:
                self.found = f"{_COMMUNICATES} ({_PIPES})"
            elif not self._is_declared:
                self.found = _WAITING.get(frame.f_code, "")
        elif event == "c_call":
            self.found = self._seen_in(argument)

    def _seen_in(self, function: Any) -> str:
        """Return why an operator that calls the C function `function` must not run again, or ""."""
        module = getattr(function, "__module__", None)
        if module is None:
            owner = getattr(function, "__objclass__", None) or type(function.__self__)
            module = owner.__module__
        root = module.partition(".")[0]
        names = _IN_C.get(module, _IN_C.get(root))
        if names is not None and (not names or function.__name__ in names):
            waits = module in ("_queue", "time", "select")
            seen = f"{_WAITS if waits else _COMMUNICATES} ({module}.{function.__name__})"
            return "" if waits and self._is_declared else seen
        if self._ranks > 1 and root not in _COMPUTING:
            return self._unknown(f"it calls C code of {root}")
        return ""

    def _unknown(self, why: str) -> str:
        return (
            f"{why}, so it may communicate with the other ranks; if it does not, write "
            f'rekindle.recomputable("{self._name}")'
        )

    def _random_states(self) -> list[Any]:
        """Return the states of the generators from which the body may draw."""
        found: list[Any] = [random.getstate()]
        if self._numpy is not None:
            name, keys, *rest = self._numpy.get_state()
            found += [name, keys.tobytes(), *rest]
        for each in self._generators:
            if isinstance(each, random.Random):
                found.append(each.getstate())
            else:  # the state may contain arrays, which cannot be compared
                bits = getattr(each, "bit_generator", None) or each._bit_generator
                found.append(pickle.dumps(bits.state))
        return found


def _ranks() -> int:
    """Return the number of ranks with which the program communicates, 1 if there is only one."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return 1
    return torch.distributed.get_world_size()


def _has_effects(name: str) -> bool:
    """Return True if PyTorch's registry of effects lists an overload of the operator `name`."""
    namespace, _, base = name.partition("::")
    overloads = getattr(getattr(torch.ops, namespace), base).overloads()
    names = [name, *(f"{name}.{each}" for each in overloads)]
    find = simple_registry.singleton.find
    return any(getattr(find(each), "effect", None) and find(each).effect.effect for each in names)


def _is_in_python(name: str) -> bool:
    """Return True if all kernels of the operator `name` that may run here are in Python."""
    if name in custom_ops.OPDEFS:
        return True
    namespace, _, base = name.partition("::")
    begin = f"{namespace}/{base}"
    made = [each for each in torch.library._impls if each.rpartition("/")[0].startswith(begin)]
    kernels = ("CPU", "CUDA", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
    there = [key for key in kernels if torch._C._dispatch_has_kernel_for_dispatch_key(name, key)]
    return all(any(each.endswith(f"/{key}") for each in made) for key in there)


def _generators_of(name: str) -> Iterator[Any]:
    """Iterate over the program's generators of Python and NumPy that the body can reach by a name.

    These are variables of the module and of enclosing functions, and attributes of objects there.
    """
    defined = custom_ops.OPDEFS.get(name)
    function = getattr(defined, "_init_fn", None)
    if not isinstance(function, FunctionType):
        return
    reached = [function.__globals__.get(each) for each in function.__code__.co_names]
    for cell in function.__closure__ or ():
        try:
            reached.append(cell.cell_contents)
        except ValueError:  # the variable was deleted
            continue
    owners = [each for each in reached if hasattr(each, "__dict__")]
    owners = [each for each in owners if not isinstance(each, (type, type(sys), FunctionType))]
    reached += [attribute for each in owners for attribute in vars(each).values()]
    numpy = sys.modules.get("numpy.random")
    kinds = (random.Random,) if numpy is None else (
        random.Random, numpy.Generator, numpy.RandomState,
    )  # fmt: skip
    yield from (each for each in reached if isinstance(each, kinds))


@final
class _Watches(threading.local):
    """The watch of this thread, or None."""

    now: _Watch | None = None


_watches = _Watches()


def is_watched() -> bool:
    """Return True while the body of an operator runs in this thread that is watched."""
    return _watches.now is not None


def watch_begins(name: str) -> str:
    """Begin to watch this thread, in which the operator `name` is about to run.

    Returns:
        Why the operator must not run a second time, or "".
    """
    watch = _Watch(name)
    found = watch.begin()
    _watches.now = watch
    return found


def watch_ends(read: str) -> str:
    """End the watch of this thread.

    Args:
        read: An operator by which the body read a tensor that is not among its arguments, or "".

    Returns:
        Why the operator must not run a second time, or "".
    """
    watch, _watches.now = _watches.now, None
    return "" if watch is None else watch.end(read)


#: Classes and functions that run while the program's code runs, so that Dynamo must not trace them.
WATCHING: Final = (_Watch,)
