"""Where this library keeps what it learned, from one process to the next: small files, no data."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`$REKINDLE_CACHE`, else `$XDG_CACHE_HOME/rekindle`, else `~/.cache/rekindle`; maybe not there
    yet."""
    folder = os.environ.get("REKINDLE_CACHE")
    if folder:
        return Path(folder)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "rekindle"
