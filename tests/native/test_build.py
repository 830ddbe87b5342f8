"""Tests of compiling the native extensions (C++): once, by one of several processes.

A failure states its reason.
"""

from __future__ import annotations

import ast
import dataclasses
import io
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
import textwrap
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rekindle.native import _build, _compile

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
    """Create a folder of test sources that replaces the native sources, and an empty cache."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "tiny.cpp").write_text(SOURCE)
    (folder / "answer.h").write_text("#define ANSWER 42\n")
    monkeypatch.setattr(_build, "FOLDER", folder)
    monkeypatch.setattr(_build, "_found", {})
    monkeypatch.delenv("REKINDLE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    return folder


def _again() -> object:
    """Load the extension again, as a new process would."""
    _build._found.clear()
    return _build.extension("tiny", ["*.cpp"])


@needs_compiler
def test_extension_is_compiled_once_until_header_changes(tree: Path) -> None:
    assert _build.extension("tiny", ["*.cpp"], build=False) is None
    module = _build.extension("tiny", ["*.cpp"])
    assert module is not None, _build.why_not("tiny")
    assert module.answer == 42
    assert _build.extension("tiny", ["*.cpp"]) is module
    cache = tree.parent / "cache" / "rekindle" / "cores"
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
def test_build_progress_bar_on_terminal_is_erased_at_end(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert _again() is not None
    said = [line for line in terminal.getvalue().split("\r\x1b[K") if line]
    assert said
    for line in said:
        assert re.fullmatch(
            r"rekindle: compiling the native core, once \[[#-]{20}\] [01] of 1 units, "
            r"about \d+ s left",
            line,
        )
    assert terminal.getvalue().endswith("\r\x1b[K")
    assert _again() is not None
    assert said == [line for line in terminal.getvalue().split("\r\x1b[K") if line]


@needs_compiler
def test_build_progress_in_log_names_time_and_folder(
    tree: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_compile, "_LINE_EVERY_S", 0.0)
    assert _again() is not None
    assert _again() is not None
    first, *lines, last = capsys.readouterr().err.splitlines()
    cache = re.escape(str(tree.parent / "cache" / "rekindle" / "cores"))
    assert re.fullmatch(
        r"rekindle: compiling the native core, once for this PyTorch and compiler: about \d+ s\. "
        rf"It is kept in {cache}\. `rekindle build` compiles it ahead of time; a wheel made by "
        r"scripts/wheels has it inside\.",
        first,
    )
    assert lines
    assert all(re.fullmatch(r"rekindle: [01] of 1 units compiled after \d+ s", x) for x in lines)
    assert re.fullmatch(r"rekindle: compiled the native core in \d+ s", last)


@needs_compiler
def test_changed_header_recompiles_only_units_that_include_it(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tree / "engine").mkdir()
    (tree / "engine" / "other.cpp").write_text("int other() { return 1; }\n")
    compiled: list[int] = []
    run_all = _compile.run_all

    def counted(jobs: Sequence[_compile.Job], *rest: Any) -> None:
        compiled.append(len(jobs))
        run_all(jobs, *rest)

    monkeypatch.setattr(_compile, "run_all", counted)
    for text in ("#define ANSWER 42\n", "#define ANSWER 43\n"):
        (tree / "answer.h").write_text(text)
        _build._found.clear()
        assert _build.extension("tiny", ["engine/*.cpp", "*.cpp"]) is not None
    assert compiled == [2, 1]


def test_source_files_are_grouped_into_units_of_equal_size(tmp_path: Path) -> None:
    for folder, count in (("engine", 3), ("memory", 10), ("torch", 30)):
        (tmp_path / folder).mkdir()
        for number in range(count):
            (tmp_path / folder / f"{number:02}.cpp").write_text("x" * 10_000)
    paths = sorted(tmp_path.glob("*/*"))
    units = _compile.units_of(paths, ["engine"])
    assert [(len(unit.sources), unit.with_torch) for unit in units] == [
        (3, False), (20, True), (20, True),
    ]  # fmt: skip
    assert [source for unit in units for source in unit.sources] == paths


@needs_compiler
@pytest.mark.skipif(not hasattr(os, "killpg"), reason="no process groups")
def test_interrupted_build_ends_compilers_and_removes_files(tree: Path) -> None:
    """The compiler starts a slow child process, as g++ does."""
    marks = tree.parent / "marks"
    marks.mkdir()
    compiler = tree.parent / "compiler"
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exec {COMPILER} --version\n'
        f'touch {marks}/$$; sh -c "sleep 3; touch {marks}/late"\n'
    )
    compiler.chmod(0o755)
    for folder in ("first", "second"):
        (tree / folder).mkdir()
        (tree / folder / "some.cpp").write_text("int x;\n")
    program = textwrap.dedent(f"""
        from pathlib import Path
        from rekindle.native import _build
        _build.FOLDER = Path({str(tree)!r})
        _build.extension("tiny", ["first/*.cpp", "second/*.cpp"])
        print("went on")
    """)
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env=os.environ | {"CXX": str(compiler)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    while not [*marks.iterdir()]:
        time.sleep(0.01)
        assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGINT)
    printed, complaint = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in complaint
    assert not printed
    cache = tree.parent / "cache" / "rekindle" / "cores"
    assert not [*cache.glob("build-*"), *cache.glob("*.so"), *cache.glob("*.failed")]
    time.sleep(3.2)  # time for a compiler that was not killed to write its output
    assert not (marks / "late").exists()


@needs_compiler
def test_cache_key_of_build_ignores_installation_folder(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = _build._recipe("tiny", ["*.cpp"], with_torch=True)
    monkeypatch.setattr(
        sysconfig, "get_paths", lambda: {"include": str(tree / "another" / "environment")}
    )
    moved = _build._recipe("tiny", ["*.cpp"], with_torch=True)
    assert moved.key() == recipe.key()
    assert recipe.torch is not None
    other = dataclasses.replace(recipe.torch, made_by=("another version",))
    assert dataclasses.replace(recipe, torch=other).key() != recipe.key()
    assert dataclasses.replace(recipe, version="g++ 99").key() != recipe.key()


@needs_compiler
def test_new_build_deletes_builds_that_are_long_unused(tree: Path) -> None:
    cache = tree.parent / "cache" / "rekindle" / "cores"
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
    assert _again() is not None  # loading a build marks it as used
    assert forgotten.exists(), "nothing was compiled"
    (tree / "answer.h").write_text("#define ANSWER 43\n")
    assert _again() is not None
    assert used.exists()
    assert not [*cache.glob("old-*"), *cache.glob("build-*")]


@needs_compiler
def test_two_processes_that_build_together_compile_once(tree: Path) -> None:
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
def test_core_of_wheel_is_loaded_only_if_sources_are_unchanged(
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
def test_core_of_wheel_that_fails_to_load_is_compiled_instead(tree: Path) -> None:
    shipped = _build.ship("tiny", ["*.cpp"], tree / "prebuilt")
    assert shipped is not None
    shipped.write_bytes(b"for another machine")
    assert getattr(_again(), "answer", 0) == 42


@pytest.mark.usefixtures("tree")
def test_build_without_compiler_states_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    assert _build.extension("tiny", ["*.cpp"]) is None
    assert _build.why_not("tiny") == (
        "no C++ compiler: $CXX names no-such-compiler, which is not installed"
    )
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    assert _again() is None
    assert _build.why_not("tiny") == "no C++ compiler (g++ or clang++) is installed"


@needs_compiler
def test_failed_compilation_keeps_reason_and_is_not_retried(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tree / "tiny.cpp").write_text("int main() { return nothing; }\n")
    assert _build.extension("tiny", ["*.cpp"]) is None
    reason = _build.why_not("tiny")
    assert "nothing" in reason
    assert "\n" not in reason
    monkeypatch.setattr(_build, "_compile_and_link", lambda *_: pytest.fail("tried again"))
    assert _again() is None
    assert _build.why_not("tiny") == reason


@needs_compiler
def test_build_with_unwritable_cache_folder_states_reason(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tree.parent / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tree.parent / "file"))
    assert _build.extension("tiny", ["*.cpp"]) is None
    assert _build.why_not("tiny").startswith("the folder for the compiled core cannot be made: ")


def test_import_rekindle_builds_nothing() -> None:
    program = "import sys, rekindle; print([m for m in sys.modules if 'rekindle.native' in m])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
@needs_compiler
def test_build_while_installing_needs_only_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """`pip install` runs hatch_build.py before it installs the dependencies."""
    root = Path(__file__).parents[2]
    hook = ast.parse((root / "hatch_build.py").read_text(encoding="utf-8"))
    (program,) = (
        node.value.value
        for node in hook.body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and "build_ahead" in str(node.value.value)
    )
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    absent = {re.split(r"\W", each)[0] for each in project["dependencies"]} - {"torch"}
    assert "numpy" in absent
    hidden = f"import sys; sys.modules.update(dict.fromkeys({absent}))\n"
    command = [sys.executable, "-I", "-c", hidden + str(program), str(root / "src")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr
    monkeypatch.setenv("CXX", "no-such-compiler")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "no C++ compiler: $CXX names no-such-compiler, which is not installed\n"


@needs_compiler
def test_cache_keeps_only_the_latest_builds(tree: Path) -> None:
    cache = tree.parent / "cache" / "rekindle" / "cores"
    cache.mkdir(parents=True)
    two_days_ago = time.time() - 2 * 86_400
    for number in range(12):
        lock = cache / f"tiny-{number}.lock"
        lock.with_suffix(".so").touch()
        lock.touch()
        os.utime(lock, (two_days_ago + number, two_days_ago + number))
    assert _again() is not None
    left = sorted(int(path.stem.partition("-")[2]) for path in cache.glob("tiny-?*.so")
                  if path.stem.partition("-")[2].isdigit() and len(path.stem) < 10)  # fmt: skip
    assert left == [5, 6, 7, 8, 9, 10, 11]  # eight builds, including the new one


# -- profile-guided optimization ------------------------------------------------------------------

needs_gcc = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
#: Loads the extension of its cache, as `rekindle.native` would, so that it counts.
TRAINING = """
import importlib.util, os, pathlib
(path,) = (pathlib.Path(os.environ["REKINDLE_CACHE"]) / "cores").glob("tiny-*.so")
spec = importlib.util.spec_from_file_location("tiny", path)
spec.loader.exec_module(importlib.util.module_from_spec(spec))
"""


@needs_gcc
def test_guided_build_replaces_extension_in_cache(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / "answer.h").write_text(
        "#ifdef REKINDLE_GUIDED\n#define ANSWER 43\n#else\n#define ANSWER 42\n#endif\n"
    )
    plain = _build.extension("tiny", ["*.cpp"])
    assert plain is not None
    _build.rebuild_guided("tiny", ["*.cpp"], [sys.executable, "-c", TRAINING])
    code = "import sys; from rekindle.native import _build; from pathlib import Path; "
    code += f"_build.FOLDER = Path({str(tree)!r}); "
    code += "print(_build.extension('tiny', ['*.cpp'], build=False).answer)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (plain.answer, done.stdout) == (42, "43\n")
    assert "rekindle: compile with the counts: about " in capsys.readouterr().err
    assert not [*Path(_build.core_folder()).glob(f"{_build._UNFINISHED}*")]


@needs_gcc
@pytest.mark.parametrize(
    ("training", "message"),
    [
        ("raise SystemExit('no data')", r"^the training program fails: no data exit code 1$"),
        ("pass", r"^the training program did not load the extension$"),
    ],
)
def test_guided_build_without_training_changes_nothing(
    tree: Path, training: str, message: str
) -> None:
    plain = _build.extension("tiny", ["*.cpp"])
    assert plain is not None
    before = Path(str(plain.__file__)).read_bytes()
    with pytest.raises(_build.Unbuildable, match=message):
        _build.rebuild_guided("tiny", ["*.cpp"], [sys.executable, "-c", training])
    assert Path(str(plain.__file__)).read_bytes() == before


def test_guided_build_with_clang_states_reason(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho Debian clang version 15.0.6\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(_build.Unbuildable, match=r"needs g\+\+, not Debian clang version 15\.0\.6"):
        _build.rebuild_guided("tiny", ["*.cpp"], ["true"])
