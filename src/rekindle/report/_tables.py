"""Tables made short: modules that differ in a number only are one row."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping

from rekindle._types import Bytes
from rekindle.report._data import Recomputed


def by_kind(modules: Mapping[str, Bytes]) -> dict[str, Bytes]:
    """Bytes by module, those of like modules added: "GPT.blocks.*.out (12)"; the most first."""
    sums: Counter[str] = Counter()
    members: Counter[str] = Counter()
    for module, nbytes in modules.items():
        sums[_kind(module)] += nbytes
        members[_kind(module)] += 1
    return {_counted(kind, members[kind]): nbytes for kind, nbytes in sums.most_common()}


def recomputed_by_kind(rows: Iterable[Recomputed]) -> list[Recomputed]:
    """The same for what was recomputed; the most time first."""
    times: Counter[tuple[str, str]] = Counter()
    spent: Counter[tuple[str, str]] = Counter()
    for row in rows:
        kind = (_kind(row.module), row.operator)
        times[kind] += row.times
        spent[kind] += row.ns
    return [Recomputed(*kind, times[kind], ns) for kind, ns in spent.most_common()]


def short_path(line: str) -> str:
    """A "file:line" as seen from the folder that the program runs in."""
    return line.removeprefix(os.path.join(os.getcwd(), ""))


def short_paths(lines: Mapping[str, Bytes]) -> dict[str, Bytes]:
    """The same for all; those elsewhere without the folder that they have in common."""
    shown = {short_path(line): nbytes for line, nbytes in lines.items()}
    folders = [os.path.dirname(line) for line in shown if os.path.isabs(line)]
    common = os.path.commonpath(folders) if folders else ""
    return {
        os.path.relpath(line, common) if os.path.isabs(line) else line: nbytes
        for line, nbytes in shown.items()
    }


def _kind(module: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module)


def _counted(kind: str, members: int) -> str:
    return f"{kind} ({members})" if members > 1 else kind
