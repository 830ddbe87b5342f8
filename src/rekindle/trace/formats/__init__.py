"""Read and write traces in files. Each module of this package handles one format.

`load` recognizes the format by the first line of the file, and gzip by its first bytes. `save`
compresses files whose name ends in `.gz`.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Final

from rekindle._errors import InvalidFile
from rekindle._files import what_is
from rekindle.trace._model import Trace
from rekindle.trace.formats import checkmate, native

# Each module defines NAME, recognizes(first line), read(lines, name) and write(trace) -> lines.
FORMATS: Final[tuple[ModuleType, ...]] = (native, checkmate)
_KNOWN: Final = " or ".join(module.NAME for module in FORMATS)
_GZIP: Final = b"\x1f\x8b"


def load(path: str | Path) -> Trace:
    """Read a trace from a file of any known format, gzipped or not.

    Args:
        path: The path of the file.

    Raises:
        InvalidFile: The file is not a trace; the error names the line and the field.
        InvalidTrace: The trace breaks a rule.
    """
    path = Path(path)
    name = path.name.partition(".")[0]
    try:
        with _lines(path) as lines:
            return _read(lines, name)
    except InvalidFile as error:
        raise error.at(str(path)) from None
    except UnicodeDecodeError:
        raise InvalidFile(
            1, "", f"a trace in the format {_KNOWN}", what_is(path), path=str(path)
        ) from None
    except (EOFError, zlib.error, gzip.BadGzipFile):
        message = "a damaged one: it was cut off"
        raise InvalidFile(1, "", "a gzip file", message, path=str(path)) from None


def save(trace: Trace, path: str | Path, *, as_format: str = native.NAME) -> None:
    """Write a trace to a file, gzipped if its name ends in `.gz`.

    Args:
        trace: The recorded program: operators, storages and events.
        path: The path of the file.
        as_format: "native" or "checkmate".

    Raises:
        Unsupported: The format cannot hold the trace; no file is written.
    """
    (chosen,) = (module for module in FORMATS if as_format == module.NAME)
    # Format the whole trace once before the file is opened, so that an error leaves no partial
    # file.
    for _ in chosen.write(trace):
        pass
    path = Path(path)
    with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as file:
        file.writelines(chosen.write(trace))


@contextmanager
def _lines(path: Path) -> Generator[Iterator[str]]:
    """Open a file as lines of text, decompressed if it is gzipped."""
    with path.open("rb") as file:
        start = file.read(2)
        file.seek(0)
        stream = gzip.GzipFile(fileobj=file) if start == _GZIP else file
        with io.TextIOWrapper(stream, encoding="utf-8") as lines:  # type: ignore[arg-type]
            yield lines


def _read(lines: Iterator[str], name: str) -> Trace:
    """Read a trace in the format that recognizes the first line."""
    first = next(lines, "")
    for module in FORMATS:
        if module.recognizes(first):
            return module.read(_again(first, lines), name)
    got = repr(first.strip()[:40]) if first.strip() else "an empty line or file"
    # The file is a report, written by `Report.to_json`.
    if '"rekindle report"' in first + next(lines, ""):
        got = "a report, which `rekindle report` shows: `rekindle capture` writes traces"
    raise InvalidFile(1, "", f"a trace in the format {_KNOWN}", got)


def _again(first: str, rest: Iterator[str]) -> Iterator[str]:
    yield first
    yield from rest
