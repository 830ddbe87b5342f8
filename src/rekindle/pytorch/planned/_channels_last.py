"""Images with their channels last: the layout that convolutions are quickest in.

A library that is given the channels first puts them last and back again, at each convolution. So
they are put last once, where images come in, and stay there: whatever is made of them lies as they
do. Inductor does the same. It is for compiled plans, which promise no bits of eager PyTorch: sums
are in another order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from rekindle.pytorch.planned._layouts import result_of

_aten = torch.ops.aten
#: What is to lie so: positions of arguments.
_WANT = {_aten.convolution.default: (0,), _aten.convolution_backward.default: (0, 1)}
_HALVES = (torch.float16, torch.bfloat16)


def put_channels_last(module: fx.GraphModule, forward_outputs: int) -> None:
    """Has the images of `module` lie so. What the forward pass returns lies as before."""
    graph = module.graph
    strides = {node: _stride(node) for node in graph.nodes}
    copies: dict[fx.Node, fx.Node] = {}
    changed: set[fx.Node] = set()
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        for position in _WANT.get(node.target, ()):  # type: ignore[call-overload]
            source: Any = node.args[position]
            if source not in copies and _is_for(source):
                with graph.inserting_before(node):
                    copies[source] = _clone(source, torch.channels_last)
            if source in copies:
                node.update_arg(position, copies[source])
                changed.add(copies[source])
        if not changed.isdisjoint(node.all_input_nodes):
            node.meta["val"] = result_of(node)
            if _stride(node) != strides[node]:
                changed.add(node)
    output = graph.output_node()
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    for index, each in enumerate(results[:forward_outputs]):
        if each in changed:
            results[index] = _as_before(output, each, strides[each])
    output.args = (type(output.args[0])(results),)  # type: ignore[call-arg, misc]


def _is_for(node: fx.Node) -> bool:
    fake = node.meta["val"]
    if fake.dim() != 4 or fake.is_contiguous(memory_format=torch.channels_last):
        return False
    return fake.device.type == "cpu" or fake.dtype in _HALVES


def _clone(node: fx.Node, layout: torch.memory_format) -> fx.Node:
    made = node.graph.call_function(_aten.clone.default, (node,), {"memory_format": layout})
    made.meta = {"val": result_of(made)}
    return made


def _as_before(output: fx.Node, node: fx.Node, stride: tuple[int, ...]) -> fx.Node:
    """For AOTAutograd takes views of results by the strides that it traced."""
    fake = node.meta["val"]
    before = fake.new_empty_strided(fake.shape, stride)
    if fake.is_contiguous() and before.is_contiguous():  # they differ in dimensions of size one
        return node
    with output.graph.inserting_before(output):
        blank = output.graph.call_function(
            _aten.empty_strided.default,
            (list(fake.shape), list(stride)),
            {"dtype": fake.dtype, "device": fake.device},
        )
        blank.meta = {"val": before}
        made = output.graph.call_function(_aten.copy.default, (blank, node))
    made.meta = {**node.meta, "val": result_of(made)}
    return made


def _stride(node: fx.Node) -> Any:
    fake = node.meta.get("val")
    if isinstance(fake, torch.Tensor):
        return fake.stride()
    if isinstance(fake, list | tuple):
        return [each.stride() if isinstance(each, torch.Tensor) else None for each in fake]
    return None
