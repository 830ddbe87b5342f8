"""To the host and back: values that are copied away instead of being computed again."""

from rekindle.pytorch.swap._copies import Copies as Copies
from rekindle.pytorch.swap._host_memory import HostMemory as HostMemory
from rekindle.pytorch.swap._host_memory import host_memory as host_memory
from rekindle.pytorch.swap._transfers import Transfers as Transfers
