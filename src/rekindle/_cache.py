"""Where this library keeps what it learned, from one process to the next: small files, no data."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

OFF: Final = "off"


def cache_folder() -> Path | None:
    """`$REKINDLE_CACHE`, else `$XDG_CACHE_HOME/rekindle`, else `~/.cache/rekindle`; maybe not there
    yet. None: `REKINDLE_CACHE=off`, nothing is kept."""
    folder = os.environ.get("REKINDLE_CACHE")
    if folder:
        return None if folder == OFF else Path(folder)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "rekindle"
