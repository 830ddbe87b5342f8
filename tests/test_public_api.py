"""The public names are listed, sorted, visible, and loaded on first use."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rekindle

PACKAGE = Path(rekindle.__file__).parent


def test_names_are_sorted_and_each_has_a_home() -> None:
    assert rekindle.__all__ == sorted(rekindle.__all__)
    assert {*rekindle.__all__} == {*rekindle._HOME, "__version__"}


def test_editors_see_the_same_names_in_the_same_homes() -> None:
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
def test_every_public_name_is_loaded_and_cached(name: str) -> None:
    assert getattr(rekindle, name) is not None
    assert name in vars(rekindle)  # cached, so that later uses skip __getattr__


def test_a_function_is_not_hidden_by_a_folder_of_its_name() -> None:
    # Importing rekindle.x sets the attribute x of rekindle, and would hide a function x.
    for name, home in rekindle._HOME.items():
        taken = (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file()
        assert taken == (home == f"rekindle.{name}"), name


def test_dir_shows_all_of_them_before_they_are_loaded() -> None:
    program = "import rekindle as r; print({*r.__all__} <= {*dir(r)}, {*r.__all__} <= {*vars(r)})"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout.split() == ["True", "False"]


def test_an_unknown_name_is_an_attribute_error_with_a_hint() -> None:
    with pytest.raises(AttributeError) as caught:
        rekindle.buget  # noqa: B018
    assert str(caught.value) == (
        "module 'rekindle' has no attribute 'buget'; did you mean rekindle.budget?"
    )
    assert caught.value.name == "buget"


def test_unlike_name_gets_no_hint() -> None:
    with pytest.raises(AttributeError, match=r"^module 'rekindle' has no attribute 'xyzzy'$"):
        rekindle.xyzzy  # noqa: B018
    assert not hasattr(rekindle, "__wrapped__")  # inspect and doctest read it of each module


def test_version_equals_installed_one() -> None:
    assert importlib.metadata.version("rekindle") == rekindle.__version__


def test_package_has_py_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()


PAGES = "\n".join(page.read_text() for page in (PACKAGE.parents[1] / "docs").rglob("*.md"))


@pytest.mark.parametrize("name", rekindle.__all__)
def test_every_public_name_has_an_entry_in_the_reference(name: str) -> None:
    value = getattr(rekindle, name, None)
    if not callable(value):
        return  # a module or the version
    assert re.search(rf"^::: rekindle\.{name}$", PAGES, flags=re.MULTILINE), name


@pytest.mark.parametrize("name", rekindle.__all__)
def test_docstring_of_public_function_explains_each_argument(name: str) -> None:
    value = getattr(rekindle, name)
    if not callable(value) or (isinstance(value, type) and issubclass(value, Exception)):
        return
    text = inspect.getdoc(value) or ""
    assert text.partition("\n")[0].endswith("."), "the first line is a sentence"
    for parameter in inspect.signature(value).parameters:
        assert re.search(rf"^    {parameter}: ", text, flags=re.MULTILINE), parameter
