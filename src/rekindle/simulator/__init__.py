"""The simulator: replays recorded traces within any budget and with any policy."""

from rekindle._public import publish
from rekindle.simulator._curve import Point as Point
from rekindle.simulator._curve import curve as curve
from rekindle.simulator._curve import fits as fits
from rekindle.simulator._curve import smallest_budget as smallest_budget
from rekindle.simulator._placement import AllocatorName as AllocatorName
from rekindle.simulator._placement import Device as Device
from rekindle.simulator._placement import Placement as Placement
from rekindle.simulator._placement import Repair as Repair
from rekindle.simulator._replay import Run as Run
from rekindle.simulator._replay import replay as replay
from rekindle.simulator._scaled import at_batch as at_batch
from rekindle.simulator._simulate import simulate as simulate
from rekindle.simulator._sweep import RATIOS as RATIOS
from rekindle.simulator._sweep import Case as Case
from rekindle.simulator._sweep import Outcome as Outcome
from rekindle.simulator._sweep import cases as cases
from rekindle.simulator._sweep import run_case as run_case
from rekindle.simulator._sweep import sweep as sweep

publish("rekindle", [simulate])
