"""Tests of selecting functions for recomputation: by class, name pattern or library."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.autograd import Function

import rekindle
from rekindle.pytorch.native import _watched
from tests.pytorch.native.gates import (
    Gate,
)


@pytest.fixture
def library() -> Iterator[ModuleType]:
    made = ModuleType("rekindle_test_kernels.ops")
    sys.modules[made.__name__] = made
    patterns = [*_watched.declared]
    yield made
    del sys.modules[made.__name__]
    _watched.declared[:] = patterns


def _defined_in(module: ModuleType) -> Any:
    forward = staticmethod(lambda ctx, x: x)
    return type(Gate)("Kernel", (Function,), {"__module__": module.__name__, "forward": forward})


def test_recomputable_pattern_selects_functions_by_name(library: ModuleType) -> None:
    """A pattern such as `library.*` selects functions by the names of their module and class.

    It also selects functions defined inside a script that `rekindle run` runs.
    """
    before = _defined_in(library)
    rekindle.recomputable("rekindle_test_kernels.*")
    with rekindle.budget(None):
        inside = _defined_in(library)
        for kind in (before, inside):
            assert hasattr(kind.forward, "__rekindle_original__")
    for kind in (before, inside):
        assert not hasattr(kind.forward, "__rekindle_original__")


def test_recomputable_with_pattern_inside_budget_takes_effect(library: ModuleType) -> None:
    kind = _defined_in(library)
    with rekindle.budget(None):
        assert not hasattr(kind.forward, "__rekindle_original__")
        rekindle.recomputable("rekindle_test_kernels.ops.K*")
        assert hasattr(kind.forward, "__rekindle_original__")


def test_recomputable_decorator_returns_class_unchanged() -> None:
    class Plain(Gate):
        pass

    before = dict(vars(Plain))
    assert rekindle.recomputable(Plain) is Plain
    assert dict(vars(Plain)) == before
    with rekindle.budget(None):
        assert "forward" in vars(Plain)
    assert dict(vars(Plain)) == before


def test_functions_of_listed_libraries_are_recomputed() -> None:
    for name in ("liger_kernel.ops.rms_norm", "flash_attn.flash_attn_interface"):
        kind = _defined_in(ModuleType(name))
        with rekindle.budget(None):
            assert hasattr(kind.forward, "__rekindle_original__")


@pytest.mark.parametrize("wrong", [None, 3, Gate.apply, torch.nn.Linear])
def test_recomputable_of_object_other_than_function_is_refused(wrong: Any) -> None:
    with pytest.raises(
        rekindle.InvalidArgument, match=r"write rekindle\.recomputable\(MyFunction\)"
    ):
        rekindle.recomputable(wrong)
