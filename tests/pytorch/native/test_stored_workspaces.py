"""Tests that measured workspaces (internal memory of operators) are stored for later processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import pytest
import torch
import torch.nn.functional as F

import rekindle
from rekindle import Run
from rekindle.pytorch.native import _workspaces
from tests.helpers import own_cache
from tests.pytorch import cores
from tests.pytorch.bits import threads_set

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.usefixtures("workspaces_unknown")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("REKINDLE_CACHE", str(own_cache(tmp_path)))
    yield tmp_path
    forget_file()


def forget_file() -> None:
    """Forget all workspaces and read the file again at the next budget, like a new process."""
    cores.forget_signatures()
    _workspaces._Recalled.path = None


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("workspaces-*"))


BUDGET: Final = 8 * 400_000


def run() -> tuple[Run, list[torch.Tensor]]:
    """Run operators that need a workspace when the budget is full of evictable values."""
    torch.manual_seed(0)
    x = torch.rand(100_000, requires_grad=True)
    with rekindle.budget(BUDGET, learn=False) as run:
        y = x
        for _ in range(8):
            y = (y * 0.9).sin()
        y.logsumexp(0).backward()
    assert x.grad is not None
    return run, [y.detach(), x.grad]


def repeated(run: Run) -> int:
    return run._driver.core.repeated_calls(run._driver.handle)


def test_stored_workspace_avoids_running_operator_twice(folder: Path) -> None:
    first, expected = run()
    assert repeated(first) > 0
    forget_file()
    second, found = run()
    assert repeated(second) == 0
    assert second.evictions > 0
    assert second.peak <= BUDGET
    assert all(map(torch.equal, found, expected))


def test_file_of_workspaces_is_not_rewritten_without_new_ones(folder: Path) -> None:
    run()
    (file,) = files(folder)
    before = file.stat().st_mtime_ns, file.read_text()
    forget_file()
    run()
    assert (file.stat().st_mtime_ns, file.read_text()) == before


@pytest.mark.parametrize("cache", ["off", "argument"])
def test_workspaces_are_not_stored_if_cache_is_off(
    cache: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cache == "off":
        monkeypatch.setenv("REKINDLE_CACHE", "off")
    with rekindle.budget("1MiB", learn=False, cache=False):
        torch.rand(100).logsumexp(0)
    assert files(folder) == []


def other_numbers(make: Callable[[str], int]) -> Callable[[str], str]:
    """Return a function that replaces each number of bytes in the text of a file."""
    return lambda text: json.dumps({number: make(number) for number in json.loads(text)})


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[1, 2]",
        lambda text: '{"a": 1, "2": "b"}',
        other_numbers(lambda number: -1),
        other_numbers(lambda number: 10**30),
        other_numbers(lambda number: 10**17),
        other_numbers(lambda number: 0),
    ],
)
def test_damaged_file_of_workspaces_is_ignored(damage: Callable[[str], str], folder: Path) -> None:
    _, expected = run()
    (file,) = files(folder)
    file.write_text(damage(file.read_text()))
    forget_file()
    second, found = run()
    assert second.peak <= BUDGET
    assert all(map(torch.equal, found, expected))


@contextmanager
def without_onednn() -> Iterator[None]:
    """Disable oneDNN; unlike `torch.backends.mkldnn.flags`, do not warn about other flags."""
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(True)


def test_workspaces_of_each_pytorch_setting_have_own_file(folder: Path) -> None:
    def measure() -> None:
        cores.forget_signatures()
        with rekindle.budget("100MiB", learn=False):
            F.conv2d(torch.rand(1, 2, 8, 8), torch.rand(2, 2, 3, 3))

    measure()
    with without_onednn():
        measure()
    with threads_set(torch.get_num_threads() + 1):
        measure()
    names = [each.name for each in files(folder)]
    assert len(names) == 3
    assert sum("onednn" in name for name in names) == 2
    version = "".join(c if c.isalnum() else "-" for c in torch.__version__)
    assert all(version in name for name in names)


def test_workspaces_are_not_stored_if_setting_changed_inside(folder: Path) -> None:
    with ExitStack() as changed, rekindle.budget("100MiB", learn=False):
        F.conv2d(torch.rand(1, 2, 8, 8), torch.rand(2, 2, 3, 3))
        changed.enter_context(threads_set(torch.get_num_threads() + 1))
    assert files(folder) == []


PROCESS: Final = """
import torch, rekindle
torch.set_num_threads(1)
x, weight = torch.rand(8, 4, 16, 16, requires_grad=True), torch.rand(4, 4, 3, 3)
with rekindle.budget("100MiB", learn=False) as run:
    torch.nn.functional.conv2d(x, weight).sum().backward()
"""


@pytest.mark.slow
def test_second_process_uses_stored_workspaces(folder: Path) -> None:
    subprocess.run([sys.executable, "-c", PROCESS], cwd=ROOT, env=os.environ, check=True)
    (file,) = files(folder)
    before = file.read_text()
    assert any(json.loads(before).values())
    subprocess.run([sys.executable, "-c", PROCESS], cwd=ROOT, env=os.environ, check=True)
    assert file.read_text() == before
