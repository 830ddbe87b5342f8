"""Tests of the file store, the file to which a budget swaps values: space, copies, failures."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rekindle
from rekindle.pytorch.swap import _file_store
from rekindle.pytorch.swap._file_store import FileStore, remove_leftovers
from rekindle.pytorch.swap._space import PAGE, Space
from rekindle.pytorch.swap._store import Lost

KIB = 1024


def home_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def there_and_back(store: FileStore, tensor: torch.Tensor) -> torch.Tensor:
    key = written(store, tensor)
    home = store.new_home(tensor.nbytes)
    store.read(key, home).wait()
    return torch.empty(0, dtype=tensor.dtype).set_(home).view(tensor.shape)


def written(store: FileStore, tensor: torch.Tensor) -> object:
    found = store.write(home_of(tensor))
    assert found is not None
    key, way = found
    way.wait()
    assert way.ended()
    assert way.ns > 0
    return key


# -- space -----------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(1, 4 * PAGE), st.integers(0, 9)), max_size=60))
def test_file_store_blocks_never_overlap_and_are_all_reusable(steps: list[tuple[int, int]]) -> None:
    space = Space(10 * PAGE)
    taken: list[tuple[int, int]] = []
    for nbytes, give_back in steps:
        offset = space.take(nbytes)
        if offset is None:
            assert space.limit - space.used < 10 * PAGE
        else:
            assert offset + nbytes <= space.limit
            assert all(offset + nbytes <= o or o + n <= offset for o, n in taken)
            taken.append((offset, nbytes))
        if give_back < len(taken):
            space.give_back(*taken.pop(give_back))
        space.check()
    for block in taken:
        space.give_back(*block)
    space.check()
    assert space.used == 0
    assert space.take(10 * PAGE) == 0


def test_file_store_with_limit_below_one_page_stores_no_value() -> None:
    assert Space(PAGE - 1).take(1) is None


# -- the file --------------------------------------------------------------------------------------


def test_bytes_read_from_file_store_equal_written_bytes(tmp_path: Path) -> None:
    store = FileStore(1_000 * KIB, tmp_path)
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex64):
        tensor = torch.randn(33, 7).to(dtype)
        assert torch.equal(there_and_back(store, tensor), tensor)
    store.close()


def test_file_store_reuses_blocks_of_released_values(tmp_path: Path) -> None:
    store = FileStore(40 * KIB, tmp_path)
    rows = [torch.full((2 * KIB,), float(number)) for number in range(5)]  # 8 KiB each
    keys = [written(store, row) for row in rows]
    assert (store.used, store.write(home_of(rows[0]))) == (40 * KIB, None)
    store.release(keys[3])
    keys[3] = written(store, rows[3] + 10)
    for number, key in enumerate(keys):
        home = store.new_home(8 * KIB)
        store.read(key, home).wait()
        got = torch.empty(0).set_(home)
        assert got.unique().tolist() == [number + 10 * (number == 3)]
    store.close()


def test_swap_file_is_unlinked_so_that_it_has_no_name(tmp_path: Path) -> None:
    store = FileStore(KIB * KIB, tmp_path)
    written(store, torch.ones(1000))
    assert list(tmp_path.iterdir()) == []
    store.close()


def test_file_store_in_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(rekindle.Unsupported, match=r'swap="32GiB", swap_directory="/path"$'):
        FileStore(KIB, tmp_path / "nowhere")


# -- failures --------------------------------------------------------------------------------------


def refuse(error: int) -> Callable[..., int]:
    def call(*arguments: object) -> int:
        raise OSError(error, os.strerror(error))

    return call


def test_write_to_full_disk_raises_and_keeps_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, tensor = FileStore(KIB * KIB, tmp_path), torch.randn(1000)
    before = tensor.clone()
    monkeypatch.setattr(os, "pwrite", refuse(errno.ENOSPC))
    found = store.write(home_of(tensor))
    assert found is not None
    with pytest.raises(Lost, match="No space left"):
        found[1].wait()
    assert torch.equal(tensor, before)
    store.close()


def test_short_writes_and_reads_of_file_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda f, data, at: write(f, data[:777], at))
    monkeypatch.setattr(os, "preadv", lambda f, data, at: read(f, [data[0][:333]], at))
    store, tensor = FileStore(KIB * KIB, tmp_path), torch.randn(1000)
    assert torch.equal(there_and_back(store, tensor), tensor)
    store.close()


@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_read_or_write_of_file_that_moves_no_bytes_raises(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, call, lambda *arguments: 0)
    store = FileStore(KIB * KIB, tmp_path)
    with pytest.raises(Lost):
        there_and_back(store, torch.randn(1000))
    store.close()


def test_read_from_truncated_swap_file_raises(tmp_path: Path) -> None:
    store = FileStore(KIB * KIB, tmp_path)
    key = written(store, torch.randn(1000))
    os.ftruncate(store._file, 100)
    with pytest.raises(Lost, match="the swap file is shorter"):
        store.read(key, store.new_home(4000)).wait()
    store.close()


def test_read_of_changed_page_of_swap_file_raises(tmp_path: Path) -> None:
    store = FileStore(KIB * KIB, tmp_path)
    key = written(store, torch.randn(10_000))
    os.pwrite(store._file, bytes(4096), 8192)
    with pytest.raises(Lost, match="differ from those written"):
        store.read(key, store.new_home(40_000)).wait()
    store.close()


@pytest.mark.parametrize("nbytes", [1, 7, 8, 9, 8 * 2**14, 8 * 2**14 + 3, 3 * 8 * 2**14])
def test_checksum_of_swapped_value_covers_every_byte(tmp_path: Path, nbytes: int) -> None:
    store, tensor = FileStore(4 * KIB * KIB, tmp_path), torch.ones(nbytes, dtype=torch.uint8)
    assert torch.equal(there_and_back(store, tensor), tensor)
    for position in {0, nbytes // 2, nbytes - 1}:
        key = written(store, tensor)
        os.pwrite(store._file, b"\3", key.offset + position)  # type: ignore[attr-defined]
        with pytest.raises(Lost):
            store.read(key, store.new_home(nbytes)).wait()
    store.close()


def test_garbage_collected_file_store_does_not_wait_for_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python may collect the store while a thread starts, and until then no other thread can end.

    So waiting for the thread that writes would be a deadlock. A write in progress keeps its file
    and its memory until it has ended.
    """
    write, started, go_on = os.pwrite, threading.Event(), threading.Event()
    wrote: list[bytes] = []

    def slow(file: int, data: memoryview, at: int) -> int:
        started.set()
        assert go_on.wait(10)
        done = write(file, data, at)
        wrote.append(os.pread(file, done, at))
        return done

    monkeypatch.setattr(os, "pwrite", slow)
    store, home = FileStore(KIB * KIB, tmp_path), home_of(torch.ones(1000))
    there, file = weakref.ref(home), store._file
    found = store.write(home)
    assert found is not None
    assert started.wait(10)
    future = found[1].future  # type: ignore[attr-defined]
    del store, home, found
    gc.collect()
    assert there() is not None
    os.fstat(file)  # the file is still open
    go_on.set()
    assert future.result(10) > 0
    assert wrote == [torch.ones(1000).numpy().tobytes()]
    deadline = time.monotonic() + 10
    while there() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert there() is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


def test_file_store_freed_in_writing_thread_does_not_deadlock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector may free an ended budget in the writing thread."""
    store = FileStore(100 * KIB, tmp_path)
    write, reported, all_begun = os.pwrite, list[str](), threading.Event()

    def waiting(*arguments: Any) -> int:
        all_begun.wait()
        for way in ways[len(reported) :]:
            with pytest.raises(Lost) as lost:
                way.wait()
            reported.append(str(lost.value))
        return write(*arguments)

    monkeypatch.setattr(os, "pwrite", waiting)
    begun = [store.write(home_of(torch.randn(100))) for _ in range(2)]
    ways = [each[1] for each in begun if each is not None]
    all_begun.set()
    ways[1].wait()
    assert reported == ["the value was freed during the transfer"] * 2
    store.close()


def test_close_of_file_store_waits_for_started_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, order = os.pwrite, list[str]()

    def slow(*arguments: object) -> int:
        time.sleep(0.05)
        order.append("written")
        return write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "pwrite", slow)
    store = FileStore(KIB * KIB, tmp_path)
    found = store.write(home_of(torch.ones(1000)))  # only the store holds the memory
    assert found is not None
    store.close()
    assert order == ["written"]
    found[1].wait()
    with pytest.raises(Lost):
        store.read(found[0], store.new_home(4000))


def test_only_swap_files_of_ended_processes_are_removed(tmp_path: Path) -> None:
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"],
                          capture_output=True, text=True, check=True)  # fmt: skip
    me, since = os.getpid(), _file_store._started(os.getpid())
    names = {
        f"rekindle-swap-{gone.stdout.strip()}-5-{'a' * 16}": False,
        f"rekindle-swap-{me}-{since}-{'b' * 16}": True,
        f"rekindle-swap-{me}-{since - 1}-{'c' * 16}": False,  # an earlier process with the same id
        f"rekindle-swap-{me}-{since}-{'c' * 16}.txt": True,
        "rekindle-swap-notes": True,
    }
    for name in names:
        (tmp_path / name).write_text("")
    remove_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        name for name, stay in names.items() if stay
    }


CRASH = """
import os, signal, sys, pathlib, torch
if sys.argv[2] == "named":
    pathlib.Path.unlink = lambda self: None  # a system that keeps the names of open files
from rekindle.pytorch.swap._file_store import FileStore
store = FileStore(1 << 20, pathlib.Path(sys.argv[1]))
store.write(torch.ones(1000).untyped_storage())[1].wait()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("kind", "left"), [("unnamed", 0), ("named", 1)])
def test_swap_file_of_killed_process_is_removed_by_next_store(
    kind: str, left: int, tmp_path: Path
) -> None:
    subprocess.run([sys.executable, "-c", CRASH, str(tmp_path), kind], check=False)
    assert len(list(tmp_path.iterdir())) == left
    FileStore(KIB, tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def test_forked_file_store_reads_what_parent_wrote_before(tmp_path: Path) -> None:
    """The child writes nothing, and notices if the parent has written since."""
    store = FileStore(KIB * KIB, tmp_path)
    tensor = torch.ones(1000)
    key, other = written(store, tensor), written(store, 2 * tensor)
    ready = os.pipe()
    child = os.fork()
    if not child:
        wrong = 1
        try:
            home = store.new_home(4000)
            store.read(key, home).wait()
            wrong = int(not torch.equal(torch.empty(0).set_(home), tensor))
            wrong += 2 * (store.write(home_of(tensor)) is not None)
            os.read(ready[0], 1)
            store.read(other, home)
            wrong += 4
        except Lost as lost:
            wrong += 8 * ("the parent process has written" not in str(lost))
        finally:
            os._exit(wrong)
    store.release(other)
    written(store, 3 * tensor)
    os.write(ready[1], b"1")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    home = store.new_home(4000)
    store.read(key, home).wait()
    assert torch.equal(torch.empty(0).set_(home), tensor)
    store.close()
