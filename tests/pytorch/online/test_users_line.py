"""Tests that reports name the line in the user's code first, then the line in the library."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from rekindle.pytorch.online import _users_line
from rekindle.pytorch.online._users_line import users_line
from rekindle.report._tables import short_paths

LIBRARY = """
import torch

def layer(x):
    return x.relu().exp()
"""
SCRIPT = """
import torch
import layers
import rekindle

weight = torch.ones(64, 64, requires_grad=True)
batch = torch.ones(256, 64)

def step():
    hidden = batch @ weight
    layers.layer(hidden).sum().backward()

if __name__ == "__main__":
    profile = rekindle.profile(step, repeats=0)
    print(profile.to_json())
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    package = tmp_path / "site-packages"
    package.mkdir()
    (package / "layers.py").write_text(LIBRARY)
    path = tmp_path / "train.py"
    path.write_text("import sys\nsys.path.append(" + repr(str(package)) + ")\n" + SCRIPT)
    return path


@pytest.mark.slow
def test_verify_names_line_of_user_before_line_of_library(script: Path) -> None:
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    lines = json.loads(done.stdout)["at_peak"]["lines"]
    assert f"{script}:13 (layers.py:5)" in lines
    assert not any("site-packages" in line for line in lines)
    numbers = {line.rpartition("train.py:")[2].partition(" ")[0] for line in lines}
    assert "17" not in numbers  # the call of `profile` itself makes no tensor
    assert "(inputs and buffers)" in lines  # the batch existed before the step


def test_profile_command_names_lines_of_script(script: Path) -> None:
    words = ["-m", "rekindle", "profile", str(script), "--json"]
    text = script.read_text().replace("rekindle.profile(step, repeats=0)", "step()")
    script.write_text(text.replace("    print(profile.to_json())\n", ""))
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True)
    lines = json.loads(done.stdout)["at_peak"]["lines"]
    assert all(str(script) in line or line.startswith("(") for line in lines), lines
    assert not any("click" in line for line in lines)


def test_file_is_classified_as_user_code_library_or_neither() -> None:
    whose = _users_line.owner_of_file
    assert whose(__file__) == "user"
    assert whose("<ipython-input-3>") == "user"
    assert whose("<string>") == "nobody"
    assert whose(json.__file__) == "library"
    assert whose(pytest.__file__) == "library"
    assert whose(_users_line.__file__) == "nobody"
    assert whose(sys.modules["torch"].__file__ or "") == "nobody"


def test_line_of_user_code_below_library_is_found() -> None:
    assert users_line().startswith(f"{__file__}:")
    called = (
        "from rekindle.pytorch.online import users_line\ndef call():\n    return users_line()\n"
    )
    namespace: dict[str, object] = {}
    exec(compile(called, "/usr/lib/python3/site-packages/somewhere/deep.py", "exec"), namespace)
    line = namespace["call"]()  # type: ignore[operator]
    assert line.startswith(f"{__file__}:")
    assert line.endswith("(somewhere/deep.py:3)")


def test_path_of_library_line_starts_at_package() -> None:
    lines = {"/there/a/train.py:3 (lib/x.py:9)": 5, "/there/b/model.py:8": 4, "(parameters)": 1}
    shown = short_paths(lines)
    assert list(shown) == ["a/train.py:3 (lib/x.py:9)", "b/model.py:8", "(parameters)"]


def test_installed_folders_are_those_of_sysconfig() -> None:
    paths = sysconfig.get_paths()
    wanted = {paths[name] for name in ("stdlib", "platstdlib", "scripts")}
    assert set(_users_line._installed()) == wanted


def test_classifying_first_file_imports_no_further_module() -> None:
    code = """
import sys
from rekindle.pytorch.online import owner_of_file
before = set(sys.modules)
assert owner_of_file("/somewhere/train.py") == "user"
print(sorted(set(sys.modules) - before))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
