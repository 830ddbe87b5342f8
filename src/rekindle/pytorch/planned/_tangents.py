"""Run a backward graph on gradients as they come, in their own layouts.

AOTAutograd traces the backward graph as if every result of the forward pass got a gradient, in the
layout of that result. At run time it fills missing gradients with zeros and copies the others into
that layout. Eager PyTorch does neither: it does not run operators that lead to no gradient, and
kernels see gradients as they come. That changes bits: a sum takes the layout of its first term,
zeros or not, and kernels sum in an order that depends on the layout. So here AOTAutograd passes
gradients on unchanged, and a graph is made for each pattern of gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, final

import torch
from torch import Tensor, fx
from torch._functorch._aot_autograd.schemas import MemoryFormatMeta, PlainTensorMeta
from torch._guards import TracingContext

from rekindle.pytorch.planned._boxed import boxed
from rekindle.pytorch.planned._joint import is_tangent, mutates
from rekindle.pytorch.planned._layouts import VIEWS
from rekindle.pytorch.planned._segments import Segment

#: How a gradient comes: missing, in the traced layout, or in another layout.
Comes = Literal["undefined", "expected", "otherwise"]

_aten = torch.ops.aten


@final
class Tangents:
    """Compilers of a forward and a backward graph that pass gradients on unchanged."""

    def __init__(self) -> None:
        self._forward: Callable[..., Any] | None = None

    def forward(self, module: fx.GraphModule, _: object = None) -> Callable[..., Any]:
        _leave_gradients_alone()
        self._forward = boxed(module)
        return self._forward

    def backward(self, module: fx.GraphModule, _: object = None) -> Callable[..., Any]:
        """Return the function of `module`, like `boxed`.

        A gradient that it is given may be None, or have another layout than traced.
        """
        tangents = [
            (place, node.meta["val"])
            for place, node in enumerate(module.graph.find_nodes(op="placeholder"))
            if is_tangent(node) and isinstance(node.meta.get("val"), Tensor)
        ]
        functions: dict[tuple[Comes, ...], Callable[[list[Any]], list[Any]]] = {}

        def run(args: list[Any]) -> list[Any]:
            comes: tuple[Comes, ...] = tuple(
                [_comes(args[place], fake) for place, fake in tangents]
            )
            if comes not in functions:
                functions[comes] = boxed(_cut(module, [place for place, _ in tangents], comes))
            return functions[comes](args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def of(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the function that AOTAutograd made: missing gradients are not filled with zeros."""

        def run(*args: Any) -> Any:
            results = compiled(*args)
            node = self._node_behind(results)
            if node is not None:
                node.set_materialize_grads(False)
            return results

        return run

    def _node_behind(self, results: Sequence[Any]) -> Any:
        """Return the autograd node of the backward graph; results may be views of its results."""
        for each in results:
            node = each.grad_fn if isinstance(each, Tensor) else None
            while node is not None:
                function = getattr(type(node), "_forward_cls", None)
                if function is not None and function.compiled_fw is self._forward:
                    return node
                further = node.next_functions
                node = further[0][0] if len(further) == 1 and function is None else None
        return None


def _leave_gradients_alone() -> None:
    """Keep AOTAutograd from copying gradients into the traced layouts.

    Also drop its donated buffers, for which it would refuse `retain_graph`. They are not used here.
    """
    context = TracingContext.try_get()
    metadata = context and context.fw_metadata
    if metadata is None:
        return
    metadata.bw_donated_idxs = []
    for each in metadata.subclass_tangent_meta:
        if isinstance(each, PlainTensorMeta):
            each.memory_format = MemoryFormatMeta(size=_Any(), stride=_Any())  # type: ignore[arg-type]


def _comes(gradient: Any, fake: Tensor) -> Comes:
    if gradient is None:
        return "undefined"
    return "expected" if gradient.stride() == fake.stride() else "otherwise"


def _cut(module: fx.GraphModule, places: Sequence[int], comes: Sequence[Comes]) -> fx.GraphModule:
    """Return a copy of `module` for gradients that come like this."""
    if set(comes) <= {"expected"}:
        return module
    graph = fx.Graph()
    results = graph.graph_copy(module.graph, {})
    graph.output(results)
    placeholders = graph.find_nodes(op="placeholder")
    tangents = {placeholders[place]: how for place, how in zip(places, comes, strict=True)}
    if _is_cut(graph):
        _lay_out_gradients(graph, [node for node, how in tangents.items() if how == "otherwise"])
    else:
        _allow_any_layout(graph, _led_to_by(graph, tangents))
    if "undefined" in comes:
        _leave_out(graph, {node for node, how in tangents.items() if how == "undefined"}, tangents)
    graph.lint()
    return fx.GraphModule(module, graph)


def _led_to_by(graph: fx.Graph, sources: Any) -> set[fx.Node]:
    found = set(sources)
    for node in graph.nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _allow_any_layout(graph: fx.Graph, gradients: set[fx.Node]) -> None:
    """Replace views of gradients by reshapes, which copy if needed, as autograd's formulas do."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node not in gradients:
            continue
        if node.target in VIEWS:
            node.target = _aten.reshape.default
        elif node.target is _aten.as_strided.default and node.args[0] in gradients:
            source: Any = node.args[0]
            with graph.inserting_before(node):
                node.replace_input_with(source, _laid_out_as(source, source))


def _lay_out_gradients(graph: fx.Graph, gradients: Sequence[fx.Node]) -> None:
    """Copy gradients into the traced layout, the only one that compiled code accepts."""
    behind = graph.find_nodes(op="placeholder")[-1]
    for node in gradients:
        with graph.inserting_after(behind):
            made = _laid_out_as(node, node)
        node.replace_all_uses_with(made, delete_user_cb=lambda user, made=made: user is not made)


def _laid_out_as(node: fx.Node, other: fx.Node) -> fx.Node:
    made = node.graph.call_function(_laid_out, (node, *_geometry(other)))
    made.meta = {"val": other.meta["val"]}
    return made


def _leave_out(graph: fx.Graph, undefined: set[fx.Node], tangents: Any) -> None:
    """Leave out operators whose gradients are all undefined; a sum becomes its other term."""
    gradients = set(tangents)
    for node in list(graph.nodes):
        read = [each for each in node.all_input_nodes if each in gradients]
        if not read or node.op == "output":
            continue
        gradients.add(node)
        lacking = [each for each in read if each in undefined]
        if not lacking:
            continue
        if len(lacking) == len(read) and not mutates(node):
            undefined.add(node)
        elif (term := _other_term(node, undefined)) is not None:
            if _is_cut(graph):
                with graph.inserting_before(node):
                    term = _laid_out_as(term, node)
                gradients.add(term)
            node.replace_all_uses_with(term)
        else:
            for each in lacking:
                with graph.inserting_before(node):
                    made = graph.call_function(_zeros, (*_geometry(each), each.meta["val"].dtype,
                                                        each.meta["val"].device))  # fmt: skip
                made.meta = {"val": each.meta["val"]}
                node.replace_input_with(each, made)
    output = graph.output_node()
    output.args = (tuple(None if each in undefined else each for each in output.args[0]),)  # type: ignore[union-attr]
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or mutates(node))


def _is_cut(graph: fx.Graph) -> bool:
    """Return True if the graph contains compiled code, which accepts one layout only."""
    return any(isinstance(node.target, Segment) for node in graph.nodes)


def _other_term(node: fx.Node, undefined: set[fx.Node]) -> fx.Node | None:
    if node.target is not _aten.add.Tensor or node.kwargs:
        return None
    (term,) = [each for each in node.args if each not in undefined]
    if not isinstance(term, fx.Node):
        return None
    made, fake = node.meta["val"], term.meta["val"]
    return term if (made.shape, made.dtype) == (fake.shape, fake.dtype) else None


def _geometry(node: fx.Node) -> tuple[tuple[int, ...], tuple[int, ...]]:
    fake = node.meta["val"]
    return tuple(fake.shape), tuple(fake.stride())


def _zeros(size: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device).zero_()


def _laid_out(source: Tensor, size: Any, stride: Any) -> Tensor:
    if source.stride() == stride:
        return source
    return source.new_empty_strided(size, stride).copy_(source)


@final
class _Any:
    """An object that is equal to anything."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]
