"""Put images in a graph into the channels-last layout, in which convolutions are fastest.

With channels-first images, convolution libraries convert to channels-last and back at every call.
Here an image is converted once, before its first convolution, and the results computed from it
keep the layout, as in Inductor. Only compiled plans do this. They do not promise the same bits as
eager PyTorch, since another layout changes the order of sums.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from rekindle.pytorch.planned._layouts import result_of

_aten = torch.ops.aten
#: Operator -> positions of the arguments to convert.
_WANT = {_aten.convolution.default: (0,), _aten.convolution_backward.default: (0, 1)}
_HALVES = (torch.float16, torch.bfloat16)


def put_channels_last(module: fx.GraphModule, forward_outputs: int) -> None:
    """Convert the images in `module`; results of the forward pass keep the layout of the model.

    Args:
        module: The joint graph; changed in place.
        forward_outputs: The number of outputs of the graph that belong to the forward pass.
    """
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
    """Copy the result `node` into a tensor with `stride`.

    AOTAutograd takes views of results, and expects the strides of the original graph.
    """
    fake = node.meta["val"]
    before = fake.new_empty_strided(fake.shape, stride)
    # If the old and the new layout are contiguous, they differ only in strides of dimensions of
    # size one, which do not matter.
    if fake.is_contiguous() and before.is_contiguous():
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
