"""`guard()`: end all ranks when one fails; otherwise they would wait in their next collective.

The rank that fails writes the reason into the store of the process group. In each other rank a
thread polls the store every half second. Without that thread an NCCL collective would never return,
and a gloo collective would fail with an error that does not name the reason. Each process then gets
a few seconds to end. After them `os._exit` ends the process, because exit handlers of process
groups may wait forever for ranks that have ended.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, final

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

_KEY: Final = "rekindle/failed"
_LOOK_S: Final = 0.5


@contextmanager
def guard(*, grace_s: float = 5.0) -> Iterator[None]:
    """End the job within seconds, and with a reason, when one rank fails inside.

    Every rank enters it after `init_process_group`. The rank that fails prints the reason, writes
    torchelastic's error file, aborts its collectives and raises the error on. The other ranks print
    which rank failed and exit with code 1, so that torchrun ends or restarts the job. Without a
    process group it does nothing.

    Args:
        grace_s: Seconds between the failure and the end of the process without its exit handlers.
            A checkpoint after a failure must be saved within this time.

    Example:
        ```python
        with rekindle.distributed.guard(), rekindle.budget("60GiB"):
            train()
        ```
    """
    if not dist.is_initialized():
        yield
        return
    watch = _Watch(grace_s)
    watch.start()
    try:
        yield
    except Exception as error:
        watch.failed(error)
        raise
    finally:
        watch.over.set()


@final
class _Watch(threading.Thread):
    """The thread of one rank that polls the store for the failure of another rank."""

    def __init__(self, grace_s: float) -> None:
        super().__init__(name="rekindle-guard", daemon=True)
        self.over = threading.Event()
        self._rank = dist.get_rank()
        self._grace_s = grace_s
        store: Any = dist.distributed_c10d._get_default_store()
        self._store = store
        # Use a second connection to the store, because a collective may block the first one.
        self._looking = store.clone()
        self._attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")

    @property
    def _key(self) -> str:
        return f"{_KEY}/{self._attempt}"

    def run(self) -> None:
        while not self.over.wait(_LOOK_S):
            try:
                reason = self._reason()
            # rank 0, which keeps the store, has ended, so collectives of this rank will fail too
            except RuntimeError:
                return
            if reason:
                self._tell(f"{reason}. Rank {self._rank} waited for it, and ends")
                self._end_soon()
                return

    def failed(self, error: Exception) -> None:
        """Write the failure of this rank into the store, print the reason, and end within seconds.

        If another rank has failed before, its failure is the reason.
        """
        self.over.set()
        first = str(error).partition("\n")[0]
        mine = f"rank {self._rank} failed: {type(error).__name__}: {first}"
        reason = mine
        with suppress(RuntimeError):
            reason = self._looking.compare_set(self._key, "", mine).decode()
        if reason == mine:
            self._tell(mine)
            get_error_handler().record_exception(error)
        else:  # another rank has failed first, which made a collective of this rank fail
            self._tell(f"{reason}. Rank {self._rank} ends with it")
            error.add_note(reason)
        abort: Any = getattr(dist.distributed_c10d, "_abort_process_group", None)
        with suppress(Exception):  # process groups of gloo cannot be aborted, and do not need it
            abort()
        self._end_soon()

    def _reason(self) -> str:
        if not self._looking.check([self._key]):
            return ""
        return self._looking.get(self._key).decode()

    def _tell(self, what: str) -> None:
        sys.stdout.flush()
        sys.stderr.write(f"rekindle.distributed.guard: {what}\n")
        sys.stderr.flush()

    def _end_soon(self) -> None:
        end = threading.Timer(self._grace_s, os._exit, (1,))
        end.daemon = True
        end.start()
