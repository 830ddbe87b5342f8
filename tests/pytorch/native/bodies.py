"""Custom operators with bodies of every kind, and training steps that call them.

Each kind is a function that defines a new operator. It takes a name, so that each test tries its
own operator, and a folder of generators and tensors that the body uses.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Callable
from itertools import count
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

WIDTH: Final = 256  # of each vector
DEPTH: Final = 6
Operator = Callable[[Tensor], Tensor]
_numbers = count()


class Wrapped(torch.Tensor):
    """A tensor subclass that wraps another tensor, as torchao's do."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map(lambda x: x.inner if isinstance(x, cls) else x, (args, kwargs))
        return func(*args, **(kwargs or {}))


def _defined(body: Callable[..., Any], *, written: str = "", more: str = "") -> Any:
    """Return an operator with this body. Its backward pass multiplies by its saved result."""
    arguments = f"Tensor{written} x{more}"
    made = torch.library.custom_op(
        f"rekindle_bodies::operator_{next(_numbers)}",
        body,
        mutates_args=("x",) if written else (),
        schema=f"({arguments}) -> Tensor",
    )
    made.register_fake(lambda x, *_: torch.empty_like(x))
    if not written:
        made.register_autograd(
            lambda ctx, gradient: (gradient * ctx.saved_tensors[0].cos(), *ctx.others),
            setup_context=_save,
        )
    return made


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.others = (None,) * (len(inputs) - 1)


def pure() -> Operator:
    return _defined(lambda x: x.sin() * 2)


def subclass() -> Operator:
    return _defined(lambda x: Wrapped(x.clone()) * 2.0)


def draws() -> Operator:
    return _defined(lambda x: x * (torch.rand_like(x) > 0.3))


def draws_from_own_generator() -> Operator:
    generator = torch.Generator().manual_seed(7)
    return _defined(lambda x: x * (torch.rand(x.shape, generator=generator) > 0.3))


def draws_from_numpy() -> Operator:
    return _defined(lambda x: x * float(np.random.rand()))  # noqa: NPY002


def draws_from_generator_of_numpy() -> Operator:
    generator = np.random.default_rng(7)
    return _defined(lambda x: x * float(generator.random()))


def draws_from_python() -> Operator:
    return _defined(lambda x: x * random.random())


def draws_sometimes() -> Operator:
    """Return an operator that draws only with a positive probability, as a dropout does."""
    dropped = _defined(
        lambda x, p: x * (torch.rand_like(x) > p) if p > 0 else x.clone(), more=", float p"
    )
    calls = count()
    return lambda x: dropped(x, 0.2 if next(calls) % 2 else 0.0)


def waits() -> Operator:
    """Return an operator that takes from a queue what the program puts there once per call."""
    condition, there = threading.Condition(), [0]

    def body(x: Tensor) -> Tensor:
        with condition:
            assert condition.wait_for(lambda: there[0] > 0, timeout=20)
            there[0] -= 1
        return x.sin()

    made = _defined(body)

    def put() -> None:
        with condition:
            there[0] += 1
            condition.notify()

    def call(x: Tensor) -> Tensor:
        thread = threading.Timer(0.01, put)
        thread.start()
        result = made(x)
        thread.join()
        return result

    return call


def mutates() -> Operator:
    """Return an operator that writes its argument, as it declares."""
    made = _defined(lambda x: x.mul_(0.5).sin(), written="(a!)")
    return lambda x: x + made((x * 2).detach())


def mutates_two() -> Operator:
    made = torch.library.custom_op(
        f"rekindle_bodies::operator_{next(_numbers)}",
        lambda x, y: (x.mul_(0.5), y.add_(1), None)[-1],
        mutates_args=("x", "y"),
        schema="(Tensor(a!) x, Tensor(b!) y) -> ()",
    )

    def call(x: Tensor) -> Tensor:
        first, second = (x * 2).detach(), x.detach().sin()
        before = first.cos() * second
        made(first, second)
        return x + before + first * second

    return call


def mutates_secretly() -> Operator:
    """Return an operator that writes its argument without declaring it."""
    made = _defined(lambda x: x.mul_(0.5).sin())
    return lambda x: x + made((x * 2).detach())


def mutates_elsewhere() -> Operator:
    """Return an operator that counts its calls in a tensor, from which a value is computed."""
    calls = torch.zeros(WIDTH)
    made = _defined(lambda x: (x * calls.add_(1)).sin())
    return lambda x: made(x) * (calls.clone() + x.sin())


def reads_elsewhere() -> Operator:
    """Return an operator that reads a tensor that the program changes later."""
    scale = torch.ones(WIDTH)
    made = _defined(lambda x: x * scale)

    def call(x: Tensor) -> Tensor:
        result = made(x).sin()
        scale.mul_(0.9)
        return result

    return call


def returns_its_argument() -> Operator:
    library = torch.library.Library("rekindle_bodies", "FRAGMENT")
    name = f"operator_{next(_numbers)}"
    library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, lambda x: x, "CPU")
    made = getattr(torch.ops.rekindle_bodies, name)

    def call(x: Tensor, _: Any = library) -> Tensor:
        return x.sin() + made(x.cos().detach())

    return call


def multiplies_under_autocast() -> Operator:
    weight = torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH)
    made = _defined(lambda x, w: F.linear(x, w).float(), more=", Tensor w")

    def call(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return made(x.view(1, -1), weight).view(-1) * 0.01

    return call


def sees_grad_mode() -> Operator:
    library = torch.library.Library("rekindle_bodies", "FRAGMENT")
    name = f"operator_{next(_numbers)}"
    library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, lambda x: x * (2 if torch.is_grad_enabled() else 3), "CPU")
    made = getattr(torch.ops.rekindle_bodies, name)

    def call(x: Tensor, _: Any = library) -> Tensor:
        with torch.no_grad():
            unseen = made(x)
        return x.sin() * unseen + made(x.detach())

    return call


def sees_default_dtype() -> Operator:
    made = _defined(lambda x: (x * torch.tensor([1 / 3]).item()).to(x.dtype))

    def call(x: Tensor) -> Tensor:
        torch.set_default_dtype(torch.float64)
        try:
            return made(x)
        finally:
            torch.set_default_dtype(torch.float32)

    return call


def calls_another() -> Operator:
    """Return an operator that calls an operator that draws from a generator of its own."""
    inner: Any = draws_from_own_generator()
    return _defined(lambda x: inner(x).sin())


def triton_operator() -> Operator:
    """Return an operator that is declared as Triton kernels are. Its body has none, for the CPU."""
    name = f"rekindle_bodies::operator_{next(_numbers)}"

    def body(x: Tensor) -> Tensor:
        return x.sin() * 2

    made = torch.library.triton_op(name, body, mutates_args=())
    made.register_autograd(
        lambda ctx, gradient: gradient * ctx.saved_tensors[0].cos(), setup_context=_save
    )
    return made


def copies_by_address() -> Operator:
    def body(x: Tensor) -> Tensor:
        made = torch.empty_like(x)
        ctypes.memmove(made.data_ptr(), x.data_ptr(), x.nbytes)
        return made.mul_(1.5)

    return _defined(body)


#: Kinds of operators whose results are recomputed once they are tried.
RECOMPUTED: Final[tuple[Callable[[], Operator], ...]] = (
    pure, subclass, draws, draws_sometimes, multiplies_under_autocast, sees_default_dtype,
    triton_operator, copies_by_address,
)  # fmt: skip
#: Kinds of operators whose results are kept -> part of the reason in the report.
KEPT: Final[dict[Callable[[], Operator], str]] = {
    draws_from_own_generator: "draws from a random number generator of its own",
    draws_from_numpy: "draws from a generator of Python's or NumPy's",
    draws_from_generator_of_numpy: "draws from a generator of Python's or NumPy's",
    draws_from_python: "draws from a generator of Python's or NumPy's",
    waits: "waits for another thread or process",
    mutates: "writes to its arguments",
    mutates_secretly: "writes to memory that it did not allocate",
    mutates_elsewhere: "writes to memory that it did not allocate",
    reads_elsewhere: "reads a tensor that is not among its arguments",
    calls_another: "draws from a random number generator of its own",
}
#: Kinds of operators that return nothing new, or whose results need no gradient.
OTHER: Final[tuple[Callable[[], Operator], ...]] = (
    mutates_two, returns_its_argument, sees_grad_mode,
)  # fmt: skip


def trained(operator: Operator, depth: int = DEPTH) -> dict[str, Any]:
    """Train for two steps. Return all results, with random numbers that the program draws last."""
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    random.seed(0)
    weights = [torch.rand(WIDTH, requires_grad=True) for _ in range(depth)]
    found: dict[str, Any] = {}
    for step in range(2):
        x = torch.linspace(0, 1, WIDTH)
        for weight in weights:
            x = operator((x * weight).sin()).tanh() + x
        loss = x.square().mean()
        loss.backward()
        found[f"loss {step}"] = loss.detach()
    found |= {f"gradient {i}": each.grad for i, each in enumerate(weights)}
    found["numbers"] = (torch.rand(1).item(), np.random.rand(), random.random())  # noqa: NPY002
    return found
