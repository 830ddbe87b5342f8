"""`guard()`: end all ranks when one fails, as the others would wait in their next collective.

The rank that fails writes the reason into the store of the process group. A thread of each other
rank polls the store every half second. It must, because an NCCL collective does not return, and one
of gloo fails with an error that does not name the reason. A process then gets a few seconds to end,
and is ended if it does not: exit handlers of process groups may wait for ranks that have ended.
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

    Every rank enters it after `init_process_group`. The rank that fails prints why, writes
    torchelastic's error file, aborts its collectives and raises on. The other ranks print which
    rank it was and exit with code 1, so that torchrun ends or restarts the job. Without a process
    group it does nothing.

    Args:
        grace_s: Seconds until a process that has not ended is ended without its exit handlers. Save
            checkpoints before.

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
    """Polls the store for the failure of another rank."""

    def __init__(self, grace_s: float) -> None:
        super().__init__(name="rekindle-guard", daemon=True)
        self.over = threading.Event()
        self._rank = dist.get_rank()
        self._grace_s = grace_s
        store: Any = dist.distributed_c10d._get_default_store()
        self._store = store
        self._looking = store.clone()  # its own connection, since the first may be blocked
        self._attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")

    @property
    def _key(self) -> str:
        return f"{_KEY}/{self._attempt}"

    def run(self) -> None:
        while not self.over.wait(_LOOK_S):
            try:
                reason = self._reason()
            except RuntimeError:  # the rank with the store has ended, so collectives fail as well
                return
            if reason:
                self._tell(f"{reason}. Rank {self._rank} waited for it, and ends")
                self._end_soon()
                return

    def failed(self, error: Exception) -> None:
        """Publish the failure of this rank, print the first failure, and end the process soon."""
        self.over.set()
        first = str(error).partition("\n")[0]
        mine = f"rank {self._rank} failed: {type(error).__name__}: {first}"
        reason = mine
        with suppress(RuntimeError):
            reason = self._looking.compare_set(self._key, "", mine).decode()
        if reason == mine:
            self._tell(mine)
            get_error_handler().record_exception(error)
        else:  # a collective failed because another rank has failed
            self._tell(f"{reason}. Rank {self._rank} ends with it")
            error.add_note(reason)
        abort: Any = getattr(dist.distributed_c10d, "_abort_process_group", None)
        with suppress(Exception):  # gloo cannot be aborted, and need not be
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
