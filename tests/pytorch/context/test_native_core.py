"""Tests of how a budget loads the native core, and of the errors if loading fails."""

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
from rekindle.policies import Random
from rekindle.pytorch.context import _arguments, _native_core
from rekindle.pytorch.native import _core
from tests.pretend_fake.build import ALONE

ROOT = Path(__file__).parents[3]

#: A program that enters a budget and prints the outcome.
PROGRAM = """
import torch, rekindle
from tests.pretend_fake.build import ALONE
weight = torch.ones(10, requires_grad=True)
for step in range(2):
    try:
        with rekindle.budget("1MiB"):
            weight.sin().sum().backward()
    except rekindle.Unsupported as error:
        print(error)
"""
#: The ways to get a native core that an error suggests.
WAYS = (
    "a wheel of Rekindle that contains the native core",
    "apt install g++",
    "dnf install gcc-c++",
    "xcode-select --install",
    "conda install cxx-compiler",
    "rekindle doctor",
)


@pytest.mark.parametrize(
    "settings",
    [{}, {"swap": "1MiB"}, {"evict": "anything"}, {"policy": "lru"}, {"policy": Random()}],
    ids=["default", "swap", "anything", "lru", "random"],
)
def test_native_core_runs_with_each_setting_of_budget(settings: dict[str, Any]) -> None:
    weight = torch.ones(3, requires_grad=True)
    with rekindle.budget("1GiB", **settings) as run:
        weight.sin().sum().backward()
    assert run._driver.operators_run > 0
    assert weight.grad is not None
    assert torch.equal(weight.grad, weight.detach().cos())


@pytest.mark.parametrize("kind", ["mps", "xpu", "hpu"])
def test_budget_with_device_mps_is_refused_in_one_sentence(kind: str) -> None:
    reported = f'limits the memory of the CPU or of CUDA, not of {kind}; write device="cpu"'
    with pytest.raises(rekindle.Unsupported, match=re.escape(reported)) as caught:
        _native_core.check_device(torch.device(kind))
    assert "\n" not in str(caught.value)


def test_budget_with_unsupported_device_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_arguments, "device_of", torch.device)
    with pytest.raises(rekindle.Unsupported, match=r"device='mps'\): a budget limits"):
        rekindle.budget("1GiB", device="mps")


def test_budget_with_core_argument_is_refused() -> None:
    options: Any = {"core": "python"}
    for call in (rekindle.budget, rekindle.budget.unlimited):
        with pytest.raises(TypeError, match="unexpected keyword argument 'core'"):
            call("1GiB", **options) if call is rekindle.budget else call(**options)


def test_native_core_is_built_only_when_budget_is_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Building takes a minute, and `@budget` may decorate a function that is never called."""
    monkeypatch.setattr(_native_core, "core", lambda: pytest.fail("built"))
    rekindle.budget("1GiB")


def _told(environment: Mapping[str, str], program: str = PROGRAM, *, compiles: bool = False) -> str:
    """Run a program in which entering a budget fails twice, and return the two messages.

    If the program compiles the core, it must say so on standard error exactly once.
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


def test_budget_without_compiler_suggests_how_to_install_one(tmp_path: Path) -> None:
    environment = {"CXX": "no-such-compiler", "REKINDLE_CACHE": str(tmp_path)}
    reason = "no C++ compiler: $CXX names no-such-compiler, which is not installed"
    assert f"which is not available: {reason}. Install a wheel" in _told(environment)


@pytest.mark.slow
def test_second_budget_after_failed_build_raises_without_retry(tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit\necho x >>"$0.log"\nexit 1\n')
    compiler.chmod(0o755)
    environment = {"CXX": str(compiler), "REKINDLE_CACHE": str(tmp_path)}
    reported = _told(environment, compiles=True)
    assert "compiler fails: it ends with 1" in reported
    tried = (tmp_path / "compiler.log").read_text()
    assert _told(environment) == reported
    assert (tmp_path / "compiler.log").read_text() == tried


def test_budget_with_unwritable_cache_folder_raises_with_reason(tmp_path: Path) -> None:
    """The folder's path is that of a file, because permissions would not stop the superuser."""
    (tmp_path / "cores").write_text("")
    reported = _told({"REKINDLE_CACHE": str(tmp_path)})
    assert "the folder for the compiled core cannot be made: " in reported


@ALONE
def test_budget_beside_other_fallback_at_its_dispatch_key_starts() -> None:
    taken = (
        'import torch; _ = torch.library.Library("_", "IMPL", "Fake"); '
        "_.fallback(torch.library.fallthrough_kernel)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", taken + PROGRAM],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == done.stderr == ""


def test_budget_on_windows_is_refused_with_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_build, "_found", {})
    monkeypatch.setattr(_core, "_start", _core._Start())
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(rekindle.Unsupported, match="cannot be built on Windows yet") as caught:
        _native_core.native_core_for(torch.device("cpu"))
    assert all(way in str(caught.value) for way in WAYS)


def test_budget_with_too_old_torch_error_has_needed_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_core, "_start", _core._Start())
    monkeypatch.setattr(torch, "__version__", "2.10.1")
    reported = (
        r"torch 2\.11 or later, and torch 2\.10\.1 is installed\. Install torch 2\.11 or later\."
    )
    with pytest.raises(rekindle.Unsupported, match=reported):
        _native_core.native_core_for(torch.device("cpu"))
