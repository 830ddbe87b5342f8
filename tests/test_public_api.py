"""Tests of the public names: listed, sorted, visible to editors, and imported on first use."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rekindle

PACKAGE = Path(rekindle.__file__).parent
PAGES = "\n".join(page.read_text() for page in (PACKAGE.parents[1] / "docs").rglob("*.md"))
DOCUMENTED = re.findall(r"^::: (.*)$", PAGES, flags=re.MULTILINE)


def test_public_names_are_sorted_and_equal_lazy_import_table() -> None:
    assert rekindle.__all__ == sorted(rekindle.__all__)
    assert {*rekindle.__all__} == {*rekindle._HOME, "__version__"}


def test_editors_see_same_public_names_in_same_modules() -> None:
    tree = ast.parse(inspect.getsource(rekindle))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {}
    for node in ast.walk(block):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                assert alias.asname == alias.name  # type checkers treat such names as exported
                is_module = node.module == "rekindle"
                seen[alias.name] = f"rekindle.{alias.name}" if is_module else node.module
    assert seen == rekindle._HOME


@pytest.mark.parametrize("name", rekindle.__all__)
def test_public_name_is_imported_on_first_use_and_cached(name: str) -> None:
    assert getattr(rekindle, name) is not None
    assert name in vars(rekindle)  # cached, so that later uses skip __getattr__


@pytest.mark.parametrize("path", DOCUMENTED)
def test_documented_name_is_public_and_has_public_module(path: str) -> None:
    module, _, name = path.rpartition(".")
    assert not any(part.startswith("_") for part in path.split("."))
    assert not module.startswith("rekindle.pytorch")
    value = getattr(importlib.import_module(module), name)
    assert (value.__module__, value.__qualname__) == (module, name)
    assert pickle.loads(pickle.dumps(value)) is value


def test_public_function_is_not_hidden_by_package_of_its_name() -> None:
    # Importing rekindle.x sets the attribute x of rekindle, and would hide a function x.
    for name, home in rekindle._HOME.items():
        taken = (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file()
        assert taken == (home == f"rekindle.{name}"), name


def test_dir_of_rekindle_lists_unloaded_public_names() -> None:
    program = "import rekindle as r; print({*r.__all__} <= {*dir(r)}, {*r.__all__} <= {*vars(r)})"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout.split() == ["True", "False"]


def test_unknown_public_name_error_names_similar_one() -> None:
    with pytest.raises(AttributeError) as caught:
        rekindle.buget  # noqa: B018
    assert str(caught.value) == (
        "module 'rekindle' has no attribute 'buget'; did you mean rekindle.budget?"
    )
    assert caught.value.name == "buget"


def test_unknown_name_unlike_any_public_name_gets_no_hint() -> None:
    with pytest.raises(AttributeError, match=r"^module 'rekindle' has no attribute 'xyzzy'$"):
        rekindle.xyzzy  # noqa: B018
    # inspect and doctest read this attribute of each module
    assert not hasattr(rekindle, "__wrapped__")


def test_rekindle_version_equals_version_of_installed_package() -> None:
    assert importlib.metadata.version("rekindle") == rekindle.__version__


def test_package_has_py_typed_marker_file() -> None:
    assert (PACKAGE / "py.typed").is_file()


@pytest.mark.parametrize("name", rekindle.__all__)
def test_every_public_name_has_an_entry_in_the_reference(name: str) -> None:
    value = getattr(rekindle, name, None)
    if not callable(value):
        return  # the object is a module or the version
    assert f"rekindle.{name}" in DOCUMENTED


@pytest.mark.parametrize("name", rekindle.__all__)
def test_docstring_of_public_function_explains_each_argument(name: str) -> None:
    value = getattr(rekindle, name)
    if not callable(value) or name[0].isupper():
        return  # the object is a module, the version, an error or the class of a result
    text = inspect.getdoc(value) or ""
    assert text.partition("\n")[0].endswith("."), "the first line is a sentence"
    for parameter in inspect.signature(value).parameters:
        assert re.search(rf"^    {parameter}: ", text, flags=re.MULTILINE), parameter
