"""Tests of patching a module when the program imports it, and of what a budget itself imports."""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rekindle.pytorch.operators import when_imported

NAME = "rekindle_module_of_a_test"
#: Each of these takes a tenth of a second or more to import, and none is needed before the program
#: compiles, plans, plots or is distributed.
NOT_AT_ONCE = (
    "torch._dynamo", "torch._inductor", "torch._functorch.aot_autograd", "torch.distributed.fsdp",
    "torch.distributed.tensor", "torch.fx.experimental.symbolic_shapes", "torch.onnx", "sympy",
    "matplotlib", "highspy", "rich", "click", "rekindle.cli",
)  # fmt: skip


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / f"{NAME}.py"
    path.write_text("value = 'as it is'\nnames = ['first']\n")
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    yield path
    sys.modules.pop(NAME, None)
    assert sys.meta_path == finders


@contextmanager
def changed(module: Any) -> Iterator[None]:
    before, module.value = module.value, "changed"
    try:
        yield
    finally:
        module.value = before


@pytest.mark.usefixtures("module")
def test_module_imported_before_budget_is_patched_and_restored() -> None:
    imported: Any = importlib.import_module(NAME)
    with when_imported(NAME, changed):
        assert imported.value == "changed"
    assert imported.value == "as it is"


@pytest.mark.usefixtures("module")
def test_module_imported_inside_budget_is_patched_and_restored() -> None:
    with when_imported(NAME, changed):
        assert NAME not in sys.modules
        imported: Any = importlib.import_module(NAME)
        assert imported.value == "changed"
        assert "exec_module" not in vars(imported.__loader__)
    assert imported.value == "as it is"


@pytest.mark.usefixtures("module")
def test_module_imported_after_budget_is_not_patched() -> None:
    with when_imported(NAME, changed):
        pass
    assert importlib.import_module(NAME).value == "as it is"


@pytest.mark.usefixtures("module")
def test_module_imported_by_other_thread_is_patched() -> None:
    with when_imported(NAME, changed):
        thread = threading.Thread(target=importlib.import_module, args=(NAME,))
        thread.start()
        thread.join()
        assert sys.modules[NAME].value == "changed"  # type: ignore[attr-defined]
    assert sys.modules[NAME].value == "as it is"  # type: ignore[attr-defined]


@pytest.mark.usefixtures("module")
def test_two_patches_of_one_module_are_both_applied() -> None:
    @contextmanager
    def longer(module: Any) -> Iterator[None]:
        module.names.append("second")
        yield
        module.names.remove("second")

    with when_imported(NAME, changed), when_imported(NAME, longer):
        imported: Any = importlib.import_module(NAME)
        assert imported.value == "changed"
        assert imported.names == ["first", "second"]
    assert (imported.value, imported.names) == ("as it is", ["first"])


def test_module_whose_import_fails_is_not_patched(module: Path) -> None:
    module.write_text("raise ValueError('mine')\n")
    with when_imported(NAME, changed), pytest.raises(ValueError, match="mine"):
        importlib.import_module(NAME)
    assert NAME not in sys.modules


def test_import_of_missing_module_raises_same_error() -> None:
    with when_imported(NAME, changed), pytest.raises(ModuleNotFoundError, match=NAME):
        importlib.import_module(NAME)


def new_modules(program: str) -> set[str]:
    """Return the modules that `program` imports in addition to torch's."""
    script = f"import sys, torch\nbefore = set(sys.modules)\n{program}\n"
    script += "print(*sorted(set(sys.modules) - before), sep='\\n')\n"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_first_budget_does_not_import_unused_modules() -> None:
    """Budgets measure workspaces of PyTorch's own kernels, some of which import more modules."""
    found = new_modules(
        "import rekindle\n"
        "tensor = torch.ones(9)\n"
        "with rekindle.budget('1GiB') as run:\n"
        "    run.keep(tensor)\n"
        "assert run.peak == 36"
    )
    assert "rekindle.pytorch" in found
    assert sorted(found & set(NOT_AT_ONCE)) == []


@pytest.mark.slow
def test_compiled_region_in_new_process_is_one_operator() -> None:
    """The program imports the compiler within the budget, also in a thread."""
    script = """
import threading, torch, rekindle
from rekindle.pytorch.operators import REGION

weight = torch.rand(1_000, requires_grad=True)

def region(x):
    return x.sin().exp().cos().square()

def importing():
    import torch._inductor.config

with rekindle.budget("1GiB", record=True) as run:
    thread = threading.Thread(target=importing)
    thread.start()
    thread.join()
    torch.compile(region)(weight).sum().backward()
assert sum(op.name == REGION for op in run.trace.ops) == 2, [op.name for op in run.trace.ops]
import torch._inductor.config
assert not torch._inductor.config.wrap_inductor_compiled_regions
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
