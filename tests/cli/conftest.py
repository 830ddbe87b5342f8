"""Provide an empty folder for tests that run `rekindle` on a script."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run the test in an empty folder.

    Afterwards restore `sys.path`, `sys.argv` and the working folder.
    """
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    return tmp_path
