"""Which core `core="auto"` takes, and that it says why."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import rekindle
from rekindle.policies import Unoptimized
from rekindle.pytorch.context import _cores
from tests.pytorch import cores

ROOT = Path(__file__).parents[3]

#: What a program prints that enters a budget where native is the preferred core.
PROGRAM = """
import torch, rekindle
from rekindle.pytorch.context import _cores
_cores.PREFERRED = "native"
weight = torch.ones(10, requires_grad=True)
for step in range(2):
    weight.grad = None
    with rekindle.budget("1MiB") as run:
        weight.sin().sum().backward()
print(run.core)
print(torch.equal(weight.grad, weight.detach().cos()))
"""


@pytest.fixture
def _preferred() -> Any:
    with cores.taken("native"):
        yield


def chosen(**settings: Any) -> rekindle.Run:
    with rekindle.budget("1GiB", **settings) as run:
        torch.ones(3, requires_grad=True).sin().sum().backward()
    return run


@pytest.mark.usefixtures("_preferred")
@pytest.mark.parametrize(
    "settings",
    [{}, {"swap": "1MiB"}, {"evict": "anything"}, {"policy": "lru"}, {"policy": Unoptimized()}],
    ids=["default", "swap", "anything", "lru", "unoptimized"],
)
def test_native_where_it_does_all_that_is_asked_for(settings: dict[str, Any]) -> None:
    run = chosen(**settings)
    assert str(run.core) == "native, the default"
    assert "core: native, the default>" in repr(run)
    assert "core            native, the default" in str(run.report())


@pytest.mark.usefixtures("_preferred")
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"core": "python"}, "as asked for"),
    ],
    ids=str,
)
def test_python_where_something_else_is_asked_for(settings: dict[str, Any], reason: str) -> None:
    run = chosen(**settings)
    assert str(run.core).startswith(f"python, {reason}")
    assert f"core: python, {reason}" in repr(run)
    assert f"core            python, {reason}" in str(run.report())


@pytest.mark.usefixtures("_preferred")
@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_python_on_other_devices(kind: str) -> None:
    core = _cores.chosen_core("auto", torch.device(kind))
    assert str(core) == f"python, it works on the CPU and on CUDA, and the budget is for {kind}"


@pytest.mark.usefixtures("_preferred")
def test_native_core_on_cuda_is_the_default() -> None:
    core = _cores.chosen_core("auto", torch.device("cuda"))
    assert str(core) == "native, the default"


def test_nothing_is_built_before_it_is_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Building takes a minute; a budget may stand above a function that is never called."""
    monkeypatch.setattr(_cores, "PREFERRED", "native")
    monkeypatch.setattr(_cores, "native_core", lambda: pytest.fail("built"))
    rekindle.budget("1GiB")


def _told(
    environment: Mapping[str, str], program: str = PROGRAM, *, compiles: bool = False
) -> list[str]:
    """Run a program whose two budgets have the Python core, and return what it prints.

    On standard error it says once that it compiles, if it does, and warns once.
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", "always:rekindle.budget", "-c", program],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr.startswith("rekindle: compiling the native core, once ") == compiles
    said = [line for line in done.stderr.splitlines() if not line.startswith("rekindle: ")]
    assert len(said) == 1, done.stderr
    assert "the Python core runs, which takes about ten times as long" in said[0]
    assert '; or write core="python" if that is meant' in said[0]
    return done.stdout.splitlines()


def test_no_compiler(tmp_path: Path) -> None:
    environment = {"CXX": "no-such-compiler", "REKINDLE_CACHE": str(tmp_path)}
    assert _told(environment) == [
        "python, no C++ compiler: $CXX is no-such-compiler, which is not found",
        "True",
    ]


@pytest.mark.slow
def test_a_build_that_fails(tmp_path: Path) -> None:
    """Once: the next process does not try again."""
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit\necho x >>"$0.log"\nexit 1\n')
    compiler.chmod(0o755)
    environment = {"CXX": str(compiler), "REKINDLE_CACHE": str(tmp_path)}
    told = _told(environment, compiles=True)
    assert told == ["python, compiler fails: it ends with 1", "True"]
    tried = (tmp_path / "compiler.log").read_text()
    assert _told(environment) == told
    assert (tmp_path / "compiler.log").read_text() == tried


def test_a_home_that_cannot_be_written(tmp_path: Path) -> None:
    """A file is where the folder should be: permissions would not stop the superuser."""
    (tmp_path / "cores").write_text("")
    core, is_right = _told({"REKINDLE_CACHE": str(tmp_path)})
    assert core.startswith("python, no folder to keep the compiled core in: ")
    assert is_right == "True"


def test_where_somebody_else_has_the_dispatch_key() -> None:
    if cores.core() is None:
        pytest.skip(f"no native core: {cores.why_not()}")
    taken = (
        'import torch; _ = torch.library.Library("_", "IMPL", "Fake"); '
        "_.fallback(torch.library.fallthrough_kernel)"
    )
    core, is_right = _told({}, taken + PROGRAM)
    assert core == "python, something else runs at the dispatch key that it needs (Fake)"
    assert is_right == "True"
