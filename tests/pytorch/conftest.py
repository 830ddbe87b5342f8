"""Choose the core that a test runs on; one thread, so that the bits are the same each time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch

from rekindle.pytorch.context._cores import PREFERRED
from rekindle.pytorch.held import there_are_husks
from rekindle.pytorch.learned._lessons import forget_lessons
from rekindle.pytorch.native import core as native_core
from rekindle.pytorch.native import what_it_misses
from tests.pytorch import cores
from tests.pytorch.left import behind, settings

torch.set_num_threads(1)

#: Tests of these folders and modules ask for a core, or for what one alone does: they run once.
_FOR_ONE = ("chains", "devices", "learned", "native", "operators", "planned",
            "tensors", "test_distributed", "test_hunt", "test_on_standin", "test_swap_full_device",
            "test_swap_pinned", "test_swap_store")  # fmt: skip
#: Of the others one function in so many runs on the core in Python as well, among the slow tests,
#: and of its tests one in so many.
_FUNCTIONS, _TESTS = 3, 4


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "core" not in metafunc.fixturenames:
        return
    if metafunc.definition.get_closest_marker("python_core") is not None:
        return
    *_, folder, name = metafunc.module.__name__.split(".")
    if folder in _FOR_ONE or name in _FOR_ONE or PREFERRED != "native":
        return
    sampled = crc32(metafunc.definition.nodeid.encode()) % _FUNCTIONS == 0
    if cores.ASKED_FOR == "both" or (sampled and cores.ASKED_FOR != "python"):
        metafunc.parametrize("core", [_UNNAMED, _SLOWLY], indirect=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not in the sample of the tests on the core in Python."""
    if cores.ASKED_FOR == "both":
        return
    kept, left = [], []
    for item in items:
        callspec = getattr(item, "callspec", None)
        twin = callspec is not None and callspec.params.get("core") == "python"
        twin = twin and "core" in callspec.indices and item.path.is_relative_to(_FOLDER)
        out = twin and crc32(item.nodeid.encode()) % _TESTS != 0
        (left if out else kept).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = kept


_FOLDER = Path(__file__).parent
_PREFERRED = "preferred"
#: Without a name, so that a test has the same id in the sample and out of it.
_UNNAMED: Any = pytest.param(_PREFERRED, id=pytest.HIDDEN_PARAM)
_SLOWLY: Any = pytest.param("python", marks=pytest.mark.slow)


@pytest.fixture(autouse=True)
def core(request: pytest.FixtureRequest) -> Iterator[cores.Name]:
    """The core that a budget has which does not say."""
    alone = request.node.get_closest_marker("python_core") is not None
    asked_for = "python" if alone or cores.ASKED_FOR == "python" else _PREFERRED
    name = getattr(request, "param", asked_for)
    if name == _PREFERRED:
        there = native_core() is not None and not what_it_misses()
        insisted = cores.ASKED_FOR == "native"
        name = "native" if insisted or (PREFERRED == "native" and there) else "python"
    with cores.taken(name):
        yield name


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what asks for `evict="anything"` where torch, before 2.12, has no such storages."""
    if asks_for_anything(item) and not there_are_husks():
        pytest.skip('evict="anything" needs torch 2.12')


def asks_for_anything(item: pytest.Item) -> bool:
    """Whether a test is in `held/`, is marked so, or has it among its parameters."""
    callspec = getattr(item, "callspec", None)
    parameters = () if callspec is None else callspec.params.values()
    return (
        item.path.parent.name == "held"
        or item.get_closest_marker("evicts_anything") is not None
        or any(each in ("anything", {"evict": "anything"}) for each in parameters)
    )


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    before = settings()
    yield
    forget_lessons()
    assert behind(before) == []
