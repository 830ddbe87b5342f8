"""A pytest plugin that runs each test in one way and records its outcome.

It is loaded by `-p tests.pytorch.strangers.plugin` into a process that runs another project's
tests. Environment variables say how to run them.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rekindle
from tests.differ.workers import write_row
from tests.pytorch import cores
from tests.pytorch.strangers.ways import SHARE, Found, Way

_WAY = Way(os.environ["STRANGERS_WAY"])
_TOLD: dict[str, Any] = json.loads(Path(os.environ["STRANGERS_TOLD"]).read_text(encoding="utf-8"))
_DONE: frozenset[str] = frozenset(_TOLD["done"])
_PEAKS: dict[str, int] = _TOLD["peaks"]
_LEAST = 1 << 16  # smallest budget in the way `TIGHT`, in bytes

_peaks: dict[str, int] = {}


def _budget(test: str) -> AbstractContextManager[Any] | None:
    """Return the budget of a test, or None to run it without one."""
    if _WAY in (Way.PLAIN, Way.HOOKED):
        return None
    if _WAY is Way.TIGHT:
        return rekindle.budget(max(int(SHARE * _PEAKS.get(test, 0)), _LEAST))
    return rekindle.budget(None if _WAY is Way.WITHIN else "64GiB")


def _same(value: Any) -> Any:
    """Pack or unpack a saved tensor unchanged."""
    return value


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests that earlier processes ran. The last test of each ended its process."""
    items[:] = [item for item in items if item.name not in _DONE]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed all generators. Some tests draw without a seed, and pass only with some numbers."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - tests draw from the global generator


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    context = _budget(item.name)
    if context is None:
        hooks = torch.autograd.graph.saved_tensors_hooks(_same, _same)
        with hooks if _WAY is Way.HOOKED else nullcontext():
            return (yield)
    with ExitStack() as stack:
        stack.enter_context(cores.counting())
        if _WAY is Way.EVICTED:
            stack.enter_context(cores.evicting_before_every_operator())
        run = stack.enter_context(context)
        try:
            return (yield)
        finally:
            _peaks[item.nodeid] = run.peak


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and not report.failed:
        return
    refused = report.failed and "OutOfBudget" in str(report.longrepr)
    found = Found(
        test=report.nodeid.rpartition("::")[2],
        outcome="refused" if refused else report.outcome,
        peak=_peaks.get(report.nodeid, 0),
        why=_last_line(str(report.longrepr)) if report.failed else "",
    )
    write_row(vars(found))


def pytest_runtest_logstart(nodeid: str) -> None:
    """Write which test starts, because a process that ends in a test reports nothing."""
    write_row({"begins": nodeid.rpartition("::")[2]})


def _last_line(text: str) -> str:
    lines = [line[4:] for line in text.splitlines() if line.startswith("E   ")]
    return (lines or text.splitlines() or [""])[0].strip()[:200]
