"""Locate the folders for files that outlive a process: compiled cores and learned data.

Learned data are measured costs, workspaces and plans. This module only computes paths; its callers
create the folders, write the files and delete them.
"""

from __future__ import annotations

import os
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
    return None if os.environ.get("REKINDLE_CACHE") == OFF else _base()


def core_folder() -> Path:
    """Return the folder for compiled cores. `REKINDLE_CACHE=off` does not affect it.

    Raises:
        RuntimeError: The user has no home folder.
    """
    return _base() / "cores"


def _base() -> Path:
    chosen = os.environ.get("REKINDLE_CACHE")
    if chosen and chosen != OFF:
        return Path(chosen).absolute()
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (xdg if xdg.is_absolute() else Path.home() / ".cache") / "rekindle"
