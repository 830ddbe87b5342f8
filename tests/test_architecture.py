"""Tests of the rules of the source layout: allowed imports, no import cycles, short files.

Each rule is a function from a tree of files to complaints. It runs on the real tree, and on small
trees with one planted fault each, which show that the rule can fail.
"""

from __future__ import annotations

import ast
import graphlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# For each part, the parts that it may import. A part is a folder or a file directly in
# src/rekindle; a dotted name is one module of a part. To allow another import, change this table
# and give the reason in the same commit.
SHARED = {"_types", "_errors", "_units", "_checks", "_clock", "_cache", "_files", "_public"}
ALLOWED = {
    "_types": set[str](),
    "_public": set[str](),
    "_errors": {"_types", "_public"},
    "_units": {"_types", "_errors"},
    "_checks": {"_types", "_errors"},
    "_clock": {"_types"},
    "_cache": set[str](),
    "_files": set[str](),
    "_progress": set[str](),
    "_interrupts": set[str](),
    "trace": SHARED,
    # From policies only the swap bandwidths, which give the times of schedules.
    "schedule": SHARED | {"trace", "policies.swap"},
    "policies": SHARED,
    "engine": SHARED | {"trace", "schedule", "policies"},
    # compiles and loads extensions, whose contents the callers know
    "native": {"_cache", "_interrupts"},
    "simulator": SHARED | {"trace", "schedule", "policies", "engine", "native"},
    # Neither engine nor simulator: these check plans, so a planner must not depend on them.
    "planners": SHARED | {"trace", "schedule", "policies.swap"},
    # From planners only data: the result, and the operations and costs of a chain. From report
    # only the data that `run.report()` returns. The simulator computes the budget that a rehearsed
    # step needs, which takes seconds.
    "pytorch": SHARED
    | {"trace", "schedule", "policies", "engine", "native", "simulator", "_progress"}
    | {"_interrupts"}
    | {"planners._result", "planners._chain", "planners._costs", "report._report", "report._data"},
    "report": SHARED | {"trace", "schedule"},
    "integrations": SHARED | {"pytorch"},
    # this part exports the public names of pytorch/distributed
    "distributed": {"pytorch", "_public"},
    # Modules that join independent parts: planners that begin with a simulated run, a process that
    # plans while a program runs, predictions of real runs, the public functions.
    "_planners": SHARED | {"trace", "schedule", "policies", "engine", "simulator", "planners"},
    "_route": SHARED | {"trace", "policies", "engine", "planners", "_planners"},
    "_predict": SHARED
    | {"trace", "schedule", "policies", "simulator", "report", "pytorch", "_progress"},
    "_facade": SHARED | {"trace", "policies", "planners", "pytorch", "_planners", "_progress"},
}
ALLOWED_EVERYTHING = {"__init__", "__main__", "cli"}  # no other part imports these

# The subpackages ("rooms") of a large part, lowest first. A room may import the rooms named with
# it, but only their package (`rekindle.pytorch.online`, not `rekindle.pytorch.online._driver`).
ROOMS = {
    "pytorch": {
        "devices": set[str](),
        "tensors": {"devices"},
        "operators": {"devices", "tensors"},
        "online": {"devices", "tensors", "operators"},
        "swap": {"devices", "tensors"},
        "native": {"devices", "tensors", "operators", "online", "swap"},
        "held": {"tensors", "operators", "online", "native"},
        "optimizers": {"devices", "tensors", "operators", "online", "native"},
        "learned": {"devices", "native"},  # this room plans from the records of the native core
        "planned": {"devices", "tensors", "operators", "swap"},
        "chains": {"tensors"},
        "rehearsed": {"devices", "tensors", "operators", "online"},
        "context": {
            "devices",
            "tensors",
            "online",
            "held",
            "swap",
            "learned",
            "native",
            "optimizers",
            "rehearsed",
        },
        "observed": {
            "devices",
            "tensors",
            "operators",
            "online",
            "native",  # the figures of steps
            "held",
            "chains",
            "rehearsed",
            "context",
        },
        "distributed": {"devices", "tensors", "online", "context", "observed"},
    }
}

# Third-party packages, by the part or the one file that may import them.
THIRD_PARTIES = {
    "policies": {"numpy"},
    "planners": {"numpy"},
    "planners._milp": {"numpy", "highspy"},
    "native._build": {"torch"},
    "pytorch": {"torch"},
    "report._plot": {"matplotlib"},
    "integrations.huggingface": {"transformers"},
    "integrations.lightning": {"lightning"},
    "cli": {"click", "rich"},
    "cli._demo_training": {"torch"},  # the demo trains a model like a user's program
    "cli._core_training": {"torch"},  # a guided build trains models, to count calls
}

HEAVY = ("torch", "numpy", "scipy", "matplotlib", "highspy")
MOST_LINES = 800


@dataclass(frozen=True)
class Import:
    """One imported module, by its full dotted name, and the line that imports it."""

    module: str
    line: int
    when_loaded: bool
    """True if the import is at the top level of its module, not inside a function."""


# Reading a tree of files. `modules` maps dotted names to files, packages to their __init__.py.


def modules_of(package: Path) -> dict[str, Path]:
    modules = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def imports_of(module: str, modules: dict[str, Path]) -> Iterator[Import]:
    """Yield all imports: in functions, under TYPE_CHECKING, relative, by literal name."""
    path = modules[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]

    def visit(node: ast.AST, when_loaded: bool) -> Iterator[Import]:
        for name in _named(node, package, modules):
            yield Import(name, getattr(node, "lineno", 0), when_loaded)
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, when_loaded and not inside)

    yield from visit(ast.parse(path.read_text(encoding="utf-8")), True)


def _named(node: ast.AST, package: str, modules: dict[str, Path]) -> Iterator[str]:
    match node:
        case ast.Import():
            yield from (alias.name for alias in node.names)
        case ast.ImportFrom():
            ancestors = package.split(".")
            up = ancestors[: len(ancestors) - node.level + 1] if node.level else []
            base = ".".join([*up, *([node.module] if node.module else [])])
            for alias in node.names:  # `from package import module` imports a module too
                inner = f"{base}.{alias.name}"
                yield inner if inner in modules else base
        case ast.Call(
            func=ast.Name(id="import_module" | "__import__")
            | ast.Attribute(attr="import_module" | "__import__"),
            args=[ast.Constant(value=str(name)), *_],
        ):
            yield name


# The rules. Each yields its complaints.


def layering(package: Path) -> Iterator[str]:
    modules = modules_of(package)
    for module, path in modules.items():
        inside = module.partition(".")[2] or "__init__"
        part = inside.partition(".")[0]
        if part not in ALLOWED and part not in ALLOWED_EVERYTHING:
            yield f"{path.relative_to(package)}: {part} is not in the table of this test"
            continue
        third_parties = _of(THIRD_PARTIES, inside) or _of(THIRD_PARTIES, part)
        for found in imports_of(module, modules):
            top, _, rest = found.module.partition(".")
            if top == package.name:
                fine = _may(part, rest or "__init__")
            else:
                fine = top in sys.stdlib_module_names or top in third_parties
            if not fine:
                yield f"{path.relative_to(package)}:{found.line}: {part} imports {found.module}"


def rooms(package: Path) -> Iterator[str]:
    """Complain about imports between subpackages that the table lacks, or of private modules."""
    modules = modules_of(package)
    for module, path in modules.items():
        part, room = _room_of(module)
        if part not in ROOMS or not room:
            continue  # the `__init__.py` of the part may import any of its rooms
        if room not in ROOMS[part]:
            yield f"{path.relative_to(package)}: {part}/{room} is not in the table of this test"
            continue
        for found in imports_of(module, modules):
            other_part, other = _room_of(found.module)
            if other_part != part or other == room:
                continue
            where = f"{path.relative_to(package)}:{found.line}: {room}"
            if other not in ROOMS[part][room]:
                yield f"{where} imports {found.module}"
            elif found.module.count(".") > 2:
                yield f"{where} imports {found.module}, not through {part}/{other}/__init__.py"


def _room_of(module: str) -> tuple[str, str]:
    """Return ("pytorch", "online") for "rekindle.pytorch.online._driver"; "" for a missing one."""
    _, part, room, *_ = [*module.split("."), "", ""]
    return part, room


def _of(table: dict[str, set[str]], key: str) -> set[str]:
    return table.get(key, set())


def _may(part: str, target: str) -> bool:
    """Return True if a part may import a target such as "trace._model"."""
    if part in ALLOWED_EVERYTHING or target.partition(".")[0] == part:
        return True
    return target in ALLOWED[part] or target.partition(".")[0] in ALLOWED[part]


def cycles(package: Path) -> Iterator[str]:
    """Complain about modules that import each other when loaded, or under TYPE_CHECKING."""
    modules = modules_of(package)
    graph = {
        module: {found.module for found in imports_of(module, modules) if found.when_loaded}
        & modules.keys()
        for module in modules
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        yield "import cycle: " + " -> ".join(reversed(error.args[1]))


def devices_named(package: Path) -> Iterator[str]:
    """Complain about files that name CUDA; only one file may."""
    for path in sorted(package.rglob("*.py")):
        if path.parent.name == "devices":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            if name in ("torch.cuda", "torch.backends.cuda", "torch.backends.cudnn"):
                yield f"{path.relative_to(package)}:{node.lineno}: {name}"


def long_files(root: Path) -> Iterator[str]:
    for folder in ("src", "tests", "benchmarks", "examples"):
        for path in sorted((root / folder).rglob("*.py")):
            lines = len(path.read_text(encoding="utf-8").splitlines())
            if lines > MOST_LINES:
                yield f"{path.relative_to(root)}: {lines} lines, at most {MOST_LINES}"


def heavy_imports(path: Path | None = None) -> list[str]:
    """Return heavy modules that `import rekindle` loads.

    Args:
        path: A folder that is searched before the installed packages.
    """
    program = f"import sys, rekindle; print(*sorted(sys.modules.keys() & set({HEAVY!r})))"
    environment = os.environ | ({"PYTHONPATH": str(path)} if path else {})
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    return result.stdout.split()


# The real tree obeys the rules.


@pytest.mark.parametrize("rule", [layering, rooms, cycles, devices_named])
def test_real_package_obeys_every_import_rule(rule) -> None:
    assert list(rule(ROOT / "src" / "rekindle")) == []


def test_import_table_lists_lower_packages_first() -> None:
    for table in ROOMS.values():
        below = set[str]()
        for room, imported in table.items():
            assert imported <= below
            below.add(room)


def test_each_source_file_has_at_most_800_lines() -> None:
    assert list(long_files(ROOT)) == []


def test_design_page_lists_folders_and_allowed_imports() -> None:
    """Compare the tables of Python folders: name, first line, allowed imports."""
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    lines = [line for line in page.splitlines() if re.match(r"\| `\w+/` \|", line)]
    rows = [line.strip("| ").split(" | ") for line in lines]
    package = ROOT / "src" / "rekindle"
    folders = [path.parent for path in package.glob("*/__init__.py")]
    expected = [[f"`{folder.name}/`", _first_line(folder)] for folder in folders]
    for part, table in ROOMS.items():
        for room, imported in table.items():
            names = ", ".join(name for name in table if name in imported)
            expected.append([f"`{room}/`", _first_line(package / part / room), names or "-"])
    assert sorted(rows) == sorted(expected)


def _first_line(folder: Path) -> str:
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))
    return (text or "").partition("\n")[0]


def test_import_rekindle_loads_no_heavy_packages() -> None:
    assert heavy_imports() == []


# Each rule can fail.


def plant(root: Path, files: dict[str, str]) -> Path:
    """Make a package of these files, and add missing `__init__.py` files."""
    package = root / "rekindle"
    for name, text in files.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for folder in [package, *(path for path in package.rglob("*") if path.is_dir())]:
        (folder / "__init__.py").touch()
    return package


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("trace/a.py", "import rekindle.engine", "trace/a.py:1: trace imports rekindle.engine"),
        ("trace/a.py", "import rekindle", "trace/a.py:1: trace imports rekindle"),
        (
            "trace/a.py",
            "from rekindle import engine",
            "trace/a.py:1: trace imports rekindle.engine",
        ),
        ("trace/a.py", "from .. import engine", "trace/a.py:1: trace imports rekindle.engine"),
        ("trace/a.py", "from ..engine import x", "trace/a.py:1: trace imports rekindle.engine"),
        ("trace/b/a.py", "from ... import cli", "trace/b/a.py:1: trace imports rekindle.cli"),
        (
            "trace/__init__.py",
            "from ..engine import x",
            "trace/__init__.py:1: trace imports rekindle.engine",
        ),
        (
            "planners/a.py",
            "def f():\n    from rekindle.simulator import replay",
            "planners/a.py:2: planners imports rekindle.simulator",
        ),
        (
            "engine/a.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
            "engine/a.py:3: engine imports torch",
        ),
        (
            "report/a.py",
            "import importlib\nimportlib.import_module('rekindle.pytorch')",
            "report/a.py:2: report imports rekindle.pytorch",
        ),
        ("_types.py", "import rekindle._errors", "_types.py:1: _types imports rekindle._errors"),
        (
            "pytorch/a.py",
            "from rekindle import planners",
            "pytorch/a.py:1: pytorch imports rekindle.planners",
        ),
        (
            "pytorch/a.py",
            "import rekindle.report",
            "pytorch/a.py:1: pytorch imports rekindle.report",
        ),
        ("trace/a.py", "import numpy as np", "trace/a.py:1: trace imports numpy"),
        ("planners/a.py", "import highspy", "planners/a.py:1: planners imports highspy"),
        (
            "report/a.py",
            "import matplotlib.pyplot",
            "report/a.py:1: report imports matplotlib.pyplot",
        ),
        ("cli/a.py", "import torch", "cli/a.py:1: cli imports torch"),
        ("__init__.py", "import torch", "__init__.py:1: __init__ imports torch"),
        ("utils.py", "", "utils.py: utils is not in the table of this test"),
    ],
)
def test_check_of_layers_finds_forbidden_import(
    tmp_path: Path, name: str, text: str, complaint: str
) -> None:
    others = {
        f"{part}/__init__.py": "" for part in ("engine", "cli", "planners", "simulator", "pytorch")
    }
    assert list(layering(plant(tmp_path, others | {name: text}))) == [complaint]


def test_check_of_device_names_finds_cuda_outside_its_file(tmp_path: Path) -> None:
    files = {
        "pytorch/devices/a.py": "import torch\ntorch.cuda.synchronize()",
        "pytorch/online/a.py": "import torch\n'torch.cuda'\ntorch.backends.cudnn.enabled = 1",
        "cli/a.py": "import torch\ntorch.cuda.is_available()",
    }
    found = list(devices_named(plant(tmp_path, files)))
    assert found == ["cli/a.py:2: torch.cuda", "pytorch/online/a.py:3: torch.backends.cudnn"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("trace/a.py", "import json\nfrom rekindle._units import x\nfrom . import b"),
        ("pytorch/a.py", "import torch.nn\nfrom rekindle.planners._result import Plan"),
        ("planners/_milp.py", "import highspy\nimport numpy"),
        ("report/_plot.py", "import matplotlib.pyplot as plt"),
        ("cli/a.py", "import click\ndef f():\n    import rekindle.pytorch"),
        ("__init__.py", "def f():\n    from rekindle.pytorch import budget"),
    ],
)
def test_check_of_layers_accepts_allowed_import(tmp_path: Path, name: str, text: str) -> None:
    assert list(layering(plant(tmp_path, {"planners/_result.py": "", name: text}))) == []


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        (
            "pytorch/online/a.py",
            "def f():\n    from ..learned import x",
            "pytorch/online/a.py:2: online imports rekindle.pytorch.learned",
        ),
        (
            "pytorch/held/a.py",
            "from rekindle.pytorch.online._driver import Driver",
            (
                "pytorch/held/a.py:1: held imports rekindle.pytorch.online._driver, "
                "not through pytorch/online/__init__.py"
            ),
        ),
        (
            "pytorch/swap/a.py",
            "from rekindle.pytorch import budget",
            "pytorch/swap/a.py:1: swap imports rekindle.pytorch",
        ),
        ("pytorch/new/a.py", "", "pytorch/new/a.py: pytorch/new is not in the table of this test"),
        ("pytorch/_a.py", "", "pytorch/_a.py: pytorch/_a is not in the table of this test"),
    ],
)
def test_check_of_subpackages_finds_forbidden_import(
    tmp_path: Path, name: str, text: str, complaint: str
) -> None:
    others = ("pytorch/online/_driver.py", "pytorch/learned/__init__.py", "pytorch/__init__.py")
    package = plant(tmp_path, dict.fromkeys(others, "") | {name: text})
    (package / name).parent.joinpath("__init__.py").unlink()
    assert list(rooms(package)) == [complaint]


def test_check_of_subpackages_accepts_import_of_lower_one(tmp_path: Path) -> None:
    files = {"pytorch/held/a.py": "from ..online import x", "pytorch/online/__init__.py": ""}
    assert list(rooms(plant(tmp_path, files))) == []


@pytest.mark.parametrize("text", ["from .b import x", "if True:\n    import rekindle.trace.b"])
def test_check_of_cycles_finds_import_cycle(tmp_path: Path, text: str) -> None:
    files = {"trace/a.py": text, "trace/b.py": "from rekindle.trace import a"}
    (complaint,) = cycles(plant(tmp_path, files))
    assert complaint.startswith("import cycle: rekindle.trace.")


def test_check_of_cycles_accepts_import_inside_function(tmp_path: Path) -> None:
    files = {"trace/a.py": "def f():\n    from . import b", "trace/b.py": "from . import a"}
    assert list(cycles(plant(tmp_path, files))) == []


def test_check_of_file_length_finds_long_file(tmp_path: Path) -> None:
    package = plant(tmp_path / "src", {"a.py": "x = 1\n" * 800, "b.py": "x = 1\n" * 801})
    assert list(long_files(tmp_path)) == ["src/rekindle/b.py: 801 lines, at most 800"]
    assert package.name == "rekindle"


@pytest.mark.parametrize("heavy", HEAVY)
def test_check_of_heavy_imports_finds_heavy_import(tmp_path: Path, heavy: str) -> None:
    plant(
        tmp_path,
        {"__init__.py": "from rekindle import trace", "trace/__init__.py": f"import {heavy}"},
    )
    (tmp_path / f"{heavy}.py").touch()  # a fake module: fast, and independent of installed extras
    assert heavy_imports(tmp_path) == [heavy]
