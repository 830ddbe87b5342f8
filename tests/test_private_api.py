"""Tests that docs/reference/private-api.md lists the private names of PyTorch that Rekindle uses.

The names are measured: imports and attributes in Python, includes and qualified names in C++, and
the symbols that the compiled core takes from PyTorch's libraries.
"""

from __future__ import annotations

import ast
import functools
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from rekindle import native
from rekindle.pytorch.context import _internals

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src" / "rekindle"
PAGE = ROOT / "docs" / "reference" / "private-api.md"

# Headers of PyTorch's documented C++ API.
PUBLIC_HEADERS = re.compile(
    r"torch/(library|version)\.h|c10/util/.*|ATen/ops/.*"
    r"|ATen/(Context|ExpandUtils|Parallel|ScalarOps)\.h"
    r"|ATen/core/(Generator|Tensor|enum_tag|ivalue|stack)\.h"
    r"|c10/core/(DefaultDtype|Device|DeviceGuard|DispatchKey|DispatchKeySet|Event|GradMode)\.h"
    r"|c10/core/(InferenceMode|SafePyObject|Scalar|ScalarType|Storage|Stream)\.h"
)
# Symbols of that API, and of inline functions in its headers.
PUBLIC_SYMBOLS = re.compile(
    r"(at::)?(_ops|Tensor|TensorBase|Generator|accelerator)::.*|(Library|CppFunction)::.*"
    r"|(Sym\w+|IValue|Device|Error|Warning|TypeError|ValueError|GradMode|InferenceMode)::.*"
    r"|(\w*Type|GeneratorImpl|OperatorHandle|SymbolicShapeMeta)::.*"
    r"|SmallVectorBase<.*|(Error|Type|ListType|DeviceTypeName|GetAllocator|TypeMeta::.*|caffe2::.*|operator<<.*)"
    r"|(infer_size|print|get_num_threads|set_num_threads|globalContext|getDtypeNames|warn)"
    r"|Warning(Handler|Utils::.*)"
    r"|(report_overflow|throwNullDataPtrError|typeKindToString|warnDeprecatedDataPtr)"
    r"|(get_default_dtype_as_scalartype|set_default_dtype|fallthrough_kernel)"
    r"|(ivalue::.*|impl::OperatorEntry::.*|initializeFunctionalityOffsetsAndMasks)"
    r"|detail::(torch\w+Fail|ListImpl::.*|infer_schema::.*|maybe_wrap_dim_slow<.*)"
    r"|detail::(get\w+Hooks|getDefaultCPUGenerator|scalar_tensor_static)|UndefinedTensorImpl::.*"
)
# Private names in Python's own library and in NumPy, and namespaces of operators.
OTHERS = {
    *("_asdict", "_bit_generator", "_bootstrap", "_bootstrap_inner", "_current_frames", "_exit"),
    *("_find_and_load", "_getframe", "_replace", "_utils", "_native", "_quantized", "_dtensor"),
    *("_c10d_functional", "_c10d_functional_autograd", "_op", "_torch"),
}


def short(name: str) -> str:
    """Return a C++ name without PyTorch's outer namespaces; a Python name stays as it is."""
    return re.sub(r"^((torch|at|c10)::)+", "", name)


def covered(name: str, entries: Iterable[str]) -> bool:
    """Return True if an entry is `name`, or the module, class or namespace that contains it."""
    return any(name == each or name.startswith((f"{each}.", f"{each}::")) for each in entries)


def attributes(package: Path) -> Iterator[str]:
    """Yield the private attributes, also as strings, that no code in `package` defines."""
    used, defined = set[str](), set[str]()
    for path in package.rglob("*.py"):
        defined.update((path.stem, path.parent.name))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                    defined.add(name)
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    defined.add(name)
                case ast.Name(id=name, ctx=ast.Store()):
                    defined.add(name)
                case ast.alias(name=name, asname=other):
                    defined.add(other or name)
                case ast.Attribute(attr=name) | ast.Constant(value=str(name)):
                    if re.fullmatch(r"_[a-zA-Z]\w+", name):
                        used.add(name)
                case _:
                    pass
    operators = {each.name.partition("::")[2] for each in torch._C._jit_get_all_schemas()}
    yield from used - defined - operators - OTHERS - sys.stdlib_module_names


def symbols(library: str) -> Iterator[str]:
    """Yield the names of PyTorch's symbols that a compiled extension takes from other libraries."""
    command = ["nm", "--dynamic", "--demangle", "--undefined-only", library]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for line in done.stdout.splitlines():
        kind, _, text = line.strip().partition(" ")
        found = re.match(
            r"(?:\w+ for |TLS init function for )*(?:\w+ )?((?:(?:torch|at|c10|caffe2)::|THP)\S*)",
            text.replace("[abi:cxx11]", ""),
        )
        if kind in "UwV" and found:
            yield short(found[1].partition("(")[0])


def is_module(name: str) -> bool:
    """Return True if PyTorch has a module of this name."""
    path = Path(torch.__path__[0], *name.split(".")[1:])
    return "." in name and (
        name in sys.modules or path.with_suffix(".py").exists() or path.is_dir()
    )


def measured_in_python() -> dict[str, str]:
    """Return the private Python names that Rekindle uses, each with the file that uses it."""
    found: dict[str, str] = {}
    for name, path in _internals.python_names():
        if not is_module(name):
            found.setdefault(name, str(path))
    return found


def measured_in_cpp() -> dict[str, str]:
    """Return the private C++ names and headers that the native core uses, each with its place."""
    found: dict[str, str] = {}
    sources = _internals.native_sources()
    for name, path in _internals.headers_used(sources):
        if not PUBLIC_HEADERS.fullmatch(name):
            found.setdefault(name, str(path))
    for name, path in _internals.cpp_names(sources):
        found.setdefault(short(name), str(path))
    core = native.torch_extension()
    assert core is not None, native.why_not(native.TORCH)
    if shutil.which("nm"):
        for name in symbols(str(core.__file__)):
            if not PUBLIC_SYMBOLS.fullmatch(name):
                found.setdefault(name, "the compiled core")
    return found


@dataclass(frozen=True)
class Row:
    """A row of a table of the page: names, folders, and checks."""

    names: tuple[str, ...]
    folders: tuple[str, ...]
    checks: str


def quoted(cell: str) -> tuple[str, ...]:
    """Return the texts in backticks."""
    return tuple(re.findall(r"`([^`]+)`", cell))


def rows(page: str) -> Iterator[Row]:
    """Yield the rows of the tables of the page."""
    for line in page.splitlines():
        if line.startswith("| `"):
            names, folders, _, checks = line.strip("| ").split(" | ")
            yield Row(quoted(names), quoted(folders), checks)


def missing(names: Iterable[str], page: str) -> list[str]:
    """Return the measured names that no row of the page covers."""
    entries = {short(name) for row in rows(page) for name in row.names}
    return sorted(name for name in names if not covered(short(name), entries))


def unused(page: str, names: Iterable[str]) -> Iterator[str]:
    """Yield the names on the page that are neither measured nor in a folder that their row names.

    Folders without any name of their row are yielded too.
    """
    taken = {short(name) for name in names}
    for row in rows(page):
        ends = {name: re.split(r"::|[.](?!h$)", name)[-1] for name in row.names}
        found = [words(folder) & {*ends.values()} for folder in row.folders]
        for name, end in ends.items():
            here = any(end in each for each in found)
            if not here and not any(covered(each, [short(name)]) for each in taken):
                yield name
        yield from (each for each, some in zip(row.folders, found, strict=True) if not some)


@functools.cache
def words(folder: str) -> frozenset[str]:
    """Return the words and the names of included headers in the sources of a folder."""
    paths = [
        path for path in (SOURCES / folder).rglob("*.*") if path.suffix in (".py", ".h", ".cpp")
    ]
    text = "".join(path.read_text(encoding="utf-8") for path in paths)
    return frozenset(re.findall(r"\w+", text) + re.findall(r"(?m)^#include <(.+)>", text))


def test_page_lists_each_private_python_name_that_code_uses() -> None:
    names = measured_in_python()
    assert {each: names[each] for each in missing(names, PAGE.read_text())} == {}


def test_page_lists_each_private_attribute_that_code_uses() -> None:
    found = {*attributes(SOURCES / "pytorch")}
    assert "_cdata" in found
    parts = {
        part for row in rows(PAGE.read_text()) for name in row.names for part in name.split(".")
    }
    assert sorted(found - parts) == []


def test_page_lists_each_private_cpp_name_that_core_uses() -> None:
    names = measured_in_cpp()
    assert "autograd::Engine::thread_main" in names  # from the compiled core
    assert {each: names[each] for each in missing(names, PAGE.read_text())} == {}


def test_each_private_name_on_page_is_used_in_its_folders() -> None:
    assert list(unused(PAGE.read_text(), measured_in_cpp())) == []


def test_each_row_of_private_names_says_which_check_fails() -> None:
    found = list(rows(PAGE.read_text()))
    assert len(found) > 30
    ways = re.compile(r"(compile|import)(; `tests/.*`)?|`tests/.*`")
    assert [row.names[0] for row in found if not ways.fullmatch(row.checks)] == []


def test_private_name_without_row_would_be_found() -> None:
    names = ["torch._C.TensorBase", "torch::autograd::Engine::execute", "at::impl::no_such_name"]
    assert missing(names, PAGE.read_text()) == ["at::impl::no_such_name"]


def test_row_of_unused_private_name_would_be_found() -> None:
    row = "| `torch._C._no_such_name`, `_cdata` | `pytorch/online`, `trace` | nothing | import |"
    assert list(unused(row, [])) == ["torch._C._no_such_name", "trace"]


def test_private_attribute_that_code_defines_is_not_measured(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(
        "class A:\n    def _own(self): return self._own, other._foreign, getattr(other, '_text')\n"
    )
    assert {*attributes(tmp_path)} == {"_foreign", "_text"}
