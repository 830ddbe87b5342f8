"""Eviction of memory that the program's own variables hold (`evict="auto"`, `evict="anything"`).

The native core evicts such memory and recomputes it when an operator reads it. This package
intercepts other accesses to a tensor's memory (such as `data_ptr()`), and finds out which threads
may read tensors.
"""

from rekindle.pytorch.held._escapes import held_evicted as held_evicted
from rekindle.pytorch.held._escapes import present as present
from rekindle.pytorch.held._evict_held import thread_registered as thread_registered
from rekindle.pytorch.held._placeholders import can_make_placeholders as can_make_placeholders
from rekindle.pytorch.held._placeholders import flag_of_reading as flag_of_reading
from rekindle.pytorch.held._threads import OURS as OURS
