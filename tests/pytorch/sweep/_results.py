"""Write the file of results, one entry per database, each with its conditions."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks import _common

NAME = "sweeps"
RESULTS = f"benchmarks/results/{NAME}.json"


def results() -> dict[str, Any]:
    """Return the stored results, by database."""
    path = Path(_common.ROOT) / RESULTS
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write_results(database: str, counts: dict[str, Any], seconds: float) -> None:
    """Replace the stored results of `database` by `counts`."""
    conditions = _common.conditions()
    command = " ".join(["scripts/sweep", *(word for word in sys.argv[1:] if word != "--save")])
    entry = {**conditions, "command": command, "seconds": round(seconds), **counts}
    _common.write(NAME, {**results(), database: entry})
