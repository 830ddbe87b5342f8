"""Tests of backward operators that write their result over the gradient that they read.

They may do so only if nothing else holds the gradient. `taken_over` counts such calls. Each case is
compared with plain PyTorch, bit for bit.
"""

from __future__ import annotations

import importlib.resources
import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchgen
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import rekindle
from rekindle import Run
from rekindle.pytorch.operators import IN_PLACE, InPlace
from tests.pytorch import cores
from tests.pytorch.bits import differing
from tests.pytorch.in_place import FORWARD, NODES, fewest_references, taken_over, without

Forward = Callable[[Tensor], Tensor]


def leaf(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a leaf with the same values at each call."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, generator=generator).to(dtype).requires_grad_()


def same(
    program: Callable[[], Iterable[Tensor | None]], budget: str = "1GiB", **options: Any
) -> Run:
    """Run `program` without and within a budget, and assert that the results have equal bits."""
    torch.manual_seed(2)
    wanted = dict(enumerate(program()))
    torch.manual_seed(2)
    with rekindle.budget(budget, **options) as run:
        got = dict(enumerate(program()))
    assert not differing(got, wanted)
    return run


def between(forward: Forward, x: Tensor) -> Tensor:
    """Call `forward` between two other operators, so that its gradient is an unshared tensor."""
    return torch.exp(forward(torch.exp(x)) * torch.ones(x.shape, dtype=x.dtype))


def trained(forward: Forward, x: Tensor) -> list[Tensor | None]:
    y = between(forward, x)
    y.backward(torch.ones_like(y))
    return [y, x.grad]


# -- gradients that are written over ---------------------------------------------------------------


@pytest.mark.parametrize(("entry", "node"), NODES, ids=[node for _, node in NODES])
def test_backward_operator_overwrites_unshared_gradient(entry: InPlace, node: str) -> None:
    run = same(lambda: trained(FORWARD[node], leaf(8, 16)))
    # Two results are written over a gradient: that of `node`, and that of a multiplication by ones.
    assert taken_over(run) == 2
    assert FORWARD[node](leaf(2, 2)).grad_fn.name() == node  # type: ignore[union-attr]


@pytest.mark.parametrize(("entry", "node"), NODES, ids=[node for _, node in NODES])
def test_unshared_gradient_has_one_reference_in_its_node(entry: InPlace, node: str) -> None:
    """While the node runs, PyTorch holds the gradient in `grads`, and in a boxed argument if any.

    The core overwrites a gradient only if it has exactly these references. If the test fails
    because PyTorch holds fewer, change `REFERENCES` in native/dispatch/in_place.cpp.
    """
    run = same(lambda: trained(FORWARD[node], leaf(8, 16)))
    assert fewest_references(run) == 1


@pytest.mark.parametrize("entry", IN_PLACE, ids=lambda entry: entry.name)
def test_gradient_is_read_only_by_its_in_place_operator(entry: InPlace) -> None:
    """In PyTorch's formulas of derivatives, no other operator reads the gradient as well."""
    packaged = importlib.resources.files(torchgen) / "packaged/autograd/derivatives.yaml"
    formulas = [
        line.strip().removeprefix("self: ").removeprefix("input: ").strip('"')
        for line in packaged.read_text(encoding="utf-8").splitlines()
        if line.strip().startswith(("self: ", "input: "))
    ]
    name = entry.name.removeprefix("aten::")
    called = {"mul": "mul_tensor_backward", "div": "div_tensor_self_backward"}.get(name, name)
    of_it = [each.split(" : ")[-1] for each in formulas if f" {called}(" in f" {each}"]
    of_it = [
        each for each in of_it if "grads[" not in each
    ]  # without the formulas of foreach operators
    assert of_it
    assert all(each.startswith(f"{called}(grad, ") for each in of_it)
    assert all(each.count("grad,") == 1 for each in of_it)


def test_backward_result_is_written_over_gradient_that_is_view() -> None:
    """In attention, matrix products are reshaped, so their gradients are views."""

    def attend() -> list[Tensor | None]:
        q, k, v = leaf(2, 3, 8, 4), leaf(2, 3, 8, 4), leaf(2, 3, 8, 4)
        weights = torch.softmax(q @ k.transpose(-1, -2) / 2.0, -1)
        y = F.dropout(weights, 0.1) @ v
        y.backward(torch.ones_like(y))
        return [y, q.grad, k.grad, v.grad]

    assert taken_over(same(attend)) == 3  # the backward operators of dropout, softmax and division


def test_each_repeated_backward_pass_writes_over_gradients() -> None:
    def twice() -> list[Tensor | None]:
        x = leaf(8, 16)
        y = between(F.gelu, x)
        y.backward(torch.ones_like(y), retain_graph=True)
        y.backward(torch.ones_like(y))
        return [y, x.grad]

    assert taken_over(same(twice)) == 4


def test_gradient_of_two_nodes_is_written_over_by_the_last_one() -> None:
    def shared() -> list[Tensor | None]:
        y = torch.exp(leaf(8, 16))
        y = y.detach().requires_grad_()
        z = F.gelu(y) + F.silu(y)
        torch.exp(z).backward(torch.ones_like(z))
        return [y.grad]

    assert taken_over(same(shared)) == 1


def test_second_derivative_of_in_place_operators_matches_pytorch() -> None:
    def twice() -> list[Tensor | None]:
        x = leaf(8, 16)
        y = torch.exp(F.gelu(torch.exp(x)))
        (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
        gradient.sum().backward()
        return [x.grad, gradient]

    same(twice)


def test_hook_receives_overwritten_gradient_as_new_tensor() -> None:
    """The hook sees no view and no changed version, as in plain PyTorch."""
    seen: list[tuple[int, bool]] = []

    def hooked() -> list[Tensor | None]:
        x = leaf(8, 16)
        y = torch.exp(x)
        y.register_hook(lambda gradient: seen.append((gradient._version, gradient._is_view())))
        z = torch.exp(F.gelu(y))
        z.backward(torch.ones_like(z))
        return [x.grad]

    assert taken_over(same(hooked)) == 1
    assert seen == [(0, False)] * 2


def test_writing_over_gradient_lowers_peak_by_its_bytes() -> None:
    def lose() -> list[Tensor | None]:
        x = leaf(64, 1000)
        F.nll_loss(F.log_softmax(torch.exp(x), -1), torch.zeros(64, dtype=torch.long)).backward()
        return [x.grad]

    with without():
        before = same(lose).peak
    assert before - same(lose).peak > 4 * 64 * 999


def test_result_written_over_gradient_is_recomputed() -> None:
    """The overwritten gradient of `x` is evicted, because a hook needs most of the budget."""
    size = 100_000

    def filled(_: Tensor) -> None:
        """Do nothing with the memory that the hook allocated for the argument."""

    def step(most: float = 0.0) -> list[Tensor | None]:
        x, z = leaf(size), leaf(size)
        y = z
        for _ in range(3):
            y = torch.sin(torch.exp(-y))
        y.register_hook(lambda _: filled(torch.ones(int(most * size))))
        (y + torch.exp(F.gelu(x))).exp().backward(torch.ones(size))
        return [x.grad + 0.0, z.grad]  # type: ignore[operator]

    wanted = dict(enumerate(step()))
    with rekindle.budget(32 * size, evict="anything") as run:
        got = dict(enumerate(step(7.1)))
    assert taken_over(run) == 1
    assert cores.recomputed(run._driver)["gelu_backward"] == 1
    assert not differing(got, wanted)


@pytest.mark.parametrize("evict", ["saved", "auto", "anything"])
def test_writing_over_gradient_with_all_evicted_matches_pytorch(evict: Any) -> None:
    def step() -> list[Tensor | None]:
        x = leaf(8, 16)
        y = x
        for node in sorted(FORWARD):
            y = torch.exp(-FORWARD[node](torch.exp(y).clamp(0.1, 0.9)))
        y.backward(torch.ones_like(y))
        return [y, x.grad]

    torch.manual_seed(2)
    wanted = dict(enumerate(step()))
    torch.manual_seed(2)
    with rekindle.budget("1GiB", evict=evict) as run:
        run._driver.core.evict_before_every_op(run._driver.handle, True)
        got = dict(enumerate(step()))
        run._driver.engine.check()
    assert not differing(got, wanted)
    assert taken_over(run) == len(FORWARD)
    assert run.recomputations > len(FORWARD)


# -- gradients that are not written over -----------------------------------------------------------


def _hooked(x: Tensor) -> list[Tensor | None]:
    seen: list[Tensor] = []
    y = F.gelu(torch.exp(x))
    y.register_hook(lambda gradient: seen.append(gradient))
    torch.exp(y).backward(torch.ones_like(y))
    return [x.grad, *seen]


def _retained(x: Tensor) -> list[Tensor | None]:
    y = F.gelu(torch.exp(x))
    y.retain_grad()
    torch.exp(y).backward(torch.ones_like(y))
    return [x.grad, y.grad]


def _node_hooked(x: Tensor, *, before: bool) -> list[Tensor | None]:
    seen: list[Tensor] = []
    y = F.gelu(torch.exp(x))
    node: Any = y.grad_fn
    if before:
        node.register_prehook(lambda grads: seen.append(grads[0]))
    else:
        node.register_hook(lambda _, grads: seen.append(grads[0]))
    torch.exp(y).backward(torch.ones_like(y))
    return [x.grad, *seen]


def _twice_differentiated(x: Tensor) -> list[Tensor | None]:
    y = torch.exp(F.gelu(torch.exp(x)))
    return [*torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)]


def _captured(x: Tensor) -> list[Tensor | None]:
    y = F.gelu(torch.exp(x))
    return [*torch.autograd.grad(torch.exp(y), (x, y), torch.ones_like(y))]


def _given(x: Tensor) -> list[Tensor | None]:
    gradient = torch.ones_like(x)
    F.gelu(torch.exp(x)).backward(gradient)
    return [x.grad, gradient]


def _shared(x: Tensor) -> list[Tensor | None]:
    """Send one gradient to two nodes: the first must not overwrite it."""
    z = torch.exp(x) + F.gelu(x)
    torch.exp(z).backward(torch.ones_like(z))
    return [x.grad]


def _expanded(x: Tensor) -> list[Tensor | None]:
    F.gelu(torch.exp(x)).sum().backward()
    return [x.grad]


def _in_another_order(x: Tensor) -> list[Tensor | None]:
    y = torch.exp(F.softmax(torch.exp(x), -1).t().contiguous())
    y.backward(torch.ones_like(y))
    return [x.grad]


def _anomalous(x: Tensor) -> list[Tensor | None]:
    with torch.autograd.set_detect_anomaly(True):
        y = torch.exp(F.gelu(torch.exp(x)))
        y.backward(torch.ones_like(y))
    return [x.grad]


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _in_a_mode(x: Tensor) -> list[Tensor | None]:
    y = torch.exp(F.gelu(torch.exp(x)))
    with _Mode():
        y.backward(torch.ones_like(y))
    return [x.grad]


def _with_a_tangent(x: Tensor) -> list[Tensor | None]:
    """Compute a tangent (forward mode), which reads the gradient after the backward operator."""
    with forward_ad.dual_level():
        y = F.gelu(torch.exp(forward_ad.make_dual(x, torch.ones_like(x))))
        (gradient,) = torch.autograd.grad(torch.exp(y), x, torch.ones_like(y))
        return [*forward_ad.unpack_dual(gradient)]


def _checkpointed(x: Tensor) -> list[Tensor | None]:
    y: Any = checkpoint(lambda x: F.gelu(torch.exp(x)), x, use_reentrant=False)
    torch.exp(y).backward(torch.ones_like(y))
    return [x.grad]


def _saved_by_others(x: Tensor) -> list[Tensor | None]:
    with saved_tensors_hooks(lambda tensor: tensor.clone(), lambda saved: saved):
        y = F.gelu(torch.exp(x))
    torch.exp(y).backward(torch.ones_like(y))
    return [x.grad]


def _kept_by_a_function(x: Tensor) -> list[Tensor | None]:
    """Keep, in a custom function, the gradient that its backward pass returns."""
    kept: list[Tensor] = []

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return torch.exp(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            kept.append(gradient * 2.0)
            return kept[-1]

    y: Any = Keeps.apply(F.gelu(torch.exp(x)))
    y.backward(torch.ones_like(y))
    return [x.grad, *kept]


def _seen_weakly(x: Tensor) -> list[Tensor | None]:
    """Hold the gradient of a node by a weak reference, made in a hook of another node."""
    seen: list[weakref.ref[Tensor]] = []
    y = F.gelu(torch.exp(x)) + 1.0
    y.register_hook(lambda gradient: seen.append(weakref.ref(gradient)))
    torch.exp(y).backward(torch.ones_like(y))
    return [x.grad]


def _viewed_twice(x: Tensor) -> list[Tensor | None]:
    """Send views of one gradient to two nodes; nothing else holds the gradient."""
    other = leaf(8, 16)
    y = torch.exp(other)
    z = F.gelu(torch.exp(x))
    torch.exp(y.view(-1) + z.view(-1)).backward(torch.ones(128))
    return [x.grad, other.grad]


def _called(x: Tensor) -> list[Tensor | None]:
    """Call the backward operator directly, outside of a backward pass."""
    with torch.no_grad():
        gradient, y = torch.ones_like(x), torch.softmax(x, -1)
        made = torch.ops.aten._softmax_backward_data(gradient, y, -1, torch.float32)
    return [made, gradient, y]


REFUSED: dict[str, Callable[[Tensor], list[Tensor | None]]] = {
    "hook": _hooked,
    "retain_grad": _retained,
    "node's prehook": partial(_node_hooked, before=True),
    "node's hook": partial(_node_hooked, before=False),
    "create_graph": _twice_differentiated,
    "gradient asked for": _captured,
    "gradient given": _given,
    "gradient of two nodes": _shared,
    "expanded": _expanded,
    "another order": _in_another_order,
    "anomaly mode": _anomalous,
    "dispatch mode": _in_a_mode,
    "tangent": _with_a_tangent,
    "checkpoint": _checkpointed,
    "saved by others": _saved_by_others,
    "kept by a function": _kept_by_a_function,
    "weak reference": _seen_weakly,
    "called by the program": _called,
    "two views": _viewed_twice,
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("case", REFUSED)
def test_gradient_with_other_readers_is_not_written_over(case: str) -> None:
    run = same(lambda: REFUSED[case](leaf(8, 16)))
    assert taken_over(run) == 0


def test_gradients_in_two_threads_are_written_over() -> None:
    def both() -> list[Tensor | None]:
        leaves = [leaf(8, 16), leaf(8, 16)]
        threads = [threading.Thread(target=trained, args=(F.silu, each)) for each in leaves]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [each.grad for each in leaves]

    assert taken_over(same(both)) == 4
