"""Let the tests of this folder import the modules of `benchmarks/`."""

from __future__ import annotations

import sys

from tests.changed import ROOT

sys.path.append(str(ROOT / "benchmarks"))
