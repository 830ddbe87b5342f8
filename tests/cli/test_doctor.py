"""Tests of `rekindle doctor`: it lists installed parts, missing parts, and how to install them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

import rekindle
from rekindle import native, pytorch
from rekindle.cli import doctor, main
from rekindle.pytorch.context import _environment, _internals


def _doctor() -> Result:
    return CliRunner().invoke(main, ["doctor"])


def _row(output: str, name: str) -> str:
    (found,) = [line for line in output.splitlines() if line.startswith(f"{name}  ")]
    return found.removeprefix(name).strip()


@pytest.fixture
def nothing_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Simulate a new process with an empty cache, which has not looked for native cores yet."""
    monkeypatch.setattr(native._build, "_found", {})
    monkeypatch.setattr(pytorch.native._core, "_start", pytorch.native._core._Start())
    monkeypatch.setenv("REKINDLE_CACHE", str(tmp_path))


def test_doctor_shows_versions_native_core_and_cache_folders() -> None:
    done = _doctor()
    assert done.exit_code == 0
    assert _row(done.output, "rekindle").startswith(rekindle.__version__)
    assert _row(done.output, "torch").startswith(torch.__version__)
    core = pytorch.native.core()
    guided = core is not None and core.guided
    compiled = "compiled, with profile-guided optimization" if guided else "compiled"
    assert _row(done.output, "native core") == compiled
    assert _row(done.output, "device").startswith("cpu, ")
    assert "To do" not in done.output


def test_doctor_without_torch_names_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    done = _doctor()
    assert done.exit_code == 1
    assert _row(done.output, "torch") == "not installed"
    assert "torch: pip install torch" in done.output.partition("To do:")[2]


@pytest.mark.usefixtures("nothing_found")
def test_doctor_without_compiler_names_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    done = _doctor()
    assert done.exit_code == 1
    reason = "no C++ compiler: $CXX names no-such-compiler, which is not installed"
    assert _row(done.output, "native core") == f"not there: {reason}"
    todo = done.output.partition("To do:")[2]
    ways = ("wheel", "apt install g++", "dnf install gcc-c++", "xcode-select", "cxx-compiler")
    assert all(way in todo for way in ways)
    assert _row(done.output, "compiler") == f"none: {reason}"


def test_doctor_with_older_torch_lists_unsupported_features(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.12.1")
    found = _row(_doctor().output, "native core")
    assert found.endswith(
        "budgets refuse dispatch modes and tensor subclasses with torch 2.12.1; "
        "torch 2.13 supports them"
    )


def test_doctor_names_private_names_that_torch_lacks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The sources use some names that this torch has, and some that it lacks."""
    (tmp_path / "module.py").write_text(
        "from torch._dynamo import config, no_such_function\n"
        "import torch\n"
        "_C = torch._C\n"
        "print(_C._current_graph_task_id(), _C._no_such_id(), torch._no_such_module.x)\n"
    )
    (tmp_path / "native").mkdir()
    (tmp_path / "native" / "unit.cpp").write_text(
        "#include <torch/csrc/autograd/engine.h>\n"
        "#include <torch/csrc/no_such_header.h>\n"
        "torch::autograd::Engine& engine; c10::impl::no_such_guard guard;\n"
        "#if __has_include(<c10/not_yet.h>)\n#include <c10/not_yet.h>\n#endif\n"
        "#if REKINDLE_HAS_IT\n"
        "torch::autograd::in_other_versions also;\n"
        "#endif\n"
    )
    monkeypatch.setattr(_internals, "_PACKAGE", tmp_path)
    uncached = _internals.missing_names.__wrapped__
    monkeypatch.setattr(_environment, "missing_names", uncached)
    done = _doctor()
    assert done.exit_code == 1
    found = _row(done.output, "torch internals").removeprefix("not in this torch: ")
    assert found.split("; ") == [
        "impl::no_such_guard (used in native/unit.cpp)",
        "torch._C._no_such_id (used in module.py)",
        "torch._dynamo.no_such_function (used in module.py)",
        "torch._no_such_module (used in module.py)",
        "torch._no_such_module.x (used in module.py)",
        "torch/csrc/no_such_header.h (used in native/unit.cpp)",
    ]
    assert "torch internals: install a torch that" in done.output.partition("To do:")[2]


@pytest.mark.usefixtures("nothing_found")
def test_doctor_compiles_nothing(tmp_path: Path) -> None:
    if native.compiler().startswith("none"):
        pytest.skip("no C++ compiler")
    done = _doctor()
    assert done.exit_code == 0
    assert "run `rekindle build`" in done.output.partition("To do:")[2]
    assert not [*tmp_path.rglob("*.so")]


def test_doctor_lists_missing_extras_with_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from rekindle.cli import doctor

    monkeypatch.setattr(doctor, "_extra_packages", lambda: {"plan": ["no-such-package"]})
    found = _row(_doctor().output, "extra plan")
    assert found == "without no-such-package: pip install 'rekindle[plan]'"


def test_doctor_shows_settings_from_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REKINDLE_POISON", "1")
    assert "REKINDLE_POISON=1" in _doctor().output
