"""Tests of how a budget starts the native core, and of the errors if there is none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import rekindle
from rekindle.native import _build
from rekindle.policies import Unoptimized
from rekindle.pytorch.context import _arguments, _native_core
from rekindle.pytorch.native import _core

ROOT = Path(__file__).parents[3]

#: A program that enters a budget and prints the outcome.
PROGRAM = """
import torch, rekindle
weight = torch.ones(10, requires_grad=True)
for step in range(2):
    try:
        with rekindle.budget("1MiB"):
            weight.sin().sum().backward()
    except rekindle.Unsupported as error:
        print(error)
"""
#: The ways out, as an error names them.
WAYS = (
    "a wheel that contains one",
    "apt install g++",
    "dnf install gcc-c++",
    "xcode-select --install",
    "conda install cxx-compiler",
    "rekindle doctor",
)


@pytest.mark.parametrize(
    "settings",
    [{}, {"swap": "1MiB"}, {"evict": "anything"}, {"policy": "lru"}, {"policy": Unoptimized()}],
    ids=["default", "swap", "anything", "lru", "unoptimized"],
)
def test_native_core_supports_all_settings(settings: dict[str, Any]) -> None:
    weight = torch.ones(3, requires_grad=True)
    with rekindle.budget("1GiB", **settings) as run:
        weight.sin().sum().backward()
    assert run._driver.operators_run > 0
    assert weight.grad is not None
    assert torch.equal(weight.grad, weight.detach().cos())


@pytest.mark.parametrize("kind", ["mps", "xpu", "hpu"])
def test_other_device_is_refused_in_one_sentence(kind: str) -> None:
    told = f'for the memory of the CPU or of CUDA, not of {kind}; write device="cpu"'
    with pytest.raises(rekindle.Unsupported, match=re.escape(told)) as caught:
        _native_core.check_device(torch.device(kind))
    assert "\n" not in str(caught.value)


def test_budget_for_other_device_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_arguments, "device_of", torch.device)
    with pytest.raises(rekindle.Unsupported, match=r"device='mps'\): a budget is for"):
        rekindle.budget("1GiB", device="mps")


def test_core_argument_is_refused() -> None:
    options: Any = {"core": "python"}
    for call in (rekindle.budget, rekindle.budget.unlimited):
        with pytest.raises(TypeError, match="unexpected keyword argument 'core'"):
            call("1GiB", **options) if call is rekindle.budget else call(**options)


def test_native_core_is_built_only_when_context_is_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Building takes a minute; a budget may stand above a function that is never called."""
    monkeypatch.setattr(_native_core, "core", lambda: pytest.fail("built"))
    rekindle.budget("1GiB")


def _told(environment: Mapping[str, str], program: str = PROGRAM, *, compiles: bool = False) -> str:
    """Run a program whose two budgets are refused, and return in which words, both times.

    On standard error it says once that it compiles, if it does.
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr.startswith("rekindle: compiling the native core, once ") == compiles
    assert compiles or not done.stderr
    first, second = done.stdout.splitlines()
    assert first == second
    assert all(way in first for way in WAYS), first
    return first


def test_missing_compiler_error_names_alternatives(tmp_path: Path) -> None:
    environment = {"CXX": "no-such-compiler", "REKINDLE_CACHE": str(tmp_path)}
    reason = "no C++ compiler: $CXX is no-such-compiler, which is not found"
    assert f"there is none here: {reason}. Install a wheel" in _told(environment)


@pytest.mark.slow
def test_failed_build_raises_and_is_not_retried(tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit\necho x >>"$0.log"\nexit 1\n')
    compiler.chmod(0o755)
    environment = {"CXX": str(compiler), "REKINDLE_CACHE": str(tmp_path)}
    told = _told(environment, compiles=True)
    assert "compiler fails: it ends with 1" in told
    tried = (tmp_path / "compiler.log").read_text()
    assert _told(environment) == told
    assert (tmp_path / "compiler.log").read_text() == tried


def test_unwritable_cache_folder_raises_reason(tmp_path: Path) -> None:
    """A file is where the folder should be: permissions would not stop the superuser."""
    (tmp_path / "cores").write_text("")
    told = _told({"REKINDLE_CACHE": str(tmp_path)})
    assert "no folder to keep the compiled core in: " in told


def test_dispatch_key_in_use_raises_reason() -> None:
    taken = (
        'import torch; _ = torch.library.Library("_", "IMPL", "Fake"); '
        "_.fallback(torch.library.fallthrough_kernel)"
    )
    told = _told({}, taken + PROGRAM)
    assert "something else runs at the dispatch key that it needs (Fake)" in told


def test_windows_error_names_alternatives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_build, "_found", {})
    monkeypatch.setattr(_core, "_started", {})
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(rekindle.Unsupported, match="not built on Windows yet") as caught:
        _native_core.native_core_for(torch.device("cpu"))
    assert all(way in str(caught.value) for way in WAYS)


def test_a_torch_that_is_too_old_is_to_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "_started", {})
    monkeypatch.setattr(torch, "__version__", "2.10.1")
    told = r"it needs torch 2\.11, this is 2\.10\.1\. Install torch 2\.11 or a later one\."
    with pytest.raises(rekindle.Unsupported, match=told):
        _native_core.native_core_for(torch.device("cpu"))
