"""Tests of every trace format: save and load, and errors with line and field."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given

from rekindle import InvalidFile, InvalidTrace, Unsupported
from rekindle._types import ValueId
from rekindle.trace import Pin, Release, Trace, TraceBuilder, chain, keep_all_peak
from rekindle.trace.formats import dtr, load, native, save
from tests.strategies import examples, traces

LOG = """\
{"INSTRUCTION":"CONSTANT","NAME":"before"}
{"INSTRUCTION":"MEMORY","NAME":"before","MEMORY":"99"}
{"INSTRUCTION":"ANNOTATE","ANNOTATION":"START"}
{"INSTRUCTION":"RELEASE","NAME":"before"}
{"INSTRUCTION":"CONSTANT","NAME":"w"}
{"INSTRUCTION":"MEMORY","NAME":"w","MEMORY":"8"}
{"INSTRUCTION":"CALL","NAME":"split","RESULT":["a","v"],"ARGS":["w"],"TIME":"5"}
{"INSTRUCTION":"MEMORY","NAME":"a","MEMORY":"4"}
{"INSTRUCTION":"ALIAS","NAME":"a","ALIAS":"-1"}
{"INSTRUCTION":"MEMORY","NAME":"v","MEMORY":"8"}
{"INSTRUCTION":"ALIAS","NAME":"v","ALIAS":"0"}
{"INSTRUCTION":"COPY","DST":"b","SRC":"a"}
{"INSTRUCTION":"RELEASE","NAME":"a"}
{"INSTRUCTION":"ANNOTATE","ANNOTATION":"BACKWARD"}
{"INSTRUCTION":"MUTATE","NAME":"add_","ARGS":["v","b"],"MUTATE":[0],"TIME":"7"}
{"INSTRUCTION":"COPY_FROM","DST":"v","SRC":"b"}
"""


def test_dtr_log_is_read_as_its_authors_define() -> None:
    trace = dtr.read(LOG.splitlines())
    assert trace.storages == (8, 4, 8)  # w, a, and a copy of w, which add_ makes in their format
    assert [(op.name, op.cost, op.is_backward) for op in trace.ops] == [
        ("constant", 0, False),
        ("split", 5, False),
        ("add_", 7, True),
    ]
    assert trace.values == (0, 1, 0, 2)
    # At the end the program reads w, and a by its names b and v (COPY_FROM let v name a).
    assert [event.value for event in trace.events if isinstance(event, Pin)] == [0, 1]
    assert keep_all_peak(trace) == 20
    released = [event.value for event in trace.events if isinstance(event, Release)]
    assert released == [1, 2, 3]


@pytest.mark.parametrize(
    ("line", "replacement", "field", "complaint"),
    [
        (6, '{"INSTRUCTION":"CALL"', "", "expected one JSON object"),
        (6, "[1]", "", "expected one JSON object, got [1]"),
        (6, '{"NAME":"w"}', "INSTRUCTION", "the field is missing"),
        (6, '{"INSTRUCTION":"JUMP"}', "INSTRUCTION", "got 'JUMP'"),
        (6, '{"INSTRUCTION":"RELEASE","NAME":"w"}', "INSTRUCTION", "expected MEMORY of w"),
        (6, '{"INSTRUCTION":"MEMORY","NAME":"u","MEMORY":"8"}', "NAME", "expected w, got 'u'"),
        (6, '{"INSTRUCTION":"MEMORY","NAME":"w","MEMORY":"-8"}', "MEMORY", "got '-8'"),
        (6, '{"INSTRUCTION":"MEMORY","NAME":"w","MEMORY":8}', "MEMORY", "expected text, got 8"),
        (9, '{"INSTRUCTION":"ALIAS","NAME":"a","ALIAS":"3"}', "ALIAS", "a position below 1"),
        (12, '{"INSTRUCTION":"COPY","DST":"b","SRC":"z"}', "SRC", "got 'z'"),
        (
            15,
            '{"INSTRUCTION":"MUTATE","NAME":"x","ARGS":["v"],"MUTATE":[1],"TIME":"7"}',
            "MUTATE",
            "positions of arguments, below 1",
        ),
        (15, '{"INSTRUCTION":"RELEASE","NAME":["b"]}', "NAME", "expected text"),
        (16, '{"INSTRUCTION":"CALL","NAME":"f","ARGS":[],"TIME":"1"}', "RESULT", "missing"),
    ],
)
def test_malformed_dtr_log_is_refused_with_line_and_field(
    line: int, replacement: str, field: str, complaint: str
) -> None:
    lines = LOG.splitlines()
    lines[line - 1] = replacement
    with pytest.raises(InvalidFile) as caught:
        dtr.read(lines)
    assert (caught.value.line, caught.value.field) == (line, field)
    assert complaint in str(caught.value)


def test_truncated_dtr_log_is_refused() -> None:
    with pytest.raises(InvalidFile, match="expected MEMORY of w, got the end"):
        dtr.read(LOG.splitlines()[:5])
    with pytest.raises(InvalidFile, match="a log of operators"):
        dtr.read([])


@given(trace=traces())
@examples(60)
def test_trace_is_equal_after_saving_in_native_format(trace: Trace) -> None:
    assert native.read(native.write(trace)) == trace


def test_chain_trace_is_equal_after_saving_as_dtr_log() -> None:
    trace = chain(5, nbytes=7, cost=3)
    last = Pin(ValueId(len(trace.values) - 1))
    kept = dataclasses.replace(trace, events=(*trace.events, last), name="chain")
    assert dtr.read(dtr.write(kept), "chain") == kept


def test_trace_that_dtr_log_cannot_hold_leaves_no_file(tmp_path: Path) -> None:
    builder = TraceBuilder()
    (x,) = builder.call("x", 1, (), [4])
    builder.use(x)
    with pytest.raises(Unsupported, match=r"a DTR log cannot hold Use\(value=0\)"):
        save(builder.build(), tmp_path / "x.log", as_format="dtr")
    assert not (tmp_path / "x.log").exists()


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_trace_format_is_recognized_by_content(tmp_path: Path, name: str) -> None:
    trace = chain(4)
    save(trace, tmp_path / name)
    assert load(tmp_path / name) == trace
    with_log_inside = tmp_path / f"log-{name}"
    with_log_inside.write_bytes(gzip.compress(LOG.encode()))
    assert load(with_log_inside).compute_ns == 12


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "expected a trace in the format"),
        (b"hello\n", "expected a trace in the format"),
        (b"\xff\xfe\n", "expected a trace .*got bytes"),
        (gzip.compress(LOG.encode(), mtime=0)[:40], "cut off"),
        (b"\x1f\x8bnonsense", "expected a gzip file"),
    ],
)
def test_file_in_no_trace_format_is_refused(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(InvalidFile, match=complaint) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}:1: ")


@pytest.mark.parametrize(
    ("line", "change", "complaint"),
    [
        (1, {"version": 2}, "version: expected 1, got 2"),
        (1, {"rekindle": "tail"}, 'rekindle: expected "trace"'),
        (2, {"cost": -1}, "cost: expected a whole number, not negative, got -1"),
        (2, {"out": [[0, 0]]}, "for a new storage"),
        (2, {"out": [[0]]}, "a list of 2 or 3 whole numbers"),
        (3, {"out": [[0, 1, 1]]}, "not made before"),
        (3, {"once": 1}, "once: expected true or false, got 1"),
        (-1, {"end": 2}, "the number of events before it"),
    ],
)
def test_malformed_native_trace_is_refused(line: int, change: dict, complaint: str) -> None:
    lines = list(native.write(chain(3)))
    at = line - 1 if line > 0 else len(lines) - 1
    lines[at] = json.dumps(json.loads(lines[at]) | change)
    with pytest.raises(InvalidFile) as caught:
        native.read(lines)
    assert caught.value.line == at + 1
    assert complaint in str(caught.value)


def test_truncated_or_invalid_native_trace_is_refused() -> None:
    lines = list(native.write(chain(3)))
    with pytest.raises(InvalidFile, match="it was cut off"):
        native.read(lines[:-1])
    with pytest.raises(InvalidFile, match="nothing after the end"):
        native.read([*lines, lines[1]])
    with pytest.raises(InvalidTrace, match="references-balance"):
        native.read([*lines[:-1], '{"release": 0}', '{"release": 0}', '{"end": 13}'])
