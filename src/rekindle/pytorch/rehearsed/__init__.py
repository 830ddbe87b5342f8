"""Run steps on fake tensors, to find the memory that they need without allocating it."""

from rekindle.pytorch.rehearsed._costs import Costs as Costs
from rekindle.pytorch.rehearsed._fakes import FakeStep as FakeStep
from rekindle.pytorch.rehearsed._forecast import Forecast as Forecast
from rekindle.pytorch.rehearsed._forecast import forecast as forecast
from rekindle.pytorch.rehearsed._moving_needs import LEAST_MOVED as LEAST_MOVED
from rekindle.pytorch.rehearsed._moving_needs import ON_LISTS as ON_LISTS
from rekindle.pytorch.rehearsed._moving_needs import MovingNeeds as MovingNeeds
