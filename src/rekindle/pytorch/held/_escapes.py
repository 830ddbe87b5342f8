"""The ways to a tensor's memory that no dispatch mode sees.

Inside, each of them first brings back what was let go, in every thread. Those that give an address
away, or something that has one (an array of NumPy, a capsule of DLPack, a storage), keep the memory
from then on. What finds another way raises, because the memory that it reads is that of a husk.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, Function
from torch.utils import dlpack

from rekindle.pytorch.held._shells import Shells
from rekindle.pytorch.operators import tensors_in

_Wrap = Callable[[Any], Any]

#: An address, or something that has one, leaves PyTorch. (`__array__`, `storage`, `share_memory_`,
#: pickling, copying and saving come through these.)
_GIVE_AWAY = ("const_data_ptr", "data_ptr", "numpy", "untyped_storage")
#: Read the memory, and return what has nothing to do with it any more.
_LOOK = ("__repr__", "tolist")
#: The functions behind `Tensor.__dlpack__`, by the modules that have them.
_CAPSULES = {
    torch._C: ("_to_dlpack", "_to_dlpack_versioned"),
    dlpack: ("to_dlpack",),
    torch: ("to_dlpack",),
}


@contextmanager
def escapes_seen(shells: Shells) -> Iterator[None]:
    """Inside, nobody gets at the memory of a tensor before it is there."""

    def give_away(original: Any) -> Any:
        @functools.wraps(original)
        def kept(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not _is_ours(sys._getframe(1).f_globals):
                shells.keep(tensor)
            return original(tensor, *args, **kwargs)

        return kept

    def look(original: Any) -> Any:
        @functools.wraps(original)
        def present(*args: Any, **kwargs: Any) -> Any:
            with shells.present(tensors_in(args)):
                return original(*args, **kwargs)

        return present

    with ExitStack() as stack:
        for name in _GIVE_AWAY:
            if hasattr(Tensor, name):
                _replace(stack, Tensor, name, give_away)
        for name in _LOOK:
            _replace(stack, Tensor, name, look)
        for module, names in _CAPSULES.items():
            for name in names:
                if hasattr(module, name):
                    _replace(stack, module, name, give_away)
        # For those who find it, NumPy's way (`__dlpack__`) is not the only one.
        _hide(stack, Tensor, "__dlpack_c_exchange_api__")
        # Kernels of one's own, which are called with tensors and read them unseen.
        _replace(stack, Function, "apply", lambda apply: classmethod(look(apply.__func__)))
        for name in ("apply", "apply_boxed"):
            if hasattr(BackwardCFunction, name):
                _replace(stack, BackwardCFunction, name, look)
        yield


def _is_ours(names: dict[str, Any]) -> bool:
    return str(names.get("__name__", "")).startswith("rekindle.")


def _replace(stack: ExitStack, owner: Any, name: str, wrap: _Wrap) -> None:
    """Until `stack` unwinds, `owner` has another `name`; where it inherits it, it has its own."""
    own = vars(owner).get(name)
    setattr(owner, name, wrap(getattr(owner, name) if own is None else own))
    stack.callback(_put_back, owner, name, own)


def _hide(stack: ExitStack, owner: Any, name: str) -> None:
    own = vars(owner).get(name)
    if own is not None:
        delattr(owner, name)
        stack.callback(_put_back, owner, name, own)


def _put_back(owner: Any, name: str, own: Any) -> None:
    if own is None:
        delattr(owner, name)
    else:
        setattr(owner, name, own)
