"""Compile C++ programs and libraries of tests, as the native core is compiled."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from rekindle.native import _build


def compiler() -> list[str]:
    """Return the command of the C++ compiler. Skip the test if there is none."""
    command = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    if sys.platform != "linux" or shutil.which(command[0]) is None:
        pytest.skip("needs Linux and a C++ compiler")
    return command


def compiled(made: Path, sources: Sequence[Path], *options: str, using: Sequence[str] = ()) -> Path:
    """Compile `sources` with PyTorch's headers into the file `made`.

    Args:
        made: The file to write.
        sources: The C++ files.
        options: More options of the compiler, libraries last.
        using: The command of the compiler. Default: `compiler()`.

    Returns:
        `made`.
    """
    command = [*(using or compiler()), *_build.FLAGS, *_build._torch().flags]
    subprocess.run([*command, *map(str, sources), "-o", str(made), *options], check=True)
    return made
