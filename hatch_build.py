"""Put compiled native cores into a wheel, or compile them for the environment that installs it.

`scripts/wheels` compiles cores first and names their folder: those become part of the wheel. A
plain `pip install .` compiles them into the user's cache instead, if PyTorch is already installed
and a compiler is at hand. That never fails an installation: else they are compiled on first use.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_SECONDS = 600.0  # for both cores on a slow machine
_BUILD = """
import importlib.util, sys
sys.path.insert(0, sys.argv[1])
if all(map(importlib.util.find_spec, ("torch", "numpy", "click", "rich"))):
    from rekindle.cli import main
    main(["build"])
"""


class NativeCores(BuildHookInterface):
    """Take cores from $REKINDLE_PREBUILT, else compile them unless REKINDLE_BUILD=off."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        folder = os.environ.get("REKINDLE_PREBUILT")
        if not folder:
            if os.environ.get("REKINDLE_BUILD") != "off":
                _compile_for_this_environment(Path(self.root, "src"))
            return
        cores = sorted(Path(folder).glob("*.so"))
        if not cores:
            raise FileNotFoundError(f"$REKINDLE_PREBUILT: no *.so in {folder}")
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        for core in cores:
            build_data["force_include"][str(core)] = f"rekindle/native/prebuilt/{core.name}"


def _compile_for_this_environment(source: Path) -> None:
    """Compile for the PyTorch of the environment that runs pip.

    pip builds in an environment of its own, which it makes by PYTHONPATH: `-I` leaves that out.
    """
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run(
            [sys.executable, "-I", "-c", _BUILD, str(source)],
            stdin=subprocess.DEVNULL,
            check=False,
            timeout=_SECONDS,
        )
