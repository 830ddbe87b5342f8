"""One thread: the same bits each time, and no quarrel over the cores. Both cores, where both are
meant."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from typing import Any

import pytest
import torch

from rekindle import Unsupported
from rekindle.pytorch.context._cores import PREFERRED
from rekindle.pytorch.learned._lessons import forget_lessons
from rekindle.pytorch.native import core as native_core
from rekindle.pytorch.native import what_it_misses
from tests.pytorch import cores
from tests.pytorch.left import behind, settings

torch.set_num_threads(1)

#: The tests of these modules run once for each core, always.
_FOR_BOTH = (
    "test_rules_", "test_invertible", "test_kinds_of_tensors", "test_trade", "test_collectives",
    "test_optimizers", "test_positions", "test_threads", "test_warm_optimizers", "test_workspaces",
    "test_learned", "test_loops", "test_shelf", "test_places", "test_capture", "test_one_engine",
    "test_only_counted", "test_swap",
)  # fmt: skip
#: These as well, on the core in Python slowly.
_LONG_FOR_BOTH = ("test_models", "test_rules_leaks", "test_steps_are_whole")
#: Those of these folders and modules run once: they ask for a core, or for what one alone does.
_FOR_ONE = ("chains", "devices", "held", "learned", "native", "operators", "planned",
            "tensors", "test_distributed", "test_hunt", "test_on_standin")  # fmt: skip
#: All others run on the core that users have; if that is the native one, slowly on both.
#: `REKINDLE_TEST_CORE=python` runs these, and those for one, on that alone.
_ASKED_FOR: Any = os.environ.get("REKINDLE_TEST_CORE")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "core" not in metafunc.fixturenames:
        return
    *_, folder, name = metafunc.module.__name__.split(".")
    names: list[Any] = ["native", "python"]
    if metafunc.definition.get_closest_marker("python_core") is not None:
        names = ["python"]
    elif name.startswith(_LONG_FOR_BOTH):
        names[1] = _SLOWLY
    elif not name.startswith(_FOR_BOTH):
        if folder in _FOR_ONE or name in _FOR_ONE or _ASKED_FOR is not None:
            return
        names = [_PREFERRED]
        if PREFERRED == "native":
            names.append(_SLOWLY)
    metafunc.parametrize("core", names, indirect=True)


_PREFERRED = "preferred"
_SLOWLY: Any = pytest.param("python", marks=pytest.mark.slow)


@pytest.fixture(autouse=True)
def core(request: pytest.FixtureRequest) -> Iterator[cores.Name]:
    """The core that a budget has which does not say."""
    alone = request.node.get_closest_marker("python_core")
    asked_for: Any = "python" if alone is not None else _ASKED_FOR
    name = getattr(request, "param", asked_for or _PREFERRED)
    if name == _PREFERRED:
        there = native_core() is not None and not what_it_misses()
        name = "native" if PREFERRED == "native" and there else "python"
    with cores.taken(name):
        yield name


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """Before torch 2.12 evict="anything" is refused, and what its tests ask for is not there."""
    try:
        return (yield)
    except (AttributeError, Unsupported) as error:
        if hasattr(torch.UntypedStorage, _SINCE_2_12) or _SINCE_2_12 not in str(error):
            raise
        pytest.skip(str(error))


_SINCE_2_12 = "_swap_data_ptr_"


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    before = settings()
    yield
    forget_lessons()
    assert behind(before) == []
