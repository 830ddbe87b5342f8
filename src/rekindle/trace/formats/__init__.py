"""Traces in files: one module a format."""

from __future__ import annotations

from pathlib import Path

from rekindle.trace._model import Trace
from rekindle.trace.formats import checkmate


def load(path: str | Path) -> Trace:
    """The trace in a file; raises `InvalidTrace` where the content breaks a rule."""
    path = Path(path)
    with path.open(encoding="utf-8") as lines:
        return checkmate.read(lines, path.name.partition(".")[0])
