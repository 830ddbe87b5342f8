"""Tests of processes that a program starts inside a budget: they are outside, and are warned."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch.multiprocessing

import rekindle


def test_spawn_inside_a_budget_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    module = import_module("torch.multiprocessing.spawn")
    monkeypatch.setattr(module, "start_processes", lambda *args, **kwargs: started.append(args))
    with (
        rekindle.budget("1MiB"),
        pytest.warns(UserWarning, match="outside of this budget: each needs one of its own"),
    ):
        torch.multiprocessing.spawn(print, nprocs=2)
    torch.multiprocessing.spawn(print, nprocs=2)
    assert len(started) == 2
