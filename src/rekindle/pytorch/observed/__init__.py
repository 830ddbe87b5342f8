"""Observe a training step, for `rekindle.profile`, `estimate`, `verify` and `capture`.

All of these except `capture` leave the state of the program as it was.
"""

from rekindle.pytorch.observed._bookkeeping import prices as prices
from rekindle.pytorch.observed._compare import Failed as Failed
from rekindle.pytorch.observed._compare import differing as differing
from rekindle.pytorch.observed._estimate import Estimate as Estimate
from rekindle.pytorch.observed._estimate import estimate as estimate
from rekindle.pytorch.observed._phases import Phases as Phases
from rekindle.pytorch.observed._probe import Probe as Probe
from rekindle.pytorch.observed._profiler import observe as observe
from rekindle.pytorch.observed._step import capture as capture
from rekindle.pytorch.observed._step import capture_modules as capture_modules
from rekindle.pytorch.observed._verify import Verification as Verification
from rekindle.pytorch.observed._verify import verify as verify
