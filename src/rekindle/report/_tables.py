"""Shorten the tables of a report.

Rows of modules whose paths differ only in a number become one row, with the sum of their values.
Paths of files are shortened.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping

from rekindle._types import Bytes
from rekindle.report._data import Recomputed


def by_kind(modules: Mapping[str, Bytes]) -> dict[str, Bytes]:
    """Add up the bytes of modules whose paths differ only in a number.

    Returns:
        Bytes by common path, such as "GPT.blocks.*.out (12)" for twelve modules, the largest first.
    """
    sums: Counter[str] = Counter()
    members: Counter[str] = Counter()
    for module, nbytes in modules.items():
        sums[_kind(module)] += nbytes
        members[_kind(module)] += 1
    return {_counted(kind, members[kind]): nbytes for kind, nbytes in sums.most_common()}


def recomputed_by_kind(rows: Iterable[Recomputed]) -> list[Recomputed]:
    """Add up recomputed operators of modules whose paths differ only in a number.

    The entry with the longest time comes first.
    """
    times: Counter[tuple[str, str]] = Counter()
    spent: Counter[tuple[str, str]] = Counter()
    for row in rows:
        kind = (_kind(row.module), row.operator)
        times[kind] += row.times
        spent[kind] += row.ns
    return [Recomputed(*kind, times[kind], ns) for kind, ns in spent.most_common()]


def short_path(line: str) -> str:
    """Return a "file:line" relative to the working directory, if the file is in that directory."""
    return line.removeprefix(os.path.join(os.getcwd(), ""))


def short_paths(lines: Mapping[str, Bytes]) -> dict[str, Bytes]:
    """Shorten the paths of all source lines.

    Paths in the working directory become relative to it. The other paths lose the directory that
    they have in common.
    """
    shown = {short_path(line): nbytes for line, nbytes in lines.items()}
    folders = [os.path.dirname(_place(line)) for line in shown if os.path.isabs(line)]
    common = os.path.commonpath(folders) if folders else ""
    return {
        os.path.relpath(_place(line), common) + line[len(_place(line)) :]
        if os.path.isabs(line)
        else line: nbytes
        for line, nbytes in shown.items()
    }


def _place(line: str) -> str:
    """Return the user's part of a source line: the library's line may follow in parentheses."""
    return line.partition(" (")[0]


def _kind(module: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module)


def _counted(kind: str, members: int) -> str:
    return f"{kind} ({members})" if members > 1 else kind
