"""Compile the library that pretends to be PyTorch's FakeTensor in C++."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Final

import pytest
import torch

from rekindle.native import _build
from tests.cpp import compiled, compiler

_HERE: Final = Path(__file__).parent
#: the file of torch that defines its FakeTensor mode, since torch 2.15
_MODE: Final = Path(torch.__file__).parent / "include/c10/core/impl/FakeTensorModeTLS.h"

#: marks tests of a core that has its dispatch key for itself
ALONE: Final = pytest.mark.skipif(
    "PRETENDED_FAKE" in os.environ, reason="needs a core that has its dispatch key for itself"
)


def environment(folder: Path) -> dict[str, str]:
    """Compile the library in `folder`. Return the environment of a process that has it.

    Python loads the library with torch. The core is compiled for a torch that has the mode.
    """
    command, defined = compiler(), []
    if not _MODE.exists():
        command += ["-I", str(_HERE / "include")]
        defined = ["-DREKINDLE_PRETENDS_MODE"]
    library = compiled(
        folder / "pretend.so", [_HERE / "pretend.cpp"],
        *defined, "-shared", "-fvisibility=default", *_build._torch().links, using=command,
    )  # fmt: skip
    folders = [str(_HERE / "autoload"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "CXX": shlex.join(command),
        "PYTHONPATH": os.pathsep.join(folders),
        "PRETENDED_FAKE": str(library),
    }
