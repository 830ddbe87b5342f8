"""Correct the layouts of a traced program to those of eager PyTorch.

Layout matters for bits: random numbers fill memory in its order, kernels sum in an order that
depends on it, and a reshape copies or not. Fake tensors are sometimes laid out differently from the
results of real kernels. Every operator runs on real tensors to be priced anyway; where it shows
another layout, the trace is corrected, with all that follows from it.
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
#: Operators that a reshape is traced as if it need not copy.
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
    """Correct the fake tensors in `module`, and views that their layouts do not allow.

    Args:
        module: The joint graph; changed in place.
        prices: Returns the measured results of calls.
    """
    _spread(module.graph, _masks(module.graph))
    while True:  # each pass corrects at least one more operator, and all before it stay correct
        calls = [node for node in module.graph.nodes if is_call(node)]
        found = prices(calls)
        wrong = {
            node: _as_measured(node, found[node]) for node in calls if _lies(node, found[node])
        }
        if not wrong:
            return
        _spread(module.graph, wrong)


def _masks(graph: fx.Graph) -> dict[fx.Node, Any]:
    """Replace the masks of CPU dropout, and return their results in the right layout.

    Eager dropout fills an empty tensor, in its layout. In the functional graph `aten::bernoulli`
    makes contiguous masks, with other numbers in other places.
    """
    found: dict[fx.Node, Any] = {}
    for node in graph.find_nodes(op="call_function", target=_aten.bernoulli.p):
        blank: Any = node.args[0]
        if blank.target is _aten.empty_like.default and not blank.meta["val"].is_contiguous():
            node.target = torch.ops.rekindle.bernoulli_like.default
            found[node] = torch.empty_like(blank.meta["val"])
    return found


def _lies(node: fx.Node, price: Price) -> bool:
    """Return True if a fake result of `node` has another layout than the real one."""
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
    """Set the results of these nodes, and recompute the fake results of their readers."""
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
    """Return the fake result of `node`; a view that its input does not allow becomes a copy."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    try:
        return node.target(*args, **kwargs)  # type: ignore[operator]
    except (RuntimeError, ValueError):
        if node.target not in VIEWS:
            raise
    node.target = _aten.reshape.default
    return node.target(*args, **kwargs)
