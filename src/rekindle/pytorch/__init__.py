"""Everything that runs PyTorch programs within a budget. The only part that imports torch."""

from rekindle._public import publish
from rekindle.pytorch.context import Run as Run
from rekindle.pytorch.context import budget as budget
from rekindle.pytorch.context import environment as environment
from rekindle.pytorch.context import never_recompute as never_recompute
from rekindle.pytorch.native import recomputable as recomputable
from rekindle.pytorch.native import ship_native_core as ship_native_core
from rekindle.pytorch.native import why_no_native_core as why_no_native_core
from rekindle.pytorch.observed import Estimate as Estimate
from rekindle.pytorch.observed import Phases as Phases
from rekindle.pytorch.observed import Probe as Probe
from rekindle.pytorch.observed import Verification as Verification
from rekindle.pytorch.observed import capture as capture
from rekindle.pytorch.observed import estimate as estimate
from rekindle.pytorch.observed import observe as observe
from rekindle.pytorch.observed import prices as prices
from rekindle.pytorch.observed import verify as verify
from rekindle.pytorch.online import device_of_program as device_of_program

publish("rekindle", [Estimate, Run, Verification, capture, estimate, verify])
publish("rekindle", [budget, never_recompute, recomputable])
