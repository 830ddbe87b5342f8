"""Correct the strides in a traced graph to those of eager PyTorch.

Strides affect bits: random numbers fill a tensor in the order of its memory, and kernels sum in an
order that depends on strides. Strides also decide if a reshape copies. Tracing uses fake tensors,
whose strides sometimes differ from those of real kernels. Every operator runs on real tensors to
measure its cost. Where this run shows other strides, the graph is corrected, with all results that
depend on them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from rekindle.pytorch.planned._joint import is_call
from rekindle.pytorch.planned._prices import Price

_aten = torch.ops.aten
#: Operators that tracing records for a reshape that does not have to copy.
VIEWS = {_aten.view.default, _aten._unsafe_view.default}
_LIBRARY = torch.library.Library("rekindle", "FRAGMENT")
_LIBRARY.define(
    "bernoulli_like(Tensor like, float p) -> Tensor", tags=[torch.Tag.nondeterministic_seeded]
)


def _bernoulli_like(like: Tensor, p: float) -> Tensor:
    return torch.empty_like(like).bernoulli_(p)


_LIBRARY.impl("bernoulli_like", _bernoulli_like, "CompositeExplicitAutograd")


def lay_out(
    module: fx.GraphModule, prices: Callable[[list[fx.Node]], dict[fx.Node, Price]]
) -> None:
    """Correct the strides of fake tensors in `module`.

    A view that is impossible with the correct strides becomes a reshape, which copies.

    Args:
        module: The joint graph; changed in place.
        prices: Returns the measured costs and results of operator calls.
    """
    _spread(module.graph, _masks(module.graph))
    # The loop ends, because each round corrects at least the first operator with wrong strides.
    while True:
        calls = [node for node in module.graph.nodes if is_call(node)]
        found = prices(calls)
        wrong = {
            node: _as_measured(node, found[node]) for node in calls if _lies(node, found[node])
        }
        if not wrong:
            return
        _spread(module.graph, wrong)


def _masks(graph: fx.Graph) -> dict[fx.Node, Any]:
    """Replace the operators that make masks of CPU dropout; return their results by node.

    Eager dropout fills an empty tensor with the strides of its input. In the functional graph
    `aten::bernoulli` makes a contiguous mask instead, so elements get other random numbers.
    """
    found: dict[fx.Node, Any] = {}
    for node in graph.find_nodes(op="call_function", target=_aten.bernoulli.p):
        blank: Any = node.args[0]
        if blank.target is _aten.empty_like.default and not blank.meta["val"].is_contiguous():
            node.target = torch.ops.rekindle.bernoulli_like.default
            found[node] = torch.empty_like(blank.meta["val"])
    return found


def _lies(node: fx.Node, price: Price) -> bool:
    """Return True if a fake result of `node` has other strides than the measured result."""
    return any(
        tuple(fake.stride()) != tuple(result.stride)
        and any(
            size > 1 and one != other
            for size, one, other in zip(fake.shape, fake.stride(), result.stride, strict=True)
        )
        for fake, result in zip(_tensors(node), price.results, strict=True)
        if fake.numel()
    )


def _tensors(node: fx.Node) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]


def _as_measured(node: fx.Node, price: Price) -> Any:
    results = iter(price.results)

    def right(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.new_empty_strided(leaf.shape, next(results).stride)

    return pytree.tree_map(right, node.meta["val"])


def _spread(graph: fx.Graph, layouts: dict[fx.Node, Any]) -> None:
    """Set fake results of some nodes, and update those of all nodes that depend on them.

    Args:
        graph: The graph to correct.
        layouts: Node -> its fake result with the correct strides.
    """
    changed: set[fx.Node] = set()
    for node in graph.nodes:
        if node in layouts:
            made = layouts[node]
        elif node.op == "call_function" and not changed.isdisjoint(node.all_input_nodes):
            made = result_of(node)
        else:
            continue
        before = _tensors(node)
        node.meta["val"] = made
        if [each.stride() for each in _tensors(node)] != [each.stride() for each in before]:
            changed.add(node)


def result_of(node: fx.Node) -> Any:
    """Run `node` on the fake tensors of its inputs, and return the fake result.

    A view that the strides of its input do not allow is changed to a reshape first.
    """
    args, kwargs = map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    try:
        return node.target(*args, **kwargs)  # type: ignore[operator]
    except (RuntimeError, ValueError):
        if node.target not in VIEWS:
            raise
    node.target = _aten.reshape.default
    return node.target(*args, **kwargs)
