"""Put compiled native cores into a wheel, or compile them for the environment that installs it.

`scripts/wheels` compiles cores first and names their folder: those become part of the wheel. A
plain `pip install .` compiles them into the user's cache instead, if PyTorch is already installed
and a compiler is at hand. That never fails an installation: else a line says why they are not
compiled (`pip install -v .` shows it), and they are compiled on first use.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_SECONDS = 600.0  # for both cores on a slow machine
_BUILD = """
import sys
sys.path.insert(0, sys.argv[1])
from rekindle.native import build_ahead
print(build_ahead())
"""  # the dependencies of Rekindle other than PyTorch are not installed yet


class NativeCores(BuildHookInterface):
    """Take cores from $REKINDLE_PREBUILT, else compile them unless REKINDLE_BUILD=off."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        folder = os.environ.get("REKINDLE_PREBUILT")
        if not folder:
            if os.environ.get("REKINDLE_BUILD") != "off":
                why_not = _compile_for_this_environment(Path(self.root, "src"))
                self.app.display_info(
                    f"The native core was not compiled: {why_not}. The first budget compiles it; "
                    "`rekindle build` compiles it ahead of time."
                    if why_not
                    else "The native core is compiled, for this PyTorch and compiler."
                )
            return
        cores = sorted(Path(folder).glob("*.so"))
        if not cores:
            raise FileNotFoundError(f"$REKINDLE_PREBUILT: no *.so in {folder}")
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        for core in cores:
            build_data["force_include"][str(core)] = f"rekindle/native/prebuilt/{core.name}"


def _compile_for_this_environment(source: Path) -> str:
    """Compile for the PyTorch of the environment that runs pip.

    pip builds in an environment of its own, which it makes by PYTHONPATH: `-I` leaves that out.

    Returns:
        An empty string, or why the cores were not compiled.
    """
    command = [sys.executable, "-I", "-c", _BUILD, str(source)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False,
            timeout=_SECONDS,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    if done.returncode:
        return f"the compilation ended with exit code {done.returncode}"
    return done.stdout.strip()
