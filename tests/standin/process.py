"""Compile the stand-in device once, and run `tests.standin.answers` in a process with it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch

from rekindle._cache import core_folder

SOURCES = Path(__file__).parent / "sources"
ROOT = Path(__file__).parents[2]


def compiled(compiler: str) -> Path:
    """Return the extension for this torch and these sources; compile it if it is missing."""
    made_for = f"{torch.__version__} {torch.__file__} {sys.version} {compiler}"
    digest = hashlib.sha256(made_for.encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.read_bytes())
    path = core_folder() / f"standin-{digest.hexdigest()[:16]}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            fresh = Path(folder) / path.name
            subprocess.run(_command(compiler, fresh), check=True, cwd=SOURCES)
            fresh.replace(path)  # atomic, because other processes may compile it as well
    return path


def _command(compiler: str, target: Path) -> list[str]:
    home = Path(torch.__file__).parent
    includes = [home / "include", home / "include" / "torch" / "csrc" / "api" / "include"]
    includes.append(Path(sysconfig.get_paths()["include"]))
    flags = ["-O1", "-std=c++20", "-fPIC", "-shared", "-w", "-DTORCH_EXTENSION_NAME=_standin"]
    library = home / "lib"
    links = ["-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10", f"-Wl,-rpath,{library}"]
    where = [argument for each in includes for argument in ("-isystem", str(each))]
    return [compiler, *flags, *where, "module.cpp", "-o", str(target), f"-L{library}", *links]


def asked(extension: Path, *questions: str, **environment: str) -> dict[str, Any]:
    """Ask `tests.standin.answers` questions in a process with the stand-in.

    Returns:
        The answer to each question. Indices read from overwritten memory may crash the process;
        then the answer to each question is the signal.
    """
    command = [sys.executable, "-W", "error", "-m", "tests.standin.answers", str(extension)]
    # With several threads, sums such as the gradient of an index differ from run to run.
    alone = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} | environment
    result = subprocess.run(
        [*command, *questions], capture_output=True, text=True, cwd=ROOT, check=False, env=alone
    )
    if result.returncode < 0:
        return {question: {"ended by signal": -result.returncode} for question in questions}
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])
