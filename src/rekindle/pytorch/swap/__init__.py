"""Swapping: copies of values in host memory or in a file, for swapping in instead of recomputing.

The native core decides which values to swap. A `Store` copies their bytes: from CUDA to page-locked
host memory, or from the CPU to a file.
"""

from rekindle.pytorch.swap._host_memory import HostMemory as HostMemory
from rekindle.pytorch.swap._host_memory import host_memory as host_memory
from rekindle.pytorch.swap._host_store import Copies as Copies
from rekindle.pytorch.swap._transfers import Transfers as Transfers
