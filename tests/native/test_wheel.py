"""Test that a wheel with compiled cores works without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rekindle import native, pytorch

ROOT = Path(__file__).parents[2]
PROGRAM = """
import torch, rekindle
from rekindle import native
x = torch.rand(64, 64, requires_grad=True)
with rekindle.budget("1MiB"):
    (x.sin().cos() @ x).sum().backward()
print(rekindle.__file__)
print(native.engine().__file__)
"""


@pytest.mark.slow
def test_wheel_with_cores_works_without_compiler(tmp_path: Path) -> None:
    if native.engine() is None or pytorch.why_no_native_core():
        pytest.skip(native.why_not(native.ENGINE) or pytorch.why_no_native_core())
    made, site, home = tmp_path / "dist", tmp_path / "site", tmp_path / "home"
    subprocess.run([ROOT / "scripts" / "wheels", "--into", made], check=True)
    (wheel,) = made.glob("rekindle-*.whl")
    assert "none-any" not in wheel.name
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "install"]
    subprocess.run([*pip, "--no-deps", "--target", site, wheel], check=True)
    environment = os.environ | {
        "PATH": "/nonexistent",
        "PYTHONPATH": str(site),
        "REKINDLE_CACHE": str(home),
    }
    environment.pop("CXX", None)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert all(Path(line).is_relative_to(site) for line in done.stdout.splitlines())
    assert not [*home.rglob("*.so")]
