"""Tests of graphs in Checkmate's JSON format: save and load, and errors that name the node."""

from __future__ import annotations

import json

import pytest

from rekindle import InvalidTrace, Unsupported
from rekindle.trace import TraceBuilder, keep_all_peak
from rekindle.trace.formats import load
from rekindle.trace.formats.checkmate import graph_to_trace, read, recognizes, write

GRAPH = {
    "name": "small",
    "meta": {},
    "nodes": [
        {"id": 0, "name": "a", "cost": 1.25, "mem": 8, "deps": [], "is_backward": False},
        {"id": 1, "name": "b", "cost": 2, "mem": 4, "deps": [0], "is_backward": False},
        {"id": 2, "name": "c", "cost": 3, "mem": 2, "deps": [0, 1], "is_backward": True},
    ],
}


def _with(at: int, **change: object) -> dict:
    nodes = [dict(node) for node in GRAPH["nodes"]]
    nodes[at] |= change
    return GRAPH | {"nodes": nodes}


def test_checkmate_graph_is_equal_after_saving_and_loading(tmp_path) -> None:
    path = tmp_path / "small.json"
    path.write_text(json.dumps(GRAPH))
    trace = load(path)
    assert (trace.name, trace.compute_ns, keep_all_peak(trace)) == ("small", 6250, 14)
    assert [op.is_backward for op in trace.ops] == [False, False, True]
    assert json.loads("".join(write(trace))) == GRAPH
    assert read(write(trace)) == trace
    assert recognizes("".join(write(trace)))


def test_checkmate_is_output_flag_is_kept_after_saving() -> None:
    trace = graph_to_trace(_with(0, is_output=True))
    assert json.loads("".join(write(trace)))["nodes"][0]["is_output"] is True


@pytest.mark.parametrize(
    ("graph", "complaint"),
    [
        (_with(0, deps=[2]), "nodes depend on each other: a -> c -> a"),
        (_with(0, deps=[0]), "nodes depend on each other: a -> a"),
        (_with(1, cost=-2), r"node 1 \(b\) has the cost -2"),
        (_with(1, mem=-1), r"node 1 \(b\) has the mem -1"),
        (_with(1, mem=1.5), r"node 1 \(b\) has 1.5 bytes, wanted a whole number"),
        (_with(1, cost="much"), r"node 1 \(b\) has cost 'much'"),
        (_with(1, cost=float("nan")), r"node 1 \(b\) has cost nan"),
        (_with(2, deps=[7]), r"node 2 \(c\) depends on 7, but no node has this id"),
        (_with(2, deps=None), r"node 2 \(c\) has deps None"),
        (_with(2, id=1), "two nodes have the id 1"),
        (_with(2, id=[]), r"node 2 has the id \[\]"),
        ({"name": "x"}, 'wanted a JSON object with a list "nodes"'),
        ({"nodes": {}}, '"nodes" is dict, wanted a list'),
        ({"nodes": [1]}, "node 0 is 1, wanted a JSON object"),
        (
            GRAPH | {"nodes": [GRAPH["nodes"][1] | {"deps": [0]}, GRAPH["nodes"][0]]},
            r"node 0 \(b\) comes before node 1 \(a\), on which it depends",
        ),
    ],
)
def test_wrong_checkmate_graph_is_refused_with_name_of_node(graph: dict, complaint: str) -> None:
    with pytest.raises(InvalidTrace, match=complaint):
        graph_to_trace(graph)


def test_checkmate_file_other_than_json_is_refused() -> None:
    with pytest.raises(InvalidTrace, match="the file is not JSON"):
        read(["{"])


def test_trace_that_checkmate_graph_cannot_hold_is_refused() -> None:
    builder = TraceBuilder()
    builder.call("two", 1, [], [1, 1])
    with pytest.raises(Unsupported, match=r"op 0 \(two\), which has 2 outputs"):
        list(write(builder.build()))
