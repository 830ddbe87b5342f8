"""Store swapped-out values of a CPU budget in a file, with one thread to write and one to read.

The store reads and writes at offsets (`os.preadv`, `os.pwrite`), not by a memory map. On a full
disk or a truncated file, a memory map ends the process (SIGBUS), while these calls return an error.
The calls release the GIL while they wait.

A checksum verifies the bytes that are read. The system may fail to write a page to the disk long
after the write call has succeeded. Later reads of this page return zeros.

The file is unlinked right after it is opened, so the system removes it when the process ends, even
after a crash. For systems where unlinking an open file fails, the file's name contains the process
id and its start time. The next store in the same directory then removes the files of ended
processes.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch

from rekindle import _clock
from rekindle._errors import Unsupported
from rekindle._types import Bytes, Nanoseconds
from rekindle.pytorch.swap._space import Space
from rekindle.pytorch.swap._store import Lost, Store, Transfer

_PIECE = 8 * 2**14
"""Number of bytes that a checksum sums at a time: the most that PyTorch sums in a single thread."""
_NAME = re.compile(r"rekindle-swap-(\d+)-(\d+)-[0-9a-f]{16}")
_FORKED = "its copy had not ended before a fork, whose child has no threads that copy"
_WRITTEN = "the parent process has written the swap file since this process was forked"
_thread = threading.local()


def _begin() -> None:
    """Mark the current thread as one that reads or writes a swap file."""
    _thread.moves = True


@final
class FileStore(Store):
    """Store of swapped-out values in a file of at most `limit` bytes in `directory`.

    Raises:
        Unsupported: No file can be made there, or Python lacks `os.pwrite` or `os.preadv`.
    """

    def __init__(self, limit: Bytes, directory: Path) -> None:
        if not hasattr(os, "pwrite") or not hasattr(os, "preadv"):
            raise Unsupported(
                "swap=...: Python has no os.pwrite and os.preadv on this "
                "system, which swapping needs; leave out swap=, so that values are recomputed"
            )
        self.limit = limit
        self._file = _open(directory)
        self._space = Space(limit)
        self._process = os.getpid()
        self._out = ThreadPoolExecutor(1, "rekindle-swap-out", _begin)
        self._back = ThreadPoolExecutor(1, "rekindle-swap-in", _begin)
        #: Running transfers. Each keeps its storage alive until the store's thread has finished.
        self._moving: set[_Job] = set()
        self._end = weakref.finalize(
            self, _end, self._file, self._process, self._moving, self._out, self._back
        )

    @property
    def used(self) -> Bytes:
        return self._space.used

    @property
    def here(self) -> bool:
        """True in the process that opened the swap file, until the store is closed.

        A forked process has no threads of this store, and does not know later changes of the file.
        It writes nothing, and reads in the thread that asks. The checksum detects other contents.
        """
        return os.getpid() == self._process and self._end.alive

    def write(self, home: torch.UntypedStorage) -> tuple[object, Transfer] | None:
        offset = self._space.take(home.nbytes()) if self.here else None
        if offset is None:
            return None
        block = _Block(offset, home.nbytes())
        try:
            return block, self._start(self._out, _write, block, home)
        except Lost:
            self.release(block)
            return None

    def read(self, key: object, home: torch.UntypedStorage) -> Transfer:
        assert isinstance(key, _Block)
        if self.here:
            return self._start(self._back, _read, key, home)
        if not self._end.alive:
            raise Lost("the swap file is closed")
        done: Future[Nanoseconds] = Future()
        try:
            done.set_result(_read(self._file, home.data_ptr(), key))
        except OSError:
            raise Lost(_WRITTEN) from None
        return _Job(done, home, self._moving, self)

    def release(self, key: object) -> None:
        assert isinstance(key, _Block)
        if self.here:
            self._space.give_back(key.offset, key.nbytes)

    def new_home(self, nbytes: Bytes) -> torch.UntypedStorage:
        return torch.empty(nbytes, dtype=torch.uint8).untyped_storage()

    def close(self) -> None:
        if self.here:
            for pool in (self._out, self._back):
                pool.shutdown(wait=True, cancel_futures=True)
        self._end()

    def _start(
        self,
        pool: ThreadPoolExecutor,
        move: Callable[[int, int, _Block], Nanoseconds],
        block: _Block,
        home: torch.UntypedStorage,
    ) -> Transfer:
        """Start a transfer between the storage `home` and a block of the file."""
        try:
            future = pool.submit(move, self._file, home.data_ptr(), block)
        except RuntimeError as error:  # the pool cannot start a thread, or Python is shutting down
            raise Lost(str(error)) from None
        job = _Job(future, home, self._moving, self)
        self._moving.add(job)
        return job


@final
class _Job(Transfer):
    """One transfer between a storage and the swap file, made by a thread of the store.

    The thread has only the address of the storage, so this object keeps the storage alive.
    """

    def __init__(
        self,
        future: Future[Nanoseconds],
        home: torch.UntypedStorage,
        moving: set[_Job],
        store: FileStore,
    ) -> None:
        self._future = future
        self._home: torch.UntypedStorage | None = home
        self._moving = moving
        self._store = weakref.ref(store)
        self._process = os.getpid()
        self._ns: Nanoseconds = 0
        self._waiting_ns: Nanoseconds = 0

    @property
    def ns(self) -> Nanoseconds:
        return self._ns

    @property
    def waiting_ns(self) -> Nanoseconds:
        return self._waiting_ns

    @property
    def future(self) -> Future[Nanoseconds]:
        return self._future

    @property
    def _forked(self) -> bool:
        """True in a forked process. The store's threads are missing there, so no transfer ends."""
        return os.getpid() != self._process

    def ended(self) -> bool:
        return self._forked or self._future.done()

    def wait(self) -> None:
        if self._forked:
            raise Lost(_FORKED)
        store, start = self._store(), _clock.now()
        if not self._future.done():
            if store is None or not store.here:
                raise Lost("the swap file was closed during the transfer")
            if getattr(_thread, "moves", False):
                # The garbage collector runs this method in the store's own thread. This thread must
                # finish the transfer, so waiting here would be a deadlock.
                raise Lost("the value was freed during the transfer")
        try:
            # Get the exception of the transfer without raising it, because its traceback would keep
            # the storage alive.
            error = self._future.exception()
        except CancelledError:
            error = OSError("the swap file was closed")
        self._waiting_ns = _clock.now() - start
        self._home = None
        self._moving.discard(self)
        if error is not None:
            raise Lost(str(error))
        self._ns = self._future.result()


@final
@dataclass(slots=True)
class _Block:
    """A part of the swap file that holds one value."""

    offset: int
    nbytes: Bytes
    sum: int = 0  #: checksum of the value, set by `_write`


def _write(file: int, address: int, block: _Block) -> Nanoseconds:
    """Write the memory at `address` to `block` of the swap file. Return the duration (ns)."""
    start = _clock.now()
    memory, done = _view(address, block.nbytes), 0
    block.sum = _sum(memory)
    while done < block.nbytes:
        wrote = os.pwrite(file, memory[done:], block.offset + done)
        if not wrote:
            raise OSError(errno.ENOSPC, "the swap file accepts no more bytes")
        done += wrote
    return _clock.now() - start


def _read(file: int, address: int, block: _Block) -> Nanoseconds:
    """Read `block` of the swap file into the memory at `address`, and verify its checksum.

    Returns:
        The duration (ns).

    Raises:
        OSError: The file is too short, or the checksum is wrong.
    """
    start = _clock.now()
    memory, done = _view(address, block.nbytes), 0
    while done < block.nbytes:
        got = os.preadv(file, [memory[done:]], block.offset + done)
        if not got:
            raise OSError(errno.EIO, "the swap file is shorter than the bytes written to it")
        done += got
    if _sum(memory) != block.sum:
        raise OSError(errno.EIO, "the bytes read from the swap file differ from those written")
    return _clock.now() - start


def _view(address: int, nbytes: Bytes) -> memoryview:
    """Return `nbytes` of memory at `address` as a `memoryview`."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def _sum(memory: memoryview) -> int:
    """Return a checksum (64 bits) of the bytes in `memory`."""
    whole = len(memory) // 8 * 8
    total = int.from_bytes(memory[whole:], "little")
    for start in range(0, whole, _PIECE):
        words = torch.frombuffer(memory[start : min(start + _PIECE, whole)], dtype=torch.int64)
        # The factor 31 makes the checksum depend on the order of the pieces.
        total = (31 * total + int(words.sum())) % 2**64
    return total


# -- the swap file ---------------------------------------------------------------------------------


def _open(directory: Path) -> int:
    """Make a swap file in `directory`, open it for reading and writing, and unlink it.

    Returns:
        The file descriptor.
    """
    remove_leftovers(directory)
    name = f"rekindle-swap-{os.getpid()}-{_started(os.getpid())}-{os.urandom(8).hex()}"
    path = directory / name
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
    try:
        file = os.open(path, flags, 0o600)  # only the user may read activations
    except OSError as error:
        raise Unsupported(
            f"swap_directory={str(directory)!r}: no swap file can be made there: "
            f"{error.strerror}. Name a folder that exists and can be written: "
            'swap="32GiB", swap_directory="/path"'
        ) from error
    with suppress(OSError):
        path.unlink()
    return file


def remove_leftovers(directory: Path) -> None:
    """Remove swap files of processes that have ended from `directory`.

    A process in another container seems to have ended, so its file is unlinked. That process can
    still use the file, which it has open.
    """
    with suppress(OSError):
        for path in directory.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and _started(int(match[1])) not in (0, int(match[2])):
                with suppress(OSError):
                    path.unlink()


def _started(process: int) -> int:
    """Return the start time of a process in clock ticks, 0 if unknown, -1 if it has ended."""
    with suppress(OSError, ValueError, IndexError):
        status = Path(f"/proc/{process}/stat").read_text()
        return int(status.rpartition(")")[2].split()[19])  # field 22 of proc(5): the start time
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return -1
    except OSError:
        pass
    return 0


def _end(
    file: int, owner: int, moving: set[_Job], out: ThreadPoolExecutor, back: ThreadPoolExecutor
) -> None:
    """Make the swap file close once all running transfers have ended.

    This function does not wait for the transfers. The garbage collector may call it at any point,
    even while a thread is being started, when waiting for a thread would be a deadlock.
    """
    jobs: list[_Job] = []
    # A forked process has no threads of the store, so it has no transfers to wait for.
    if os.getpid() == owner:
        for pool in (out, back):
            pool.shutdown(wait=False, cancel_futures=True)
        jobs.extend(moving)
    moving.clear()
    end = _End(file, jobs)
    for job in jobs:
        job.future.add_done_callback(end)
    end()


@final
class _End:
    """A callback that closes the swap file after its last transfer.

    Until the file is closed, this object keeps the storages of the transfers alive.
    """

    def __init__(self, file: int, jobs: list[_Job]) -> None:
        self._files = [file]
        self._jobs = jobs

    def __call__(self, _: object = None) -> None:
        if all(job.future.done() for job in self._jobs):
            # Another thread, whose transfer ended at the same time, may have closed the file.
            with suppress(IndexError):
                os.close(self._files.pop())
            self._jobs = []
