"""Tests of data structures of the native core that threads and forked children share.

The C++ program `threads.cpp` uses them without Python. `scripts/sanitize --threads` runs it under
ThreadSanitizer as well.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from rekindle.native import _build
from tests.cpp import compiled

PROGRAM = Path(__file__).with_name("threads.cpp")
UNITS = (
    "torch/free_queue", "allocator/counting_allocator", "allocator/arena", "allocator/bins",
    "allocator/blocks", "base/mutex",
)  # fmt: skip
SOURCES = [PROGRAM, *(_build.FOLDER / f"{name}.cpp" for name in UNITS)]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    links = _build._torch().links
    library = next(link.removeprefix("-L") for link in links if link.startswith("-L"))
    made = tmp_path_factory.mktemp("program") / "threads"
    options = (f"-L{library}", "-lc10", f"-Wl,-rpath,{library}", "-pthread")
    return compiled(made, SOURCES, f"-I{_build.FOLDER}", *options)


def test_free_queue_reports_every_freed_storage_once(program: Path) -> None:
    run(program, "threads")


def test_lock_of_core_is_held_by_one_thread_at_a_time(program: Path) -> None:
    run(program, "locks")


def test_eviction_never_overlaps_with_operator_that_reads(program: Path) -> None:
    run(program, "readers")


def test_arena_used_by_four_threads_returns_disjoint_memory(program: Path) -> None:
    run(program, "arena")


def test_forked_child_does_not_wait_for_threads_of_its_parent(program: Path) -> None:
    run(program, "forks")


def run(program: Path, what: str) -> None:
    done = subprocess.run([program, what], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
