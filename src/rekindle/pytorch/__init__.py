"""Runs PyTorch programs within a budget. The only part that imports torch."""

from rekindle.pytorch._bookkeeping import prices as prices
from rekindle.pytorch._budget import Run as Run
from rekindle.pytorch._budget import budget as budget
from rekindle.pytorch._budget import never_recompute as never_recompute
from rekindle.pytorch._estimate import Estimate as Estimate
from rekindle.pytorch._estimate import estimate as estimate
from rekindle.pytorch._probe import Probe as Probe
from rekindle.pytorch._profiler import observe as observe
from rekindle.pytorch._step import capture as capture
from rekindle.pytorch._verify import Verification as Verification
from rekindle.pytorch._verify import verify as verify
