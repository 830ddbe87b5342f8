"""Tests of the rules of the C++ sources: includes, small files, folders and classes, words.

As in test_architecture, each rule runs on the real tree, and on small trees with a planted fault.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.cpp_classes import members_of_classes

ROOT = Path(__file__).parents[1]
NATIVE = ROOT / "src" / "rekindle" / "native"
MOST_LINES = 800
MOST_FILES = 30  # in one folder
MOST_MEMBERS = 40  # functions and fields of one class

# Folders, classes and circles of includes that are larger than that. The lists may only shrink:
# lower a number when a class or folder gets smaller, and remove what is small enough.
LARGE_FOLDERS = {"engine": 38, "torch": 42}
LARGE_CLASSES = {
    "engine/ledger.h: Ledger": 117,
    "dispatch/operation.h: Operation": 104,
    "engine/engine.h: Engine": 62,
    "engine/exact.h: Exact": 48,
    "replay/player.h: Player": 47,
    "engine/scored.h: ScoredChooser": 45,
    "memory/held/held_eviction.h: HeldEviction": 42,
    "steps/learner.h: Learner": 44,
    "torch/device.h: Device": 43,
    "memory/records/storage_record.h: StorageRecord": 41,
}
CIRCLES = (
    {"dispatch/effects", "dispatch/operation", "dispatch/trial"},
    {"dispatch/runtime", "dispatch/typed_kernels"},
    {"engine/exact", "engine/neighborhood"},
    {"ops/operator_call", "ops/parsed_call", "ops/signature", "ops/sizes"},
    {"torch/geometry", "torch/storage_ptr"},
)

# The folders ("rooms") of the core, lowest first: each may include itself and the folders before
# it.
ROOMS = ("base", "engine", "allocator", "torch", "ops", "memory", "steps", "dispatch", "python")
WITH_TORCH = rf"({'|'.join(ROOMS[2:])})/"
# For each folder, the folders that it may include in addition to itself.
ALLOWED = {room: {*ROOMS[:place]} for place, room in enumerate(ROOMS)} | {
    "replay": {"base", "engine"},
}
# The parts of a budget's state, lowest first: folders in `memory`. Each may include itself and the
# parts before it, and files directly in `memory` may include all of them.
PARTS = ("slices", "records", "observers", "registry", "room", "recomputer", "sources", "held")
# Headers outside the standard library, and the files that may include them.
OUTSIDE = {
    r"Python\.h": r"replay/module\.cpp|torch/(pyobjects\.cpp|raised\.cpp|gil\.h)|python/.*",
    r"(torch|ATen|c10)/.*": rf"{WITH_TORCH}.*",
    r"pybind11/.*": r"(torch|python)/.*",  # errors of kernels written in Python pass through it
    r"torch/extension\.h": r"(?!)",
}
PURE = r"(base|engine)/.*"

# Forbidden words: a pattern, and a pattern of files that may contain it nevertheless.
FORBIDDEN = {
    r"\busing namespace\b": "",
    # needed in the signatures of autograd's engine; shared by a storage and the order of steps
    r"\bshared_ptr\b": r"dispatch/proxy\.cpp|engine/(graph\.h|step_order\.(h|cpp))",
    r"\bstd::function\b": "",
    r"<(iostream|regex)>": "",
    # the order of steps looks few storages up, once in a step
    r"\bstd::(unordered_\w+|set|map|pow)\b": r"(?!(base|engine)/).*|engine/step_order\.h",
    r"\bTORCH_LIBRARY_IMPL\b": "",
    r"\bTODO\b|\bFIXME\b": "",
    r"(?<!<)\bnew\b(?! ?\(static_cast)": r"base/slab\.h",
    r"\bdelete\b(?!;)": r"base/slab\.h",
    # Addresses as numbers, method tables, and const objects of torch.
    r"\breinterpret_cast\b|\bconst_cast\b": rf"{WITH_TORCH}.*|base/address_map\.h",
    r"#define (?!REKINDLE_|PY_SSIZE_T_CLEAN|Py_LIMITED_API)": "",
    r"catch \(\.\.\.\)": rf"{WITH_TORCH}.*",
    r"#if.*TORCH_VERSION": r"torch/versions\.h",
    r"\bstd::string\b": rf"{WITH_TORCH}.*",
    r"\bmutex\b|\batomic\b|\bthread_local\b": r"(?!(engine)/).*",
}


def sources(native: Path) -> Iterator[tuple[str, str]]:
    """Yield each file: its path in `native` and its text."""
    for path in sorted(native.rglob("*")):
        if path.suffix in (".h", ".cpp", ".cc", ".hpp"):
            yield path.relative_to(native).as_posix(), path.read_text(encoding="utf-8")


def code_of(text: str) -> str:
    """Blank out comments and contents of strings; line numbers stay."""
    return re.sub(r"//[^\n]*", "", re.sub(r'(?<!include )"(\\.|[^"\\\n])*"', '""', text))


def layering(native: Path) -> Iterator[str]:
    for name, text in sources(native):
        folder = name.partition("/")[0]
        if folder not in ALLOWED:
            yield f"{name}: {folder} is not in the table of this test"
            continue
        for number, line in enumerate(text.splitlines(), 1):
            found = re.match(r'\s*#\s*include\s*([<"])([^>"]+)', line)
            if found and not _may_include(native, name, folder, *found.groups()):
                yield f"{name}:{number}: {folder} includes {found[2]}"


def _may_include(native: Path, name: str, folder: str, mark: str, target: str) -> bool:
    for pattern, files in OUTSIDE.items():
        if re.fullmatch(pattern, target) and not re.fullmatch(files, name):
            return False
    if mark == "<":
        return "/" not in target or not re.fullmatch(PURE, name)
    path = (native / name).parent.joinpath(target).resolve()
    if not path.is_relative_to(native.resolve()):
        return False
    other, *below = path.relative_to(native.resolve()).parts
    if path.suffix != ".h" or (other != folder and other not in ALLOWED[folder]):
        return False
    return folder != other or folder != "memory" or _part(Path(name).parts[1:]) >= _part(below)


def _part(below: Sequence[str]) -> int:
    """Return the place in `PARTS` of a file of `memory`; files directly in it stand above all."""
    return PARTS.index(below[0]) if len(below) > 1 else len(PARTS)


def forbidden(native: Path) -> Iterator[str]:
    for name, text in sources(native):
        for number, line in enumerate(code_of(text).splitlines(), 1):
            for pattern, files in FORBIDDEN.items():
                found = re.search(pattern, line)
                if found and not (files and re.fullmatch(files, name)):
                    yield f"{name}:{number}: {found[0]}"


def long_files(native: Path) -> Iterator[str]:
    for name, text in sources(native):
        lines = len(text.splitlines())
        if lines > MOST_LINES:
            yield f"{name}: {lines} lines, at most {MOST_LINES}"


def large_folders(native: Path) -> Iterator[str]:
    files = Counter(Path(name).parent.as_posix() for name, _ in sources(native))
    for folder, number in sorted(files.items()):
        if number > LARGE_FOLDERS.get(folder, MOST_FILES):
            yield f"{folder}: {number} files, at most {LARGE_FOLDERS.get(folder, MOST_FILES)}"


def large_classes(native: Path) -> Iterator[str]:
    for name, text in sources(native):
        for of, number in members_of_classes(code_of(text)):
            most = LARGE_CLASSES.get(f"{name}: {of}", MOST_MEMBERS)
            if number > most:
                yield f"{name}: {of} has {number} members, at most {most}"


def circles(native: Path) -> Iterator[str]:
    """Yield each unit (a header and its source) that includes itself through others."""
    includes: dict[str, set[str]] = {}
    for name, text in sources(native):
        unit = name.rpartition(".")[0]
        for target in re.findall(r'#include "([^"]+)"', text):
            path = (native / name).parent.joinpath(target).resolve()
            other = path.relative_to(native.resolve()).with_suffix("").as_posix()
            includes.setdefault(unit, set()).update({other} - {unit})
    reached = {unit: _reached(unit, includes) for unit in includes}
    for unit in sorted(includes):
        circle = {other for other in reached[unit] if unit in reached.get(other, ())}
        if circle and not any(circle <= known for known in CIRCLES):
            yield f"{unit}: in a circle with {', '.join(sorted(circle - {unit}))}"


def _reached(unit: str, includes: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [unit]
    while waiting:
        new = includes.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


def headers_once(native: Path) -> Iterator[str]:
    for name, text in sources(native):
        if name.endswith(".h") and "#pragma once" not in text:
            yield f"{name}: no #pragma once"


@pytest.mark.parametrize(
    "rule",
    [layering, forbidden, long_files, large_folders, large_classes, circles, headers_once],
)
def test_real_native_sources_obey_every_source_rule(rule) -> None:
    assert list(rule(NATIVE)) == []


def test_native_sources_include_only_known_folders() -> None:
    assert {name.partition("/")[0] for name, _ in sources(NATIVE)} >= {"base", "engine", "replay"}


def test_folders_of_memory_are_its_known_parts() -> None:
    assert {path.name for path in (NATIVE / "memory").iterdir() if path.is_dir()} == {*PARTS}


def test_listed_large_classes_are_still_large() -> None:
    members = {
        f"{name}: {of}": number
        for name, text in sources(NATIVE)
        for of, number in members_of_classes(code_of(text))
    }
    assert [of for of in LARGE_CLASSES if members.get(of, 0) <= MOST_MEMBERS] == []


def plant(native: Path, name: str, text: str) -> Path:
    others = {"base/b.h": "", "engine/e.h": "", "memory/p.h": "", "replay/r.h": ""}
    others |= {"memory/held/h.h": "", "memory/room/r.h": ""}
    for other, content in (others | {name: text}).items():
        path = native / other
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return native


@pytest.mark.parametrize(
    ("name", "line", "complaint"),
    [
        ("base/a.h", '#include "../engine/e.h"', "base/a.h:1: base includes ../engine/e.h"),
        ("engine/a.h", '#include "../memory/p.h"', "engine/a.h:1: engine includes ../memory/p.h"),
        ("ops/a.h", '#include "../memory/p.h"', "ops/a.h:1: ops includes ../memory/p.h"),
        ("engine/a.cpp", "#include <Python.h>", "engine/a.cpp:1: engine includes Python.h"),
        ("engine/a.cpp", "#include <ATen/ATen.h>", "engine/a.cpp:1: engine includes ATen/ATen.h"),
        ("engine/a.cpp", "#include <sys/mman.h>", "engine/a.cpp:1: engine includes sys/mman.h"),
        ("replay/a.cpp", "#include <torch/all.h>", "replay/a.cpp:1: replay includes torch/all.h"),
        ("memory/a.cpp", "#include <Python.h>", "memory/a.cpp:1: memory includes Python.h"),
        (
            "memory/a.cpp",
            '#include "../replay/r.h"',
            "memory/a.cpp:1: memory includes ../replay/r.h",
        ),
        (
            "memory/a.cpp",
            "#include <torch/extension.h>",
            "memory/a.cpp:1: memory includes torch/extension.h",
        ),
        ("engine/a.cpp", '#include "e.cpp"', "engine/a.cpp:1: engine includes e.cpp"),
        ("other/a.cpp", "", "other/a.cpp: other is not in the table of this test"),
        (
            "memory/room/a.h",
            '#include "../held/h.h"',
            "memory/room/a.h:1: memory includes ../held/h.h",
        ),
        ("memory/held/a.h", '#include "../p.h"', "memory/held/a.h:1: memory includes ../p.h"),
    ],
)  # fmt: skip
def test_check_of_native_layers_finds_forbidden_include(
    tmp_path: Path, name: str, line: str, complaint: str
) -> None:
    assert list(layering(plant(tmp_path, name, line))) == [complaint]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("engine/a.cpp", '#include <vector>\n#include "../base/b.h"\n#include "e.h"'),
        ("replay/module.cpp", '#include <Python.h>\n#include "../engine/e.h"'),
        ("memory/a.cpp", '#include <ATen/core/Tensor.h>\n#include "../engine/e.h"'),
        ("memory/a.cpp", '#include "p.h"\n#include "held/h.h"'),
        ("memory/held/a.cpp", '#include "h.h"\n#include "../room/r.h"'),
        ("steps/a.cpp", '#include "../memory/held/h.h"'),
    ],
)
def test_check_of_native_layers_accepts_allowed_include(
    tmp_path: Path, name: str, line: str
) -> None:
    assert list(layering(plant(tmp_path, name, line))) == []


@pytest.mark.parametrize(
    "line",
    [
        "using namespace std;",
        "std::shared_ptr<int> a;",
        "std::function<void()> f;",
        "#include <iostream>",
        "std::unordered_map<int, int> m;",
        "double d = std::pow(x, 2);",
        "// fine\nTORCH_LIBRARY_IMPL(aten, Fake, m) {}",
        "int* p = new int;",
        "delete p;",
        "auto* q = reinterpret_cast<int*>(p);",
        "#define MOST 3",
        "try {} catch (...) {}",
        "std::string s;",
        "std::mutex m;",
        "#if TORCH_VERSION_MINOR > 10",
    ],
)
def test_check_of_native_words_finds_forbidden_word(tmp_path: Path, line: str) -> None:
    assert len(list(forbidden(plant(tmp_path, "engine/a.cpp", line)))) == 1


@pytest.mark.parametrize(
    "line",
    ["// a new thing, not std::set", "A(const A&) = delete;", 'const char* text = "delete it";'],
)
def test_check_of_native_words_accepts_other_words(tmp_path: Path, line: str) -> None:
    assert list(forbidden(plant(tmp_path, "engine/a.cpp", line))) == []


def test_check_of_native_files_finds_long_files_and_guards(tmp_path: Path) -> None:
    plant(tmp_path, "base/a.h", "\n" * 801)
    assert "base/a.h: 801 lines, at most 800" in list(long_files(tmp_path))
    assert "base/a.h: no #pragma once" in list(headers_once(tmp_path))


def test_check_of_native_folders_finds_large_folder(tmp_path: Path) -> None:
    for number in range(MOST_FILES):
        plant(tmp_path, f"base/a{number}.h", "")
    assert list(large_folders(tmp_path)) == ["base: 31 files, at most 30"]


def test_check_of_native_classes_finds_large_class(tmp_path: Path) -> None:
    fields = "".join(f"    int a{number} = {{}};\n" for number in range(MOST_MEMBERS + 1))
    plant(tmp_path, "base/a.h", f"class A final : B<int> {{\npublic:\n{fields}}};")
    assert list(large_classes(tmp_path)) == ["base/a.h: A has 41 members, at most 40"]


def test_check_of_native_includes_finds_circle(tmp_path: Path) -> None:
    plant(tmp_path, "base/a.h", '#include "c.h"')
    plant(tmp_path, "base/c.cpp", '#include "a.h"')
    plant(tmp_path, "base/d.cpp", '#include "a.h"')
    assert list(circles(tmp_path)) == [
        "base/a: in a circle with base/c",
        "base/c: in a circle with base/a",
    ]


def test_members_of_a_class_are_its_functions_and_fields() -> None:
    code = """
    struct A final : B {
        explicit A(int more) : a_(more) {}
        A(const A&) = delete;
        ~A() = default;

        template <class F>
        void each(F&& visit) const {
            if (true) {
                visit(*this);
            }
        }

        static constexpr int MOST = 3;
        enum class Kind { none, some };

        struct Inner final {
            int number = 0;
            int other;
        };

    private:
        friend class B;
        using Numbers = std::vector<int>;
        void run(int a, int b = 3);
        Inner inner_{};
        std::map<int, Numbers> lists_;
        int a_;
    };
    """
    assert dict(members_of_classes(code)) == {"A": 7, "Inner": 2}
