"""Keep measured workspaces of operators on the CPU in a file, for later processes.

The workspace of an operator is the memory that it uses internally while it runs. Without the file,
a process knows the workspace of an operator only after the operator's first call. If the
budget then refuses memory to that call, values are evicted and it runs again. With the file, room
for the workspace is made before the first call.

There is one file for each version of torch, number of threads, instruction set, and setting of
oneDNN, because workspaces depend on these. A wrong or damaged file changes no results: its numbers
only decide what is evicted before a first call.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, final

import torch

from rekindle._cache import cache_folder, store
from rekindle._types import Bytes
from rekindle.pytorch.native._module import Core

MOST: Final = 20_000
"""Most workspaces to store in a file. The latest are kept."""


@final
class _Recalled:
    """The file of workspaces of operators that this process has read."""

    path: Path | None = None


@contextmanager
def workspaces_kept(core: Core) -> Iterator[None]:
    """Inside the block, use the workspaces of earlier processes. At its end, store the new ones.

    Does nothing if there is no cache folder. If the settings in the name of the file change inside
    the block, its measurements are not stored.
    """
    path = _path()
    if path != _Recalled.path:
        found = {} if path is None else _read(path)
        core.remember_workspaces(list(found), list(found.values()))
        _Recalled.path = path
    try:
        yield
    finally:
        new = dict(core.take_new_workspaces())
        if new and path is not None and path == _path():
            # Another process may have written the file since it was read. Keep its workspaces, and
            # add the new ones as the latest.
            others = {key: each for key, each in _read(path).items() if key not in new}
            store(path, json.dumps(dict([*others.items(), *new.items()][-MOST:])))


def _path() -> Path | None:
    """Return the file for the present settings, or None if there is no cache folder."""
    folder = cache_folder()
    if folder is None:
        return None
    mkldnn = "onednn" if torch._C._get_mkldnn_enabled() else "native"  # type: ignore[attr-defined]
    parts = [platform.machine(), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()]
    name = "-".join(map(str, ["workspaces", *parts, mkldnn, f"torch{torch.__version__}"]))
    return folder / f"{''.join(c if c.isalnum() else '-' for c in name)}.json"


def _read(path: Path) -> dict[int, Bytes]:
    """Read a file of workspaces (bytes), by the number of the operator call's signature.

    Return an empty dict if the file is damaged.
    """
    with suppress(OSError, ValueError, TypeError, AttributeError, OverflowError):
        stored = json.loads(path.read_text(encoding="utf-8"))
        found = {int(number): int(nbytes) for number, nbytes in stored.items()}
        if all(0 <= each < 1 << 62 for pair in found.items() for each in pair):
            return found
    return {}
