"""Run steps on fake tensors, to find the memory that they need without allocating it."""

from rekindle.pytorch.rehearsed._fakes import Fakes as Fakes
from rekindle.pytorch.rehearsed._fakes import MadeUp as MadeUp
from rekindle.pytorch.rehearsed._fakes import as_on_device as as_on_device
from rekindle.pytorch.rehearsed._forecast import Forecast as Forecast
from rekindle.pytorch.rehearsed._forecast import Known as Known
from rekindle.pytorch.rehearsed._forecast import forecast as forecast
from rekindle.pytorch.rehearsed._tracer import Tracer as Tracer
