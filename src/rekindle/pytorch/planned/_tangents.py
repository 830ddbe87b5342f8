"""Run a backward graph on gradients that are missing, or that have other strides than traced.

AOTAutograd traces the backward graph as if every result of the forward pass got a gradient, with
the strides of that result. At run time AOTAutograd fills missing gradients with zeros, and copies
the others to the traced strides. Eager PyTorch does neither. It skips operators that would read
only missing gradients, and its kernels read gradients in any strides.

The difference affects bits. The order of sums in kernels depends on strides, and a sum of tensors
takes the strides of its first term, even if this term is zeros. So this module makes AOTAutograd
pass gradients on unchanged. It makes a version of the backward graph for each pattern of missing
gradients and other strides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, final

import torch
from torch import Tensor, fx
from torch._functorch._aot_autograd.schemas import MemoryFormatMeta, PlainTensorMeta
from torch._guards import TracingContext

from rekindle.pytorch.planned._boxed import boxed
from rekindle.pytorch.planned._host import is_kept
from rekindle.pytorch.planned._joint import is_tangent, mutates
from rekindle.pytorch.planned._layouts import VIEWS
from rekindle.pytorch.planned._segments import Segment

#: State of a gradient at run time: missing, with the strides of the trace, or with other strides.
Comes = Literal["undefined", "expected", "otherwise"]

_aten = torch.ops.aten


@final
class Tangents:
    """Compiles the forward and the backward graph of one AOTAutograd function.

    The backward function accepts missing gradients and gradients of any strides.
    """

    def __init__(self) -> None:
        self._forward: Callable[..., Any] | None = None

    def forward(self, module: fx.GraphModule, _: object = None) -> Callable[..., Any]:
        _leave_gradients_alone()
        self._forward = boxed(module)
        return self._forward

    def backward(self, module: fx.GraphModule, _: object = None) -> Callable[..., Any]:
        """Return a function that runs `module`, as `boxed` does.

        A gradient among the arguments may be None, or may have other strides than in the trace.
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
        """Wrap `compiled`, a function that AOTAutograd made, so that missing gradients stay None.

        By default, autograd replaces missing gradients by zeros.
        """

        def run(*args: Any) -> Any:
            results = compiled(*args)
            node = self._node_behind(results)
            if node is not None:
                node.set_materialize_grads(False)
            return results

        return run

    def _node_behind(self, results: Sequence[Any]) -> Any:
        """Return the autograd node that runs the backward graph.

        A tensor in `results` may be a view of a result of that node, so the search passes through
        views.
        """
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
    """Keep AOTAutograd from copying gradients to the strides of the trace.

    Also clear AOTAutograd's list of donated buffers: saved tensors that the backward pass may
    overwrite. Rekindle's graphs do not reuse these buffers, and with them AOTAutograd would refuse
    `retain_graph=True`.
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
    """Return a version of a backward graph for one pattern of missing and strided gradients.

    Args:
        module: The backward graph.
        places: Positions of the gradients among the placeholders of the graph.
        comes: The state of each of these gradients at run time, in the same order.
    """
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
    """Replace views of `gradients` by reshapes, which work for any strides, as in eager PyTorch."""
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
    """Copy gradients to the strides of the trace, because compiled segments accept no others."""
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
    """Remove operators that read only missing gradients, because eager PyTorch skips them.

    A sum of a missing gradient and another gradient becomes the other gradient. Any other operator
    that reads a missing gradient gets zeros instead.

    Args:
        graph: The backward graph; changed in place.
        undefined: Placeholders of the missing gradients. Nodes that the function removes are added
            to this set.
        tangents: Placeholders of all gradients.
    """
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
    graph.eliminate_dead_code(
        lambda node: node.op in ("placeholder", "output") or mutates(node) or is_kept(node)
    )


def _is_cut(graph: fx.Graph) -> bool:
    """Return True if `graph` contains compiled segments, which accept only traced strides."""
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
    """Equals every object. It stands for any size or any strides in AOTAutograd's metadata."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]
