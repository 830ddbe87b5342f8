"""Puts native cores that are compiled already into a wheel: `scripts/wheels`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Prebuilt(BuildHookInterface):
    """$REKINDLE_PREBUILT: a folder of `rekindle build --into`. Without it the wheel is for all."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        folder = os.environ.get("REKINDLE_PREBUILT")
        if not folder or version == "editable":
            return
        cores = sorted(Path(folder).glob("*.so"))
        if not cores:
            raise FileNotFoundError(f"$REKINDLE_PREBUILT: no *.so in {folder}")
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        for core in cores:
            build_data["force_include"][str(core)] = f"rekindle/native/prebuilt/{core.name}"
