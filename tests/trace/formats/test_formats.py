"""Tests of every trace format: save and load, and errors with line and field."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given

from rekindle import InvalidFile, InvalidTrace
from rekindle.trace import Trace, chain
from rekindle.trace.formats import load, native, save
from tests.strategies import examples, traces


@given(trace=traces())
@examples(60)
def test_trace_is_equal_after_saving_in_native_format(trace: Trace) -> None:
    assert native.read(native.write(trace)) == trace


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_trace_format_is_recognized_by_content(tmp_path: Path, name: str) -> None:
    trace = chain(4)
    save(trace, tmp_path / name)
    assert load(tmp_path / name) == trace
    renamed = (tmp_path / name).rename(tmp_path / "step")
    assert load(renamed) == trace


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "expected a trace in the format"),
        (b"hello\n", "expected a trace in the format"),
        (b"\xff\xfe\n", "expected a trace .*got bytes"),
        (gzip.compress(b"{}" * 99, mtime=0)[:20], "cut off"),
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
