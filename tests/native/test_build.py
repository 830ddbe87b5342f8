"""Extensions are compiled once, by one process, and where that cannot be there is a reason."""

from __future__ import annotations

import io
import os
import shutil
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from rekindle.native import _build

COMPILER = shutil.which("g++") or shutil.which("clang++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

SOURCE = """
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include "answer.h"
static PyModuleDef module{PyModuleDef_HEAD_INIT, "tiny", nullptr, 0, nullptr, nullptr, nullptr,
                          nullptr, nullptr};
PyMODINIT_FUNC PyInit_tiny() {
    PyObject* made = PyModule_Create(&module);
    PyModule_AddIntConstant(made, "answer", ANSWER);
    return made;
}
"""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of sources instead of ours, and an empty cache."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "tiny.cpp").write_text(SOURCE)
    (folder / "answer.h").write_text("#define ANSWER 42\n")
    monkeypatch.setattr(_build, "FOLDER", folder)
    monkeypatch.setattr(_build, "_found", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    return folder


def _again() -> object:
    """As another process would ask."""
    _build._found.clear()
    return _build.extension("tiny", ["*.cpp"])


@needs_compiler
def test_it_is_compiled_once_and_again_when_a_header_changes(tree: Path) -> None:
    assert _build.extension("tiny", ["*.cpp"], build=False) is None
    module = _build.extension("tiny", ["*.cpp"])
    assert module is not None, _build.why_not("tiny")
    assert module.answer == 42
    assert _build.extension("tiny", ["*.cpp"]) is module
    cache = tree.parent / "cache" / "rekindle"
    (made,) = cache.glob("*.so")
    before = made.stat().st_mtime_ns
    assert _again() is not None
    assert made.stat().st_mtime_ns == before
    (tree / "answer.h").write_text("#define ANSWER 43\n")
    assert getattr(_again(), "answer", 0) == 43
    assert len([*cache.glob("*.so")]) == 2
    assert not [*cache.glob("build-*")]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@needs_compiler
@pytest.mark.usefixtures("tree")
def test_a_terminal_is_told_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert _again() is not None
    said = [line for line in terminal.getvalue().split("\r\x1b[K") if line]
    assert said == [
        f"rekindle: compiling the native core, once: {done} of 1 files" for done in (0, 1)
    ]
    assert terminal.getvalue().endswith("\r\x1b[K")
    assert _again() is not None
    assert said == [line for line in terminal.getvalue().split("\r\x1b[K") if line]


@needs_compiler
@pytest.mark.usefixtures("tree")
def test_a_log_is_told_once_that_it_takes_long(capsys: pytest.CaptureFixture[str]) -> None:
    assert _again() is not None
    assert _again() is not None
    assert capsys.readouterr().err == (
        "rekindle: compiling the native core, once: 1 files; `rekindle build` does so ahead\n"
    )


@needs_compiler
def test_what_nobody_loaded_for_long_goes_when_something_is_compiled(tree: Path) -> None:
    cache = tree.parent / "cache" / "rekindle"
    assert _again() is not None
    (used,) = cache.glob("*.so")
    forgotten, failed, killed = cache / "old-1.so", cache / "old-2.failed", cache / "build-killed"
    killed.mkdir()
    (killed / "0.o").touch()
    for path in (forgotten, failed):
        path.touch()
        path.with_suffix(".lock").touch()
    for path in (used, used.with_suffix(".lock"), *cache.glob("old-*"), killed):
        os.utime(path, (0, 0))
    assert _again() is not None  # loads it: so it is in use
    assert forgotten.exists(), "nothing was compiled"
    (tree / "answer.h").write_text("#define ANSWER 43\n")
    assert _again() is not None
    assert used.exists()
    assert not [*cache.glob("old-*"), *cache.glob("build-*")]


@needs_compiler
def test_processes_that_ask_at_once_compile_once(tree: Path) -> None:
    log = tree.parent / "log"
    compiler = tree.parent / "compiler"
    compiler.write_text(f'#!/bin/sh\necho "$@" >>{log}\nexec {COMPILER} "$@"\n')
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    program = textwrap.dedent(f"""
        from pathlib import Path
        from rekindle.native import _build
        _build.FOLDER = Path({str(tree)!r})
        print(_build.extension("tiny", ["*.cpp"]).answer)
    """)
    environment = os.environ | {"CXX": str(compiler)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    assert [process.communicate()[0].strip() for process in processes] == ["42"] * 3
    assert sum(" -c " in line for line in log.read_text().splitlines()) == 1


@needs_compiler
def test_what_comes_with_the_package_is_taken_for_the_same_sources(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = _build.ship("tiny", ["*.cpp"], tree / "prebuilt")
    assert shipped is not None
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tree.parent / "empty"))
    assert getattr(_again(), "__file__", "") == str(shipped)
    (tree / "answer.h").write_text("#define ANSWER 43\n")
    assert _again() is None


@needs_compiler
def test_what_came_and_cannot_be_loaded_is_compiled(tree: Path) -> None:
    shipped = _build.ship("tiny", ["*.cpp"], tree / "prebuilt")
    assert shipped is not None
    shipped.write_bytes(b"for another machine")
    assert getattr(_again(), "answer", 0) == 42


@pytest.mark.usefixtures("tree")
def test_without_a_compiler_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    assert _build.extension("tiny", ["*.cpp"]) is None
    assert _build.why_not("tiny") == (
        "no C++ compiler: $CXX is no-such-compiler, which is not found"
    )
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    assert _again() is None
    assert _build.why_not("tiny") == "no C++ compiler (g++ or clang++) is found"


@needs_compiler
def test_what_does_not_compile_is_told_and_not_tried_each_time(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tree / "tiny.cpp").write_text("int main() { return nothing; }\n")
    assert _build.extension("tiny", ["*.cpp"]) is None
    reason = _build.why_not("tiny")
    assert "nothing" in reason
    assert "\n" not in reason
    monkeypatch.setattr(_build, "_compile", lambda *_: pytest.fail("tried again"))
    assert _again() is None
    assert _build.why_not("tiny") == reason


@needs_compiler
def test_a_folder_that_cannot_be_written_is_a_reason(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tree.parent / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tree.parent / "file"))
    assert _build.extension("tiny", ["*.cpp"]) is None
    assert _build.why_not("tiny").startswith("no folder to keep the compiled core in: ")


def test_import_rekindle_builds_nothing() -> None:
    program = "import sys, rekindle; print([m for m in sys.modules if 'rekindle.native' in m])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
