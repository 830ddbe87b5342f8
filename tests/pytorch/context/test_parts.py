"""Tests of errors in each part of `rekindle.budget`, when the budget is entered or left.

A part is one of the inner contexts, such as the one that replaces methods of tensors.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import rekindle
from rekindle import budget
from rekindle.pytorch.native._driver import drivers
from rekindle.pytorch.online import leaves
from tests.pytorch.left import behind, settings

CONFIGURATIONS: tuple[dict[str, Any], ...] = (
    {},
    {"record": True, "evict": "saved"},
    {"evict": "anything", "learn": False},
)


class Failure(Exception):
    """The error that a part of a budget raises in these tests."""


@contextmanager
def _fails(part: Any) -> Iterator[None]:
    """Raise `Failure` after `part` was left."""
    with part:
        yield
    raise Failure


def _failing(monkeypatch: pytest.MonkeyPatch, number: int, *, late: bool) -> list[int]:
    """Make part `number` of each budget raise when it is entered, or left if `late`.

    Returns:
        A list that gets the numbers of the parts that were entered.
    """
    parts, entered = budget._parts, list[int]()

    def with_failure(self: budget, *args: Any) -> Iterator[Any]:
        for index, part in enumerate(parts(self, *args)):
            if index == number and not late:
                raise Failure
            entered.append(index)
            yield _fails(part) if index == number else part

    monkeypatch.setattr(budget, "_parts", with_failure)
    return entered


def _works(context: rekindle.budget) -> None:
    with context as run:
        x = torch.ones(1000, requires_grad=True)
        x.exp().sum().backward()
    assert run.peak >= 3 * 4000


def _count_parts(**arguments: Any) -> int:
    with pytest.MonkeyPatch.context() as patch:
        entered = _failing(patch, -1, late=False)
        _works(rekindle.budget("1GiB", **arguments))
    return len(entered)


@pytest.fixture
def _quick_collections() -> Iterator[None]:
    """Let the garbage collector inspect only the objects of the test."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("_quick_collections")
@pytest.mark.parametrize("late", [False, True], ids=["entering", "leaving"])
@pytest.mark.parametrize("arguments", CONFIGURATIONS, ids=["default", "record", "anything"])
@pytest.mark.evicts_anything
def test_error_in_any_part_of_budget_leaves_no_hook_or_mode(
    arguments: dict[str, Any], late: bool
) -> None:
    parts = _count_parts(**arguments)
    assert parts > 10
    keys = torch._C._dispatch_tls_local_include_set()
    gc.collect()
    alive, owners = len(drivers), leaves._owners
    before = settings()
    for number in range(parts):
        context = rekindle.budget("1GiB", **arguments)
        with pytest.MonkeyPatch.context() as patch:
            entered = _failing(patch, number, late=late)
            with pytest.raises(Failure):
                _works(context)
        assert entered == list(range(parts if late else number))
        assert behind(before) == []
        assert budget._active is None
        assert torch._C._dispatch_tls_local_include_set() == keys
        gc.collect()
        assert len(drivers) == alive
        assert leaves._owners == owners, "ctx.saved_tensors is still replaced"
        _works(rekindle.budget("1GiB", **arguments) if late else context)


@pytest.mark.parametrize("arguments", CONFIGURATIONS, ids=["default", "record", "anything"])
@pytest.mark.evicts_anything
def test_saved_patched_torch_functions_keep_no_budget_alive(arguments: dict[str, Any]) -> None:
    """Modules imported within a budget may save the patched functions, as torch._dynamo does."""
    gc.collect()
    alive, kept = len(drivers), list[Any]()
    with rekindle.budget("1GiB", **arguments):
        for owner in (torch, torch.Tensor, torch.UntypedStorage, torch.Generator, torch.utils):
            kept.append(dict(vars(owner)))
    gc.collect()
    assert len(drivers) == alive
