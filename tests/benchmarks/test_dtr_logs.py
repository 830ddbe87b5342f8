"""Tests of the reader of the DTR paper's operator logs."""

from __future__ import annotations

import pytest
from _dtr_logs import read

from rekindle import InvalidFile
from rekindle.trace import Pin, Release, keep_all_peak

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
    trace = read(LOG.splitlines())
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
        read(lines)
    assert (caught.value.line, caught.value.field) == (line, field)
    assert complaint in str(caught.value)


def test_truncated_dtr_log_is_refused() -> None:
    with pytest.raises(InvalidFile, match="expected MEMORY of w, got the end"):
        read(LOG.splitlines()[:5])
    with pytest.raises(InvalidFile, match="a log of operators"):
        read([])
