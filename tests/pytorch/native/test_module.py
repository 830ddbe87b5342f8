"""Tests that the Python types of the native module list exactly the functions of the module."""

import re

from rekindle.pytorch.native import Core, core
from tests.changed import ROOT

PYTHON = ROOT / "src/rekindle/native/python"


#: Functions of `module.cpp` that only tests call, in addition to those in `for_tests.h`.
MORE_FOR_TESTS = {"arena", "evict_before_every_op"}


def _for_tests() -> set[str]:
    return MORE_FOR_TESTS | set(
        re.findall(r"^PyObject\* (\w+)\(", (PYTHON / "for_tests.h").read_text(), re.M)
    )


def test_python_type_of_native_module_lists_all_its_functions() -> None:
    module = core()
    assert module is not None
    typed = {name for name in {**vars(Core), **Core.__annotations__} if not name.startswith("_")}
    assert {name for name in dir(module) if not name.startswith("_")} == typed | _for_tests()


def test_python_function_names_equal_cpp_function_names() -> None:
    found = re.findall(r'method<(.*)>\("(\w+)"\),', (PYTHON / "module.cpp").read_text())
    assert len(found) > 60
    assert [name for what, name in found if re.findall(r"\w+", what)[-1] != name] == []
