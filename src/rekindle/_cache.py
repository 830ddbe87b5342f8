"""Say where files are kept from one process to the next: compiled cores, and what was learned."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

OFF: Final = "off"


def cache_folder() -> Path | None:
    """Return the folder for what is learned; it may not exist yet.

    Returns:
        `$REKINDLE_CACHE`, else `$XDG_CACHE_HOME/rekindle` if that is an absolute path (others are
        to be ignored: XDG Base Directory Specification), else `~/.cache/rekindle`. None with
        `REKINDLE_CACHE=off`: then nothing learned is kept or used.

    Raises:
        RuntimeError: there is no home folder.
    """
    return None if os.environ.get("REKINDLE_CACHE") == OFF else _base()


def core_folder() -> Path:
    """Return the folder for compiled cores: `cores` in the cache, also with `REKINDLE_CACHE=off`.

    Raises:
        RuntimeError: there is no home folder.
    """
    return _base() / "cores"


def _base() -> Path:
    chosen = os.environ.get("REKINDLE_CACHE")
    if chosen and chosen != OFF:
        return Path(chosen).absolute()
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (xdg if xdg.is_absolute() else Path.home() / ".cache") / "rekindle"
