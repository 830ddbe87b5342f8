"""Tests that the Python types of the native module list exactly the functions of the module."""

import re
from pathlib import Path

from rekindle.pytorch.native import Core, core
from tests.changed import ROOT

PYTHON = ROOT / "src/rekindle/native/python"


#: A function that only tests call, in addition to those in `for_tests.cpp`.
MORE_FOR_TESTS = {"arena"}


def _entries(file: Path) -> list[tuple[str, str]]:
    """Return the C++ function and the Python name of each function that `file` lists."""
    return re.findall(r'method<([^;]*?)>\(\s*"(\w+)"\s*\),', file.read_text())


def _for_tests() -> set[str]:
    return MORE_FOR_TESTS | {name for _, name in _entries(PYTHON / "for_tests.cpp")}


def test_python_type_of_native_module_lists_all_its_functions() -> None:
    module = core()
    assert module is not None
    typed = {name for name in {**vars(Core), **Core.__annotations__} if not name.startswith("_")}
    assert {name for name in dir(module) if not name.startswith("_")} == typed | _for_tests()


def test_python_function_names_equal_cpp_function_names() -> None:
    found = [entry for file in sorted(PYTHON.glob("*.cpp")) for entry in _entries(file)]
    assert len(found) > 100
    assert [name for what, name in found if re.findall(r"\w+", what)[-1] != name] == []
