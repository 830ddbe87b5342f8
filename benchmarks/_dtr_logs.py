"""Read the operator logs of the DTR paper (Kirisame et al., ICLR 2021, arXiv 2006.09616).

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

import gzip
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rekindle._errors import InvalidFile
from rekindle._types import ValueId
from rekindle.trace import Trace, TraceBuilder
from rekindle.trace.formats._fields import Line, read_lines


def load(path: Path) -> Trace:
    """Read the trace of a log, which is gzipped. Its name is that of the file."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return read(lines, path.name.partition(".")[0])


def logs_in(folder: Path) -> list[Path]:
    """Return the logs in a folder, the smallest file first."""
    return sorted(folder.glob("*.log.gz"), key=lambda path: path.stat().st_size)


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
        results = _texts(line, "RESULT")
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
            self.names[_texts(line, "ARGS")[position]] = after
            self._let_go(before)

    def _rebind(self, line: Line) -> None:
        """Handle COPY_FROM: the name DST refers to the value of SRC from now on."""
        source, old = self._value(line, "SRC"), self._value(line, "DST")
        self._name(line, "DST", source)
        self._let_go(old)

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
        for argument in _texts(line, "ARGS"):
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


def _texts(line: Line, field: str) -> list[str]:
    for item in line.items(field):
        if not isinstance(item, str):
            raise line.wrong(field, "a list of texts", item)
    return line.items(field)


def _number(line: Line, field: str, least: int = 0) -> int:
    text = line.text(field)
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise line.wrong(field, f"a whole number in quotes, at least {least}", text)
    return number
