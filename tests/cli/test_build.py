"""Tests of `rekindle build`, which compiles the native cores (C++) or prints why it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from rekindle import native, pytorch
from rekindle.cli import main


def test_build_with_compiled_cores_prints_that_they_are_ready() -> None:
    done = CliRunner().invoke(main, ["build"])
    assert done.exit_code == 0
    assert done.output.splitlines() == [
        "native core, simulator: ready",
        "native core, budgets: ready",
    ]


def test_build_with_folder_option_writes_both_native_cores_there(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["build", "--into", str(tmp_path / "cores")])
    assert done.exit_code == 0
    made = [path.name.partition("-")[0] for path in (tmp_path / "cores").iterdir()]
    assert sorted(made) == ["_engine", "_torch"]


def test_build_without_compiler_prints_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(native._build, "_found", {})
    monkeypatch.setattr(pytorch.native._core, "_start", pytorch.native._core._Start())
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("REKINDLE_CACHE", str(tmp_path))
    done = CliRunner().invoke(main, ["build"])
    assert done.exit_code == 1
    reason = "not there, no C++ compiler: $CXX names no-such-compiler, which is not installed"
    assert done.output.splitlines() == [
        f"native core, simulator: {reason}",
        f"native core, budgets: {reason}",
    ]


def test_guided_build_without_compiler_prints_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("REKINDLE_CACHE", str(tmp_path))
    done = CliRunner().invoke(main, ["build", "--guided"])
    assert done.exit_code == 1
    reason = "no C++ compiler: $CXX names no-such-compiler, which is not installed"
    assert done.output.splitlines() == [f"Error: --guided: {reason}"]
