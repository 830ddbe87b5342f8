"""Read and write the operator logs of the DTR paper (Kirisame et al., ICLR 2021, arXiv 2006.09616).

The authors' prototype wrote one JSON object (an instruction) on each line, with all numbers as
text. A name stands for a tensor of the program and refers to a value; several names may refer to
one value. Sizes are in bytes, times in ns. The authors' simulator reads the instructions as
follows, and so does this module:

CONSTANT, MEMORY  a source, and the bytes of its storage. Sources cannot be recomputed.
CALL              an operator; MEMORY and ALIAS follow for each result. ALIAS is the position of the
                  argument of which the result is a view, or "-1" if it has a storage of its own.
MUTATE            an operator that the prototype ran on copies of its arguments. Each argument that
                  it changes gets a new storage of the same size. The name used for the argument
                  then refers to the new value; other names still refer to the old one.
COPY              one more name for a value. COPY_FROM: an existing name gets the value of another.
RELEASE           a name is no longer used.
ANNOTATE          START: instructions before it are not part of the program. BACKWARD: the backward
                  pass begins.

*Output condition*: the values that still have a name at the end of a log (gradients, weights) must
be in memory at the end. So the trace ends with a pin event for each of them, in the order in which
their names first appeared.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from rekindle._errors import InvalidFile, Unsupported
from rekindle._types import ValueId
from rekindle.trace._builder import TraceBuilder
from rekindle.trace._model import Call, Op, Pin, Release, Retain, Trace
from rekindle.trace.formats._fields import Line, read_lines

NAME: Final = "dtr"


def recognizes(first_line: str) -> bool:
    return '"INSTRUCTION"' in first_line


def read(texts: Iterable[str], name: str = "") -> Trace:
    """Read a trace from the lines of a log.

    Args:
        texts: The lines of the file.
        name: The name of the trace.

    Raises:
        InvalidFile: A line is wrong.
    """
    lines = read_lines(texts)
    reader = _Reader(name)
    last = 0
    for line in lines:
        last = line.number
        reader.take(line, lines)
    if not last:
        raise InvalidFile(1, "INSTRUCTION", "a log of operators", "an empty file")
    return reader.finish()


class _Reader:
    """State while a log is read: the trace so far, and the value of each name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.started = False
        self.builder = TraceBuilder(name)
        self.sizes: dict[ValueId, int] = {}  # bytes of the storage of each value
        self.names: dict[str, ValueId] = {}
        self.references: dict[ValueId, int] = {}
        self.backward = False

    def take(self, line: Line, rest: Iterator[Line]) -> None:
        """Read the instruction on `line`, and from `rest` further lines that belong to it."""
        kind = line.text("INSTRUCTION")
        match kind:
            case "ANNOTATE":
                self._annotate(line)
            case "CONSTANT":
                self._constant(line, rest)
            case "CALL":
                self._call(line, rest)
            case "MUTATE":
                self._mutate(line)
            case "COPY":
                self._name(line, "DST", self._value(line, "SRC"))
            case "COPY_FROM":
                self._rebind(line)
            case "RELEASE":
                self._release(line)
            case _:
                expected = "ANNOTATE, CONSTANT, CALL, MUTATE, COPY, COPY_FROM or RELEASE"
                raise line.wrong("INSTRUCTION", expected, kind)

    def finish(self) -> Trace:
        """Pin the outputs of the program, the values that still have names; return the trace."""
        for value in dict.fromkeys(self.names.values()):
            if self.references[value]:
                self.builder.pin(value)
        return self.builder.build()

    def _annotate(self, line: Line) -> None:
        """Handle an ANNOTATE line. The first START discards everything that was read before it."""
        annotation = line.text("ANNOTATION")
        if annotation == "START" and not self.started:
            self.__init__(self.name)
            self.started = True
        self.backward = self.backward or annotation == "BACKWARD"

    def _constant(self, line: Line, rest: Iterator[Line]) -> None:
        nbytes = self._memory(line, rest, line.text("NAME"))
        value = self.builder.source(nbytes, "constant")
        self.sizes[value] = nbytes
        self._name(line, "NAME", value, first=True)

    def _call(self, line: Line, rest: Iterator[Line]) -> None:
        arguments = self._arguments(line)
        sizes: list[int] = []
        aliases: list[ValueId | None] = []
        results = line.texts("RESULT")
        for result in results:
            sizes.append(self._memory(line, rest, result))
            aliases.append(self._alias(line, rest, result, arguments))
        outputs = self.builder.call(
            line.text("NAME"),
            _number(line, "TIME"),
            arguments,
            sizes,
            aliases=aliases,
            is_backward=self._is_backward(line),
        )
        for result, value, nbytes, base in zip(results, outputs, sizes, aliases, strict=True):
            self.sizes[value] = nbytes if base is None else self.sizes[base]
            self.names[result] = value
            self.references[value] = 1

    def _mutate(self, line: Line) -> None:
        arguments = self._arguments(line)
        positions = line.amounts("MUTATE")
        for position in positions:
            if position >= len(arguments):
                raise line.wrong(
                    "MUTATE", f"positions of arguments, below {len(arguments)}", position
                )
        old = [arguments[position] for position in positions]
        outputs = self.builder.call(
            line.text("NAME"),
            _number(line, "TIME"),
            arguments,
            [self.sizes[value] for value in old],
            is_backward=self._is_backward(line),
        )
        for position, before, after in zip(positions, old, outputs, strict=True):
            self.sizes[after] = self.sizes[before]
            self.references[after] = 1
            self.names[line.texts("ARGS")[position]] = after
            self._let_go(before)

    def _rebind(self, line: Line) -> None:
        """Handle COPY_FROM: the name DST refers to the value of SRC from now on."""
        source, old = self._value(line, "SRC"), self._value(line, "DST")
        self._let_go(old)
        self._name(line, "DST", source)

    def _release(self, line: Line) -> None:
        name = line.text("NAME")
        if name not in self.names and self.started:
            return  # A name from before START is not part of the program.
        value = self._value(line, "NAME")
        if not self.references[value]:
            raise line.wrong("NAME", "a name whose value was not released before", name)
        self._let_go(value)

    def _name(self, line: Line, field: str, value: ValueId, *, first: bool = False) -> None:
        """Let a name refer to `value` from now on, and add a reference to the value."""
        self.names[line.text(field)] = value
        if first:
            self.references[value] = 1
            return
        if not self.references[value]:
            raise line.wrong(
                "SRC", "a name whose value was not released before", line.fields["SRC"]
            )
        self.references[value] += 1
        self.builder.retain(value)

    def _let_go(self, value: ValueId) -> None:
        """Release one reference of the program to `value`."""
        self.references[value] -= 1
        self.builder.release(value)

    def _value(self, line: Line, field: str) -> ValueId:
        name = line.text(field)
        if name not in self.names:
            raise line.wrong(field, "a name that appeared before", name)
        return self.names[name]

    def _arguments(self, line: Line) -> list[ValueId]:
        arguments: list[ValueId] = []
        for argument in line.texts("ARGS"):
            if argument not in self.names:
                raise line.wrong("ARGS", "names that appeared before", argument)
            arguments.append(self.names[argument])
        return arguments

    def _is_backward(self, line: Line) -> bool:
        return self.backward or "backward" in line.text("NAME")

    def _memory(self, line: Line, rest: Iterator[Line], name: str) -> int:
        return _number(_following(line, rest, "MEMORY", name), "MEMORY")

    def _alias(
        self, line: Line, rest: Iterator[Line], name: str, arguments: Sequence[ValueId]
    ) -> ValueId | None:
        following = _following(line, rest, "ALIAS", name)
        position = _number(following, "ALIAS", least=-1)
        if position >= len(arguments):
            raise following.wrong("ALIAS", f"-1 or a position below {len(arguments)}", position)
        return None if position < 0 else arguments[position]


def _following(line: Line, rest: Iterator[Line], kind: str, name: str) -> Line:
    """Return the line after `line`: it must have the instruction `kind` and the name `name`."""
    following = next(rest, None)
    if following is None:
        raise InvalidFile(line.number + 1, "INSTRUCTION", f"{kind} of {name}", "the end")
    if following.text("INSTRUCTION") != kind:
        got = following.fields["INSTRUCTION"]
        raise following.wrong("INSTRUCTION", f"{kind} of {name}", got)
    if following.text("NAME") != name:
        raise following.wrong("NAME", name, following.fields["NAME"])
    return following


def _number(line: Line, field: str, least: int = 0) -> int:
    text = line.text(field)
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise line.wrong(field, f"a whole number in quotes, at least {least}", text)
    return number


def write(trace: Trace) -> Iterator[str]:
    """Yield the lines of a log, each with its line end.

    Args:
        trace: The recorded program: operators, storages and events.

    Raises:
        Unsupported: A log cannot express the trace. Logs have no user-held values, no in-place
            writes, and no pins before the end.
    """
    yield _line(INSTRUCTION="ANNOTATE", ANNOTATION="START")
    writer = _Writer(trace)
    for position in range(len(trace.events)):
        yield from writer.event(position)
    writer.check_outputs()


def _line(**fields: object) -> str:
    return json.dumps(fields, separators=(",", ":")) + "\n"


class _Writer:
    """State while a trace is written as a log: the names that values have got so far."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.count = 0
        # all names in order of appearance, each with its value
        self.names: dict[str, ValueId] = {}
        self.live: dict[ValueId, list[str]] = {}
        self.backward = False
        self.pins: list[ValueId] = []
        self.renamed: set[int] = set()  # positions of release events that a MUTATE line replaces

    def event(self, position: int) -> Iterator[str]:
        """Yield the lines for the event at `position` of the trace."""
        event = self.trace.events[position]
        match event:
            case Call(op_id, held):
                op = self.trace.ops[op_id]
                if held or op.overwrites or (op.inputs and not op.replayable):
                    raise Unsupported(
                        f"a DTR log cannot hold op {op_id} ({op.name}): the op is user-held, "
                        "overwrites memory, or cannot be recomputed; save the trace as .jsonl "
                        "instead"
                    )
                if not op.replayable and (op.cost or len(op.outputs) != 1):
                    raise Unsupported(
                        f"a DTR log cannot hold op {op_id} ({op.name}): an op that cannot be "
                        "recomputed must have one output and cost 0; save the trace as .jsonl "
                        "instead"
                    )
                yield from self._call(op, position)
            case Retain(value):
                yield _line(INSTRUCTION="COPY", SRC=self.live[value][0], DST=self._new_name(value))
            case Release(value):
                if position not in self.renamed:
                    yield _line(INSTRUCTION="RELEASE", NAME=self.live[value].pop())
            case Pin(value):
                self.pins.append(value)
            case _:
                raise Unsupported(
                    f"a DTR log cannot hold {event}; save the trace as .jsonl instead"
                )
        if self.pins and not isinstance(event, Pin):
            raise Unsupported(
                "a DTR log can pin values only at its end, but in this trace another event follows "
                "a pin; save the trace as .jsonl instead"
            )

    def check_outputs(self) -> None:
        """Raise `Unsupported` if the trace pins other values than those that the log would pin.

        A log has no pins. Its reader pins the values that still have a name at the end.
        """
        outputs = [v for v in dict.fromkeys(self.names.values()) if self.live.get(v)]
        if outputs != self.pins:
            raise Unsupported(
                "a DTR log pins exactly the values that still have references at its end, in the "
                "order in which their names appeared, but this trace pins other values, or the "
                "same values in another order; save the trace as .jsonl instead"
            )

    def _new_name(self, value: ValueId) -> str:
        name = f"x{self.count}"
        self.count += 1
        self.names[name] = value
        self.live.setdefault(value, []).append(name)
        return name

    def _call(self, op: Op, position: int) -> Iterator[str]:
        """Yield the lines of a call: CONSTANT, MUTATE or CALL."""
        if op.is_backward and not self.backward and "backward" not in op.name:
            self.backward = True
            yield _line(INSTRUCTION="ANNOTATE", ANNOTATION="BACKWARD")
        if not op.replayable:
            name = self._new_name(op.outputs[0])
            yield _line(INSTRUCTION="CONSTANT", NAME=name)
            yield self._memory(name, op.outputs[0])
            return
        arguments = [self._argument(value) for value in op.inputs]
        fields = {"NAME": op.name, "ARGS": arguments, "TIME": str(op.cost)}
        mutated = self._mutated(op, position)
        if mutated:
            yield _line(INSTRUCTION="MUTATE", **fields, MUTATE=mutated)
            for value, argument in zip(op.outputs, mutated, strict=True):
                name = arguments[argument]
                self.names[name] = value
                self.live[op.inputs[argument]].remove(name)
                self.live[value] = [name]
            self.renamed.update(range(position + 1, position + 1 + len(mutated)))
            return
        results = [self._new_name(value) for value in op.outputs]
        yield _line(INSTRUCTION="CALL", **fields, RESULT=results)
        for name, value in zip(results, op.outputs, strict=True):
            yield self._memory(name, value)
            yield _line(INSTRUCTION="ALIAS", NAME=name, ALIAS=str(self._alias(op, value)))

    def _argument(self, value: ValueId) -> str:
        if not self.live.get(value):
            raise Unsupported(
                f"a DTR log cannot hold a call that reads value {value}, which the program no "
                "longer holds; save the trace as .jsonl instead"
            )
        return self.live[value][0]

    def _memory(self, name: str, value: ValueId) -> str:
        nbytes = self.trace.storages[self.trace.values[value]]
        return _line(INSTRUCTION="MEMORY", NAME=name, MEMORY=str(nbytes))

    def _alias(self, op: Op, value: ValueId) -> int:
        storage = self.trace.values[value]
        if self.trace.is_root(value):
            return -1
        return next(i for i, v in enumerate(op.inputs) if self.trace.values[v] == storage)

    def _mutated(self, op: Op, position: int) -> list[int]:
        """Return the positions of the arguments that outputs replace, if MUTATE can express `op`.

        It can if each output is as large as an argument that is released right after the call. Then
        the argument's name refers to the output. Otherwise the list is empty.
        """
        following = self.trace.events[position + 1 : position + 1 + len(op.outputs)]
        old = [event.value for event in following if isinstance(event, Release)]
        if not op.outputs or len(old) != len(op.outputs) or len(set(old)) != len(old):
            return []
        for value, before in zip(op.outputs, old, strict=True):
            sizes = {self.trace.storages[self.trace.values[v]] for v in (value, before)}
            if before not in op.inputs or len(sizes) != 1 or not self.trace.is_root(value):
                return []
        return [op.inputs.index(before) for before in old]
