"""Where benchmarks leave their figures: results/NAME.json with command, machine and versions."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

import rekindle


def write(name: str, figures: object) -> None:
    here = Path(__file__).parent
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False
    ).stdout.strip()
    processor = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((x.split(":")[1].strip() for x in lines if "model name" in x), processor)
    result = {
        "command": " ".join(["python", f"benchmarks/{name}.py", *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit,
        "machine": f"{processor}, {len(os.sched_getaffinity(0))} cores, shared with other work",
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "rekindle": rekindle.__version__,
        },
        "figures": figures,
    }
    path = here / "results" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
