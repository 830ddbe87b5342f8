"""Compile the library that pretends to be PyTorch's FakeTensor in C++."""

from __future__ import annotations

import functools
import hashlib
import os
import shlex
import subprocess
import sysconfig
from pathlib import Path
from typing import Final

import pytest
import torch

_HERE: Final = Path(__file__).parent
_CPP: Final = _HERE / "pretend.cpp"
_HEADERS: Final = _HERE / "include"
_TORCH: Final = Path(torch.__file__).parent
#: the file of torch that defines its FakeTensor mode, since torch 2.15
_MODE: Final = _TORCH / "include/c10/core/impl/FakeTensorModeTLS.h"


#: marks tests of a core that has its dispatch key for itself
ALONE: Final = pytest.mark.skipif(
    "PRETENDED_FAKE" in os.environ, reason="needs a core that has its dispatch key for itself"
)


@functools.cache
def environment() -> dict[str, str]:
    """Return the environment of a process that has a FakeTensor in C++.

    Its Python loads the library with torch. Its core is compiled for a torch that has the mode.
    """
    compiler = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    if not _MODE.exists():
        compiler += ["-I", str(_HEADERS)]
    folders = [str(_HERE / "autoload"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "CXX": shlex.join(compiler),
        "PYTHONPATH": os.pathsep.join(folders),
        "PRETENDED_FAKE": str(_library(compiler)),
    }


def _library(compiler: list[str]) -> Path:
    """Compile the library, unless the cache has it. Return its path."""
    includes = [_TORCH / "include", _TORCH / "include/torch/csrc/api/include"]
    command = [
        *compiler,
        *("-O1", "-std=c++20", "-fPIC", "-shared"),
        *([] if _MODE.exists() else ["-DREKINDLE_PRETENDS_MODE"]),
        *(f"-isystem{folder}" for folder in (*includes, sysconfig.get_paths()["include"])),
        *(str(_CPP), f"-L{_TORCH / 'lib'}", "-ltorch_cpu", "-lc10"),
    ]
    text = _CPP.read_text() + shlex.join(command) + torch.__version__
    folder = Path.home() / ".cache/rekindle-tests"
    made = folder / f"pretend-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    if not made.exists():
        folder.mkdir(parents=True, exist_ok=True)
        new = made.with_suffix(f".{os.getpid()}")
        subprocess.run([*command, "-o", str(new)], check=True)
        new.replace(made)
    return made
