"""The ways to a tensor's memory that no dispatch mode sees.

Inside, each of them first brings back what was let go, in every thread. Those that give an address
away, or something that has one (an array of NumPy, a capsule of DLPack, a storage), keep the memory
from then on. What finds another way raises, because the memory that it reads is that of a husk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, Function

from rekindle.pytorch.online import CAPSULES, Current, by_rekindle, replace
from rekindle.pytorch.operators import tensors_in

#: An address, or something that has one, leaves PyTorch. (`__array__`, `storage`, `share_memory_`,
#: pickling, copying and saving come through these.)
_ADDRESSES = ("const_data_ptr", "data_ptr", "untyped_storage")
#: Read the memory, and return what has nothing to do with it any more.
_LOOK = ("__repr__", "tolist")
#: Read one number, by an operator that is seen, but where `torch.tensor([loss, loss])` asks.
_NUMBERS = ("__bool__", "__complex__", "__float__", "__index__", "__int__")

#: Functions of `torch` whose kernels read elements, although they are no operators of their own but
#: composed of operators. (`max_pool1d` only where no gradient is needed.)
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


class Keeper(Protocol):
    """Who has what was let go."""

    def present(self, tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
        """Inside, the memory of `tensors` is there."""
        ...

    def present_in_forward(self, tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
        """Likewise, and what a function of one's own makes and writes is its own affair."""
        ...

    def present_in_backward(self, tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
        """Likewise, and what the backward pass of a function of one's own asks for."""
        ...

    def keep(self, tensor: Tensor) -> None:
        """The memory of `tensor` is there, and stays."""
        ...

    def hand_out(self, tensor: Tensor) -> None:
        """Likewise, and others may write there."""
        ...


_keeper = Current[Keeper]()


def _present(tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    keeper = _keeper.now
    return nullcontext() if keeper is None else keeper.present(tensors)


def _present_in_forward(tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    keeper = _keeper.now
    return nullcontext() if keeper is None else keeper.present_in_forward(tensors)


def _present_in_backward(tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    keeper = _keeper.now
    return nullcontext() if keeper is None else keeper.present_in_backward(tensors)


@contextmanager
def escapes_seen(shells: Keeper) -> Iterator[None]:
    """Inside, nobody gets at the memory of a tensor before it is there."""

    def give_away(original: Any) -> Any:
        @functools.wraps(original)
        def kept(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            keeper = _keeper.now
            if keeper is not None and not by_rekindle(2):
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

    def look(original: Any, present: Present = _present) -> Any:
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
                return original(tensor)  # as a rule it is there: nothing is locked for that
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:
                pass
            with shells.present(tensors_in(tensor)):
                return original(tensor)

        return number

    def look_on(original: Any) -> Any:
        return classmethod(look(_unbound(original), _present_in_forward))

    def look_back(original: Any) -> Any:
        return look(original, _present_in_backward)

    with _keeper.during(shells), ExitStack() as stack:
        for name in _ADDRESSES:
            if hasattr(Tensor, name):
                replace(stack, Tensor, name, give_away)
        replace(stack, Tensor, "numpy", hand_out)
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
        # Kernels of one's own, which are called with tensors and read them unseen.
        replace(stack, Function, "apply", look_on)
        for name in ("apply", "apply_boxed"):
            if hasattr(BackwardCFunction, name):
                replace(stack, BackwardCFunction, name, look_back)
        yield


def _unbound(method: Any) -> Callable[..., Any]:
    """A class method as a function of the class. From torch 2.14 on it is one of C's."""
    if hasattr(method, "__func__"):
        return method.__func__
    return lambda kind, *args, **kwargs: method.__get__(None, kind)(*args, **kwargs)
