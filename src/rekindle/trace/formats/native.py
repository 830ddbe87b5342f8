"""Read and write the library's own trace format: JSON lines, one event each, in order.

The first line names format and version. The last line has the number of events, so that a truncated
file is noticed. A call contains its operator, and the size of each storage that it makes. Files are
read and written line by line. A valid trace that is written to a file and read again is equal to
the original.

    {"rekindle": "trace", "version": 1, "name": "example"}
    {"call": "relu", "cost": 5, "in": [0], "out": [[1, 1, 100]]}    value, storage, bytes
    {"call": "view", "cost": 1, "in": [1], "out": [[2, 1]]}         a view: no bytes
    {"release": 1}
    {"end": 3}
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from rekindle._errors import InvalidFile, InvalidTrace
from rekindle._types import Bytes, OpId, StorageId, ValueId
from rekindle.trace._model import Call, Drop, Event, Op, Pin, Release, Retain, Trace, Use
from rekindle.trace._rules import check_trace
from rekindle.trace.formats._fields import Line, read_lines, shown

NAME: Final = "native"
VERSION: Final = 1

_EVENTS: Final[Mapping[str, type[Use | Retain | Release | Drop | Pin]]] = {
    "use": Use,
    "retain": Retain,
    "release": Release,
    "drop": Drop,
    "pin": Pin,
}
_VERBS: Final = {event: verb for verb, event in _EVENTS.items()}


def recognizes(first_line: str) -> bool:
    return '"rekindle"' in first_line


def write(trace: Trace) -> Iterator[str]:
    """Yield the lines of a file, each with its line end."""
    yield _line({"rekindle": "trace", "version": VERSION, "name": trace.name})
    for event in trace.events:
        if isinstance(event, Call):
            yield _line(_written(trace, event))
        else:
            yield _line({_VERBS[type(event)]: event.value})
    yield _line({"end": len(trace.events)})


def _line(fields: dict[str, Any]) -> str:
    return json.dumps(fields, ensure_ascii=False) + "\n"


def _written(trace: Trace, call: Call) -> dict[str, Any]:
    """Return the fields of the JSON line that describes `call`."""
    op = trace.ops[call.op]
    fields: dict[str, Any] = {"call": op.name, "cost": op.cost, "in": op.inputs, "out": []}
    for value in op.outputs:
        storage = trace.values[value]
        made = (trace.storages[storage],) if trace.is_root(value) else ()
        fields["out"].append((value, storage, *made))
    if op.overwrites:
        fields["overwrites"] = op.overwrites
    if not op.replayable:
        fields["once"] = True
    if op.is_backward:
        fields["backward"] = True
    if op.workspace:
        fields["workspace"] = op.workspace
    if call.held:
        fields["held"] = True
    return fields


def read(texts: Iterable[str], name: str = "") -> Trace:
    """Read a trace from the lines of a file.

    Args:
        texts: The lines of the file.
        name: The name of the trace, unless the file contains one.

    Raises:
        InvalidFile: A line is wrong, or the file is truncated.
        InvalidTrace: The trace breaks a rule.
    """
    lines = read_lines(texts)
    name = _read_header(lines) or name
    reader = _Reader()
    for line in lines:
        if reader.ended:
            raise InvalidFile(line.number, "", "nothing after the end", shown(line.fields))
        reader.take(line)
    if not reader.ended:
        got = f"the end of the file after {len(reader.events)} events: it was cut off"
        raise InvalidFile(reader.last + 1, "end", '{"end": number of events}', got)
    return check_trace(reader.trace(name))


def _read_header(lines: Iterator[Line]) -> str:
    """Check the first line of the file and return the name of the trace."""
    header = next(lines, None)
    if header is None:
        raise InvalidFile(1, "rekindle", '{"rekindle": "trace", "version": 1}', "an empty file")
    if header.text("rekindle") != "trace":
        raise header.wrong("rekindle", '"trace"', header.fields["rekindle"])
    if header.amount("version") != VERSION:
        raise header.wrong("version", f"{VERSION}", header.fields["version"])
    return header.text("name") if "name" in header.fields else ""


class _Reader:
    """State while a file is read: the parts of the trace from the lines so far."""

    def __init__(self) -> None:
        self.storages: dict[int, Bytes] = {}
        self.values: dict[int, StorageId] = {}
        self.ops: list[Op] = []
        self.events: list[Event] = []
        self.ended = False
        self.last = 1  # the number of the last line read

    def take(self, line: Line) -> None:
        """Read one line: an event of the trace, or the end."""
        self.last = line.number
        if "call" in line.fields:
            self._call(line)
            return
        for verb, event in _EVENTS.items():
            if verb in line.fields:
                self.events.append(event(ValueId(line.amount(verb))))
                return
        if line.amount("end") != len(self.events):
            expected = f"{len(self.events)}, the number of events before it"
            raise line.wrong("end", expected, line.fields["end"])
        self.ended = True

    def _call(self, line: Line) -> None:
        inputs = tuple(ValueId(value) for value in line.amounts("in"))
        outputs = tuple(self._made(line, item) for item in line.items("out"))
        overwrites = tuple(
            (ValueId(output), ValueId(source))
            for output, source in (
                self._numbers(line, "overwrites", item, (2,))
                for item in line.items("overwrites", optional=True)
            )
        )
        op = Op(
            line.text("call"),
            line.amount("cost"),
            inputs,
            outputs,
            not line.flag("once"),
            overwrites,
            line.flag("backward"),
            line.amount("workspace") if "workspace" in line.fields else 0,
        )
        self.ops.append(op)
        self.events.append(Call(OpId(len(self.ops) - 1), line.flag("held")))

    def _made(self, line: Line, item: object) -> ValueId:
        """Read an output: [value, storage, bytes], or [value, storage] for a view."""
        value, storage, *nbytes = self._numbers(line, "out", item, (2, 3))
        if value in self.values:
            raise line.wrong("out", "a value that is not made before", value)
        if nbytes and storage in self.storages:
            raise line.wrong("out", "[value, storage], without a size, for a view", item)
        if not nbytes and storage not in self.storages:
            raise line.wrong("out", "[value, storage, bytes] for a new storage", item)
        if nbytes:
            self.storages[storage] = nbytes[0]
        self.values[value] = StorageId(storage)
        return ValueId(value)

    @staticmethod
    def _numbers(line: Line, field: str, item: object, lengths: tuple[int, ...]) -> list[int]:
        if not isinstance(item, list) or len(item) not in lengths:  # pyright: ignore[reportUnknownArgumentType]
            wanted = " or ".join(str(length) for length in lengths)
            raise line.wrong(field, f"a list of {wanted} whole numbers", item)  # pyright: ignore[reportUnknownArgumentType]
        return [line.as_amount(field, number) for number in item]  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]

    def trace(self, name: str) -> Trace:
        """Return the trace. Raise `InvalidTrace` if an id is missing; check no other rule."""
        for kind, ids in (("value", self.values), ("storage", self.storages)):
            if ids and len(ids) != max(ids) + 1:
                missing = next(i for i in range(max(ids)) if i not in ids)
                raise InvalidTrace("ids-exist", f"{kind} {missing} is never made")
        return Trace(
            tuple(self.storages[storage] for storage in range(len(self.storages))),
            tuple(self.values[value] for value in range(len(self.values))),
            tuple(self.ops),
            tuple(self.events),
            name,
        )
