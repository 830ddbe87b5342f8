"""Run pytest with the arguments given, beside a FakeTensor in C++."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.pretend_fake.build import environment


def main() -> None:
    """Run pytest. End with its exit status."""
    command = [sys.executable, "-m", "pytest", *sys.argv[1:]]
    with TemporaryDirectory() as folder:
        there = os.environ | environment(Path(folder))
        sys.exit(subprocess.run(command, env=there, check=False).returncode)


if __name__ == "__main__":
    main()
