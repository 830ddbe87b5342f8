"""Intercept Python functions that access a tensor's memory without running an operator.

Inside a budget, replacements of these functions first make evicted memory resident, in every
thread. Functions that return an address, or an object that has one (a NumPy array, a DLPack
capsule, a storage), also pin the memory: from then on it is not evicted. Any other access to an
evicted value raises an error, because it reads the empty storage that replaces the value.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, UntypedStorage, serialization
from torch.autograd.function import BackwardCFunction, Function

from rekindle.pytorch.held._evict_held import EvictHeld
from rekindle.pytorch.held._profilers import profilers_seen
from rekindle.pytorch.held._saving import (
    WRITER,
    copying,
    is_asked_to_read,
    saving,
    told_apart,
    writing,
)
from rekindle.pytorch.native import Driver
from rekindle.pytorch.online import CAPSULES, Current, by_rekindle, exported, replace
from rekindle.pytorch.operators import tensors_in
from rekindle.pytorch.tensors import whole

#: Methods that return an address or an object that has one. (`__array__`, `storage`,
#: `share_memory_` and pickling call these methods.)
_ADDRESSES = ("const_data_ptr", "data_ptr", "untyped_storage")
#: Methods of a tensor that access its memory and return no object that refers to the memory.
_LOOK = ("__repr__", "apply_", "map2_", "map_", "tolist")
#: Methods that read one number of a tensor. They run an operator, which the native core sees,
#: except when called from `torch.tensor([loss, loss])`.
_NUMBERS = ("__bool__", "__complex__", "__float__", "__index__", "__int__")

#: Functions of `torch` that look like composites of operators to the native core, but whose
#: kernels read elements directly. (`max_pool1d` does so only if no gradient is needed.)
_KERNELS = (
    "_rowwise_prune",
    "_saturate_weight_to_fp16",
    "choose_qparams_optimized",
    "fbgemm_linear_fp16_weight",
    "fbgemm_linear_fp16_weight_fp32_activation",
    "fbgemm_linear_int8_weight",
    "fbgemm_linear_int8_weight_fp32_activation",
    "fbgemm_linear_quantize_weight",
    "fbgemm_pack_gemm_matrix_fp16",
    "fbgemm_pack_quantized_matrix",
    "max_pool1d",
    "quantized_gru_cell",
    "quantized_lstm_cell",
    "quantized_rnn_relu_cell",
    "quantized_rnn_tanh_cell",
)

Present = Callable[[Iterable[Tensor]], AbstractContextManager[None]]

_keeper = Current[EvictHeld]()


def present(tensors: Iterable[Tensor], *, writes: bool = True) -> AbstractContextManager[None]:
    """Make `tensors` resident inside the block, if a budget is active.

    Args:
        tensors: The tensors.
        writes: Code in the block may also write the tensors.
    """
    keeper = _keeper.now
    return nullcontext() if keeper is None else keeper.present(tensors, writes=writes)


def _present_in_forward(tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Make `tensors` resident during an `autograd.Function`'s forward, if a budget is active."""
    keeper = _keeper.now
    return nullcontext() if keeper is None else keeper.present_in_forward(tensors)


def _present_in_backward(tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Make `tensors` and saved values resident during an `autograd.Function`'s backward.

    Do nothing if no budget is active.
    """
    keeper = _keeper.now
    return nullcontext() if keeper is None else keeper.present_in_backward(tensors)


@contextmanager
def held_evicted(driver: Driver) -> Iterator[None]:
    """Inside the block, intercept accesses to tensors that run no operator, for `driver`."""
    driver.held = held = EvictHeld(driver)
    if driver.moves_state:
        for home in exported():
            if home.device == driver.device:
                held.hand_out(whole(home))
    with escapes_seen(held), profilers_seen(driver.core):
        yield


@contextmanager
def escapes_seen(keeper: EvictHeld) -> Iterator[None]:
    """Inside the block, make a tensor resident before a function accesses its memory.

    The functions are replaced by ones that call `keeper` first.

    Args:
        keeper: Makes memory resident.
    """

    def give_away(original: Any) -> Any:
        @functools.wraps(original)
        def kept(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            keeper = _keeper.now
            if keeper is not None and not by_rekindle(2) and not is_asked_to_read(tensor, 2):
                keeper.keep(tensor)
            return original(tensor, *args, **kwargs)

        return kept

    def hand_out(original: Any) -> Any:
        @functools.wraps(original)
        def handed_out(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            keeper = _keeper.now
            if keeper is not None and not by_rekindle(2):
                keeper.hand_out(tensor)
            return original(tensor, *args, **kwargs)

        return handed_out

    def look(original: Any, present: Present = present) -> Any:
        @functools.wraps(original)
        def looked_at(*args: Any, **kwargs: Any) -> Any:
            with present(tensors_in(args)):
                return original(*args, **kwargs)

        return looked_at

    def compute(original: Any) -> Any:
        present = look(original)

        @functools.wraps(original)
        def computed(*args: Any, **kwargs: Any) -> Any:
            return (original if torch.compiler.is_compiling() else present)(*args, **kwargs)

        return computed

    def read(original: Any) -> Any:
        @functools.wraps(original)
        def number(tensor: Tensor) -> Any:
            try:
                # the memory is resident, which is the usual case, and is not evicted while it is
                # read
                return original(tensor)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:
                pass
            with present(tensors_in(tensor)):
                return original(tensor)

        return number

    def look_on(original: Any) -> Any:
        return classmethod(look(_unbound(original), _present_in_forward))

    def look_back(original: Any) -> Any:
        return look(original, _present_in_backward)

    with _keeper.during(keeper), ExitStack() as stack:
        for name in _ADDRESSES:
            if hasattr(Tensor, name):
                replace(stack, Tensor, name, give_away)
        replace(stack, Tensor, "numpy", hand_out)
        replace(stack, Tensor, "__deepcopy__", partial(copying, keeper=_keeper))
        replace(stack, serialization, "_save", saving)
        replace(stack, UntypedStorage, "data_ptr", told_apart)
        replace(stack, WRITER, "write_record", partial(writing, keeper=_keeper))
        for name in _LOOK:
            replace(stack, Tensor, name, look)
        for name in _NUMBERS:
            replace(stack, Tensor, name, read)
        for name in _KERNELS:
            if hasattr(torch, name):
                replace(stack, torch, name, compute)
        for module, names in CAPSULES.items():
            for name in names:
                if hasattr(module, name):
                    replace(stack, module, name, hand_out)
        # Custom autograd functions may read the memory of their tensors without any operator.
        replace(stack, Function, "apply", look_on)
        for name in ("apply", "apply_boxed"):
            if hasattr(BackwardCFunction, name):
                replace(stack, BackwardCFunction, name, look_back)
        yield


def _unbound(method: Any) -> Callable[..., Any]:
    """Return the function behind a class method, which takes the class as its first argument.

    Since torch 2.14 the method is implemented in C, so it has no attribute `__func__`.
    """
    if hasattr(method, "__func__"):
        return method.__func__
    return lambda kind, *args, **kwargs: method.__get__(None, kind)(*args, **kwargs)
