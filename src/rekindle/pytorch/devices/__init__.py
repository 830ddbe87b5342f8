"""Functions that query and control an accelerator, in the only file that names `torch.cuda`."""

from rekindle.pytorch.devices import _cuda as accelerator
from rekindle.pytorch.devices._cuda import is_accelerator as is_accelerator
from rekindle.pytorch.devices._cuda import is_full as is_full
from rekindle.pytorch.devices._cuda import is_out_of_memory as is_out_of_memory
from rekindle.pytorch.devices._cuda import rounded as rounded

__all__ = ["accelerator", "is_accelerator", "is_full", "is_out_of_memory", "rounded"]
