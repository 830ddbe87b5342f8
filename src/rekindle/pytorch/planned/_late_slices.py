"""Copy slices of a gradient that are read long after the rest of it, so that the rest can be freed.

The gradient of a concatenation is cut into slices, which are views of one storage. In a U-Net, the
decoder reads one slice at once. The other is read much later, when the encoder's backward pass adds
it to another gradient. Until then this slice keeps the whole storage alive, because no planner can
free half a storage. Eager PyTorch has the same cost (in a U-Net, 7 % of all activations).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from rekindle._types import Bytes
from rekindle.pytorch.operators import operator

#: Least number of operator calls between the last other reader of the gradient and the first reader
#: of the slice. The copy takes memory too, so it saves nothing if the slice is read soon, as in a
#: residual block of two layers.
_LONG = 12


def copy_late_slices(module: fx.GraphModule) -> bool:
    """Copy slices in `module` that keep a larger storage alive for a long time.

    Only slices that are read by additions are copied. An addition gives the same bits for any
    strides, but a matrix product may choose another kernel for other strides.

    Returns:
        True if a slice was copied.
    """
    position = {node: index for index, node in enumerate(module.graph.nodes)}
    late = [
        node
        for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.slice.Tensor)
        if _is_late(node, position)
    ]
    for node in late:
        _copy(module.graph, node)
    return bool(late)


def _is_late(node: fx.Node, position: dict[fx.Node, int]) -> bool:
    whole: Any = node.args[0]
    if whole.op != "call_function" or _is_view(whole) or _bytes(node) >= _bytes(whole):
        return False
    if not node.users or any(user.target is not torch.ops.aten.add.Tensor for user in node.users):
        return False
    others = _readers(whole, without=node)
    if any(reader.op == "output" for reader in others):
        return False
    free = max([position[whole], position[node], *(position[reader] for reader in others)])
    return min(position[user] for user in node.users) - free > _LONG


def _readers(node: fx.Node, *, without: fx.Node) -> set[fx.Node]:
    """Return the nodes that read `node`, directly or through views, except through `without`."""
    found: set[fx.Node] = set()
    for user in node.users:
        if user is not without:
            found.add(user)
            if _is_view(user):
                found |= _readers(user, without=without)
    return found


def _copy(graph: fx.Graph, node: fx.Node) -> None:
    with graph.inserting_after(node):
        made = graph.call_function(torch.ops.aten.clone.default, (node,))
    fake = node.meta["val"]
    with fake.fake_mode:
        made.meta = {**node.meta, "val": fake.clone()}
    node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)


def _is_view(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and operator(node.target).view


def _bytes(node: fx.Node) -> Bytes:
    fake = node.meta.get("val")
    return fake.numel() * fake.element_size() if isinstance(fake, Tensor) else 0
