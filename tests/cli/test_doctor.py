"""Tests of `rekindle doctor`: installed parts, missing parts, and the lines to write."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

import rekindle
from rekindle import native, pytorch
from rekindle.cli import main


def _doctor() -> Result:
    return CliRunner().invoke(main, ["doctor"])


def _row(output: str, name: str) -> str:
    (found,) = [line for line in output.splitlines() if line.startswith(f"{name}  ")]
    return found.removeprefix(name).strip()


@pytest.fixture
def nothing_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process that has not looked for cores yet, with an empty cache."""
    monkeypatch.setattr(native._build, "_found", {})
    monkeypatch.setattr(pytorch.native._core, "_started", {})
    monkeypatch.setenv("REKINDLE_CACHE", str(tmp_path))


def test_doctor_names_versions_core_and_places() -> None:
    done = _doctor()
    assert done.exit_code == 0
    assert _row(done.output, "rekindle").startswith(rekindle.__version__)
    assert _row(done.output, "torch").startswith(torch.__version__)
    assert _row(done.output, "native core") == "compiled"
    assert _row(done.output, "device").startswith("cpu, ")
    assert "To do" not in done.output


@pytest.mark.usefixtures("nothing_found")
def test_doctor_without_a_compiler_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    done = _doctor()
    assert done.exit_code == 1
    reason = "no C++ compiler: $CXX is no-such-compiler, which is not found"
    assert _row(done.output, "native core") == f"not there: {reason}"
    todo = done.output.partition("To do:")[2]
    ways = ("wheel", "apt install g++", "dnf install gcc-c++", "xcode-select", "cxx-compiler")
    assert all(way in todo for way in ways)
    assert _row(done.output, "compiler") == f"none: {reason}"


def test_doctor_with_older_torch_lists_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.12.1")
    found = _row(_doctor().output, "native core")
    assert found.endswith(
        "with torch 2.12.1 it refuses modes and subclasses (2.13 lets it see them)"
    )


@pytest.mark.usefixtures("nothing_found")
def test_doctor_compiles_nothing(tmp_path: Path) -> None:
    if native.compiler().startswith("none"):
        pytest.skip("no C++ compiler")
    done = _doctor()
    assert done.exit_code == 0
    assert "write `rekindle build`" in done.output.partition("To do:")[2]
    assert not [*tmp_path.rglob("*.so")]


def test_doctor_names_extras_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from rekindle.cli import doctor

    monkeypatch.setattr(doctor, "_extra_packages", lambda: {"plan": ["no-such-package"]})
    found = _row(_doctor().output, "extra plan")
    assert found == "without no-such-package: pip install 'rekindle[plan]'"


def test_doctor_shows_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REKINDLE_POISON", "1")
    assert "REKINDLE_POISON=1" in _doctor().output
