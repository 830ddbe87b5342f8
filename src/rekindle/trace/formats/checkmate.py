"""Read and write graphs of operators, as Checkmate plans them (Jain et al., MLSys 2020), in JSON.

    {"name": "vgg16", "meta": {...}, "nodes": [
        {"id": 0, "name": "conv", "cost": 12.5, "mem": 4096, "deps": [], "is_backward": false},
        ...]}

One node is one operator with one output. `cost` is in microseconds; a fraction is kept to the
nanosecond. `mem` is the size of the output in bytes. `deps` lists the ids of the nodes whose
outputs the node reads. The nodes come in the order in which the program runs them. Parameters and
batches are not nodes, so their memory is not in the graph.

A value is released after its last reader, as autograd does; a value without readers is released at
once. `"is_output": true` (an addition of this library) pins a node's value to the end.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, cast

from rekindle._errors import InvalidTrace, Unsupported
from rekindle._types import Nanoseconds, ValueId
from rekindle.trace._builder import TraceBuilder
from rekindle.trace._model import Call, Pin, Release, Trace

_NS_PER_US = 1000


NAME: Final = "checkmate"


def recognizes(first: str) -> bool:
    """Return True if the first line begins a JSON object; `load` tries the other formats first."""
    return first.lstrip().startswith("{")


def read(lines: Iterable[str], name: str = "") -> Trace:
    """Read the trace of a graph from the lines of a file.

    Args:
        lines: The lines of the file.
        name: The name of the trace, unless the file contains one.

    Raises:
        InvalidTrace: The graph is wrong; the error names the node and the field.
    """
    try:
        document = json.loads("".join(lines))
    except ValueError as error:
        raise InvalidTrace("graph-file", f"the file is not JSON: {error}") from None
    trace = graph_to_trace(document)
    return trace if trace.name else replace(trace, name=name)


def graph_to_trace(document: object) -> Trace:
    """Convert a graph, as parsed JSON, to a trace."""
    nodes, name = _nodes_of(document)
    position = {_id(node, at): at for at, node in enumerate(nodes)}
    if len(position) < len(nodes):
        twice = next(n for at, n in enumerate(nodes) if position[_id(n, at)] != at)
        raise InvalidTrace("unique-ids", f"two nodes have the id {twice['id']!r}")
    deps = [_deps(node, at, position) for at, node in enumerate(nodes)]
    _check_order(nodes, deps)
    last_reader = list(range(len(nodes)))
    for at, sources in enumerate(deps):
        for source in sources:
            last_reader[source] = at
    builder = TraceBuilder(name)
    values: list[ValueId] = []
    released: dict[int, list[int]] = {}
    for at, reader in enumerate(last_reader):
        released.setdefault(reader, []).append(at)
    for at, node in enumerate(nodes):
        values += builder.call(
            _label(node, at),
            _cost(node, at),
            [values[source] for source in deps[at]],
            [_bytes(node, at)],
            is_backward=bool(node.get("is_backward", False)),
        )
        if node.get("is_output"):
            builder.pin(values[at])
        for value in released.get(at, ()):
            if not nodes[value].get("is_output"):
                builder.release(values[value])
    return builder.build()


def write(trace: Trace) -> Iterator[str]:
    """Yield the lines of a file.

    Args:
        trace: A trace whose operators have one output each.

    Raises:
        Unsupported: An operator does not have one output, or a graph cannot express an event.
    """
    nodes: list[dict[str, object]] = []
    outputs = {event.value for event in trace.events if isinstance(event, Pin)}
    for op_id, op in enumerate(trace.ops):
        if len(op.outputs) != 1 or not trace.is_root(op.outputs[0]) or op.overwrites:
            raise Unsupported(
                f"a graph file can only express ops that have exactly one output, make no view and "
                f"do not write in place, unlike op {op_id} ({op.name}), which has "
                f"{len(op.outputs)} outputs; save the trace as .jsonl instead"
            )
        (output,) = op.outputs
        node: dict[str, object] = {
            "id": op_id,
            "name": op.name,
            "cost": op.cost / _NS_PER_US,
            "mem": trace.storages[trace.values[output]],
            "deps": [trace.maker[value] for value in op.inputs],
            "is_backward": op.is_backward,
        }
        if output in outputs:
            node["is_output"] = True
        nodes.append(node)
    for event in trace.events:
        if not isinstance(event, Call | Release | Pin) or (isinstance(event, Call) and event.held):
            raise Unsupported(
                f"a graph file cannot express {event}; save the trace as .jsonl instead"
            )
    document: dict[str, object] = {"name": trace.name, "meta": {}, "nodes": nodes}
    yield json.dumps(document) + "\n"


# Each of the following functions reads one field of a node. Its error says which node is wrong, and
# what was wanted.

_Node = Mapping[str, object]


def _nodes_of(document: object) -> tuple[Sequence[_Node], str]:
    """Return the nodes and the name of the graph in `document`, the parsed JSON file."""
    if not isinstance(document, dict) or "nodes" not in document:
        raise InvalidTrace(
            "graph-file", 'the file is not a graph: wanted a JSON object with a list "nodes"'
        )
    graph = cast("dict[str, object]", document)
    nodes = graph["nodes"]
    if not isinstance(nodes, list):
        raise InvalidTrace("graph-file", f'"nodes" is {type(nodes).__name__}, wanted a list')
    for at, node in enumerate(cast("list[object]", nodes)):
        if not isinstance(node, dict):
            raise InvalidTrace("graph-file", f"node {at} is {node!r}, wanted a JSON object")
    return cast("list[_Node]", nodes), str(graph.get("name", ""))


def _id(node: _Node, at: int) -> object:
    found = node.get("id", at)
    if not isinstance(found, int | str):
        raise InvalidTrace("graph-file", f"node {at} has the id {found!r}, wanted an int or text")
    return found


def _label(node: _Node, at: int) -> str:
    return str(node.get("name", f"node{at}"))


def _number(node: _Node, at: int, key: str) -> float:
    found = node.get(key)
    if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
        raise InvalidTrace(
            "graph-file", f"node {at} ({_label(node, at)}) has {key} {found!r}, wanted a number"
        )
    if found < 0:
        raise InvalidTrace(
            "nothing-is-negative", f"node {at} ({_label(node, at)}) has the {key} {found}"
        )
    return found


def _cost(node: _Node, at: int) -> Nanoseconds:
    return round(_number(node, at, "cost") * _NS_PER_US)


def _bytes(node: _Node, at: int) -> int:
    found = _number(node, at, "mem")
    if found != int(found):
        raise InvalidTrace(
            "graph-file", f"node {at} ({_label(node, at)}) has {found} bytes, wanted a whole number"
        )
    return int(found)


def _deps(node: _Node, at: int, position: Mapping[object, int]) -> list[int]:
    """Return the positions of the nodes that a node reads, without duplicates."""
    found = node.get("deps", [])
    if not isinstance(found, list):
        raise InvalidTrace(
            "graph-file",
            f"node {at} ({_label(node, at)}) has deps {found!r}, wanted a list of node ids",
        )
    deps: list[int] = []
    for dep in cast("list[object]", found):
        if not isinstance(dep, int | str) or dep not in position:
            raise InvalidTrace(
                "known-names",
                f"node {at} ({_label(node, at)}) depends on {dep!r}, but no node has this id",
            )
        if position[dep] not in deps:
            deps.append(position[dep])
    return deps


def _check_order(nodes: Sequence[_Node], deps: Sequence[Sequence[int]]) -> None:
    """Raise `InvalidTrace` unless every node comes after the nodes that it reads.

    The error distinguishes a cycle from a wrong order.
    """
    late = [(at, dep) for at, sources in enumerate(deps) for dep in sources if dep >= at]
    if not late:
        return
    cycle = _cycle(deps)
    if cycle:
        names = " -> ".join(_label(nodes[at], at) for at in cycle)
        raise InvalidTrace("no-cycles", f"nodes depend on each other: {names}")
    at, dep = late[0]
    raise InvalidTrace(
        "inputs-are-made-before",
        f"node {at} ({_label(nodes[at], at)}) comes before node {dep} "
        f"({_label(nodes[dep], dep)}), on which it depends",
    )


def _cycle(deps: Sequence[Sequence[int]]) -> list[int]:
    """Return the nodes along one cycle, the first repeated at the end; empty without a cycle."""
    done: set[int] = set()
    for start in range(len(deps)):
        path, on_path = [start], {start}
        branches = [iter(deps[start])]
        while path:
            following = next((dep for dep in branches[-1] if dep not in done), None)
            if following is None:
                branches.pop()
                on_path.discard(path[-1])
                done.add(path.pop())
            elif following in on_path:
                return [*path[path.index(following) :], following]
            else:
                path.append(following)
                on_path.add(following)
                branches.append(iter(deps[following]))
    return []
