"""Locate and write files that outlive a process: compiled cores and learned data.

Learned data are measured costs, workspaces and plans. Callers name, read and delete the files.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

OFF: Final = "off"


def cache_folder() -> Path | None:
    """Return the folder for learned data, which may not exist yet.

    Returns:
        `$REKINDLE_CACHE` if it is set. Else `$XDG_CACHE_HOME/rekindle` if that path is absolute;
        the XDG Base Directory Specification says to ignore relative ones. Else
        `~/.cache/rekindle`. None if `REKINDLE_CACHE=off`: learned data are neither kept nor used.

    Raises:
        RuntimeError: The user has no home folder.
    """
    return None if _chosen()[0] else _base()


def core_folder() -> Path:
    """Return the folder for compiled cores. `REKINDLE_CACHE=off` does not affect it.

    Raises:
        RuntimeError: The user has no home folder.
    """
    return _base() / "cores"


def switch_off() -> None:
    """Neither keep nor use learned data from now on, in this process and those that it starts.

    Compiled cores stay in the folder in which they are.
    """
    off, folder = _chosen()
    if not off:
        os.environ["REKINDLE_CACHE"] = f"{OFF}:{folder}" if folder else OFF


def store(path: Path, text: str) -> None:
    """Write a file of learned data, completely or not at all, and create its folder if necessary.

    Errors of the file system are ignored, because a cache that cannot be written must not stop the
    program.

    Args:
        path: The file.
        text: The new content of the file.
    """
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, unfinished = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(unfinished, path)


def _chosen() -> tuple[bool, str]:
    """Return True if learned data are switched off, and the folder that the user has chosen."""
    text = os.environ.get("REKINDLE_CACHE", "")
    off = text == OFF or text.startswith(f"{OFF}:")
    return off, text[len(OFF) + 1 :] if off else text


def _base() -> Path:
    if folder := _chosen()[1]:
        return Path(folder).absolute()
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (xdg if xdg.is_absolute() else Path.home() / ".cache") / "rekindle"
