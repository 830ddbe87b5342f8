"""Find the private names of PyTorch that Rekindle uses, and those that this PyTorch does not have.

Names come from Rekindle's own sources: imports and attributes in Python, includes and qualified
names in C++. So no list can become outdated. The search imports no module of PyTorch that is not
loaded. Attributes of objects (`tensor._version`) need an object, and are not looked for. Callers
are `rekindle doctor` and the test of docs/reference/private-api.md.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch

_PACKAGE: Final = Path(__file__).parents[2]
_TORCH: Final = Path(torch.__path__[0])
# The folders of PyTorch's headers that the native core is compiled with.
_INCLUDE: Final = (
    _TORCH / "include",
    _TORCH / "include" / "torch" / "csrc" / "api" / "include",
)
# Namespaces of PyTorch's C++ code that its documentation does not describe, as sources name them.
_QUALIFIED: Final = re.compile(
    r"(?<!:)\b(?:(?:torch|at|c10)::)*((?:autograd|autocast|impl|detail)::(?:\w+::)*[a-zA-Z]\w+)"
)
# Code for some versions of PyTorch only.
_CONDITIONAL: Final = re.compile(
    r"^#if(?:def)? (?:REKINDLE_\w+|__has_include\(.*?\))$.*?^#endif$", re.MULTILINE | re.DOTALL
)


@functools.cache
def missing_names() -> tuple[str, ...]:
    """Return the private names that the sources use and this PyTorch does not have.

    Returns:
        Each name or header, with the file that uses it, sorted.
    """
    python = ((name, path) for name, path in python_names() if not _exists(name))
    sources = [(path, _CONDITIONAL.sub("", text)) for path, text in native_sources()]
    headers = ((name, path) for name, path in headers_used(sources) if not _header(name))
    words = _words_of_headers(sources)
    cpp = ((n, path) for n, path in cpp_names(sources) if n.rpartition("::")[2] not in words)
    first: dict[str, str] = {}
    for name, path in (*python, *headers, *cpp):
        first.setdefault(name, path.relative_to(_PACKAGE).as_posix())
    return tuple(f"{name} (used in {path})" for name, path in sorted(first.items()))


def python_names() -> Iterator[tuple[str, Path]]:
    """Yield each dotted name below `torch` with a private part, and the file that uses it.

    Operators (`torch.ops`) are not private, whatever their names. Names end at a module `config`,
    which takes its attributes from elsewhere.
    """
    for path in sorted(_PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        names = {
            re.sub(r"(\.config)\..*", r"\1", name)
            for name in (_names_in(ast.parse(text)) if "torch" in text else ())
        }
        for name in sorted(names):
            parts = name.split(".")
            private = any(part[0] == "_" and part[:2] != "__" for part in parts)
            if private and parts[1] != "ops":
                yield name, path


def native_sources() -> list[tuple[Path, str]]:
    """Return the C++ files of the native core, and their text without comments."""
    return [
        (path, re.sub(r"//[^\n]*", "", path.read_text(encoding="utf-8")))
        for path in sorted((_PACKAGE / "native").rglob("*"))
        if path.suffix in (".h", ".cpp")
    ]


def headers_used(sources: Sequence[tuple[Path, str]]) -> Iterator[tuple[str, Path]]:
    """Yield each header of PyTorch that `sources` include, and the file that includes it."""
    for path, text in sources:
        for name in re.findall(r"^#include <((?:torch|ATen|c10)/.+)>", text, re.MULTILINE):
            yield name, path


def cpp_names(sources: Sequence[tuple[Path, str]]) -> Iterator[tuple[str, Path]]:
    """Yield each name from an undocumented namespace of PyTorch, and the C++ file that uses it."""
    for path, text in sources:
        for name in _QUALIFIED.findall(text):
            yield name, path


def _header(name: str) -> Path | None:
    """Return the path of a header of PyTorch, or None if there is none of this name."""
    return next((each / name for each in _INCLUDE if (each / name).is_file()), None)


def _words_of_headers(sources: Sequence[tuple[Path, str]]) -> frozenset[str]:
    """Return the words of the included headers and, except in ATen, of those in their folders."""
    used = {_header(name) for name, _ in headers_used(sources) if not name.startswith("ATen/ops/")}
    files = {path for path in used if path is not None}
    for folder in {path.parent for path in files}:
        if folder.name != "ATen":  # its largest headers declare operators
            files.update(folder.glob("*.h"))
    words: set[str] = set()
    for path in files:
        words.update(re.findall(r"\w+", path.read_text(encoding="utf-8", errors="replace")))
    return frozenset(words)


def _names_in(tree: ast.Module) -> Iterator[str]:
    """Yield the full name of each import from torch and each attribute chain that begins there."""
    nodes = list(ast.walk(tree))
    bound = dict(_imported(nodes))
    yield from (name for name in bound.values() if name != "torch")
    for node in nodes:  # `_C: Any = torch._C`
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.Attribute() as value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.Attribute() as value)
            ):
                if full := _full_name(value, bound):
                    bound[name] = full
            case _:
                pass
    for node in nodes:
        if isinstance(node, ast.Attribute) and (full := _full_name(node, bound)):
            yield full


def _imported(nodes: Sequence[ast.AST]) -> Iterator[tuple[str, str]]:
    """Yield each local name that an import binds to something of torch, and its full name."""
    for node in nodes:
        match node:
            case ast.Import(names=names):
                for alias in names:
                    if alias.name.partition(".")[0] == "torch":
                        yield (alias.asname, alias.name) if alias.asname else ("torch", "torch")
            case ast.ImportFrom(module=str(module), names=names, level=0):
                for alias in names:
                    if module.partition(".")[0] == "torch":
                        yield alias.asname or alias.name, f"{module}.{alias.name}"
            case _:
                pass


def _full_name(node: ast.Attribute, bound: dict[str, str]) -> str:
    """Return the full name of an attribute chain that begins at a name in `bound`, or ""."""
    parts: list[str] = []
    value: ast.expr = node
    while isinstance(value, ast.Attribute):
        parts.append(value.attr)
        value = value.value
    if not isinstance(value, ast.Name) or value.id not in bound:
        return ""
    return ".".join([bound[value.id], *reversed(parts)])


def _exists(name: str) -> bool:
    """Return True if this PyTorch has `name`, without an import.

    An attribute of a module that is not loaded exists if its source names it.
    """
    found: Any = torch
    source, latest = _TORCH, ""
    for count, part in enumerate(name.split(".")[1:], 2):
        source /= part
        module = sys.modules.get(".".join(name.split(".")[:count]))
        if module is not None:
            found = module
        elif found is not None and _has(found, part):
            found = getattr(found, part)
        elif text := _source_of(source):
            found, latest = None, text
        elif found is None:
            return re.search(rf"\b{part}\b", latest) is not None
        else:
            return False
    return True


def _has(found: Any, part: str) -> bool:
    # Modules of PyTorch import some of their attributes when these are first read.
    return part in vars(found) if isinstance(found, ModuleType) else hasattr(found, part)


def _source_of(module: Path) -> str:
    """Return the source of the module at a path without suffix, or "" if there is none."""
    for path in (module.with_suffix(".py"), module / "__init__.py"):
        if path.is_file():
            return path.read_text(encoding="utf-8")
    return ""
