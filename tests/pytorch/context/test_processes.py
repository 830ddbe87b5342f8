"""Tests of processes that a program starts inside a budget: they get a warning and no budget."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch.multiprocessing

import rekindle


def test_multiprocessing_spawn_inside_budget_issues_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[Any] = []
    module = import_module("torch.multiprocessing.spawn")
    monkeypatch.setattr(module, "start_processes", lambda *args, **kwargs: started.append(args))
    with (
        rekindle.budget("1MiB"),
        pytest.warns(
            UserWarning, match="outside of this budget: each of them needs a budget of its own"
        ),
    ):
        torch.multiprocessing.spawn(print, nprocs=2)
    torch.multiprocessing.spawn(print, nprocs=2)
    assert len(started) == 2
