"""Describe the installed PyTorch, its devices and the native core, for `rekindle doctor`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import final

import torch

from rekindle._errors import Unsupported
from rekindle._units import format_bytes
from rekindle.pytorch.context._auto import available
from rekindle.pytorch.context._internals import missing_names
from rekindle.pytorch.devices import accelerator
from rekindle.pytorch.native import core as native_core
from rekindle.pytorch.native import remedy, what_it_misses, why_not

_CUDA_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING")


@final
@dataclass(frozen=True, slots=True)
class Environment:
    """Texts that describe the installed PyTorch, the devices and the native core.

    Attributes:
        torch: Version and commit of torch, and the CUDA or ROCm that it was built for.
        devices: One text per device, with the bytes that `rekindle.budget("auto")` would use.
        core: Why there is no compiled native core; empty if there is one.
        guided: The native core was compiled with profile-guided optimization.
        remedy: How to get the missing native core; empty if there is one.
        missing: Private names of torch that Rekindle uses and this torch does not have.
        refuses: Operators and features that the native core refuses with this torch, or empty.
        settings: Environment variables of PyTorch's allocators, as NAME=VALUE.
    """

    torch: str
    devices: tuple[str, ...]
    core: str
    guided: bool
    remedy: str
    missing: tuple[str, ...]
    refuses: str
    settings: tuple[str, ...]


def environment() -> Environment:
    """Describe PyTorch, its devices and the native core, without compiling the core."""
    commit = str(torch.version.git_version)[:10]
    built_for = torch.version.cuda and f", CUDA {torch.version.cuda}"
    built_for = built_for or (torch.version.hip and f", ROCm {torch.version.hip}") or ""
    devices = [torch.device("cpu")]
    if accelerator.available():
        devices += [torch.device("cuda", index) for index in range(accelerator.count())]
    compiled = native_core(build=False)
    core = "" if compiled is not None else why_not()
    return Environment(
        torch=f"{torch.__version__} (commit {commit}{built_for})",
        devices=tuple(map(_described, devices)),
        core=core,
        guided=compiled is not None and bool(compiled.guided),
        remedy=remedy() if core else "",
        missing=missing_names(),
        refuses=what_it_misses(),
        settings=tuple(
            f"{name}={os.environ[name]}" for name in _CUDA_SETTINGS if name in os.environ
        ),
    )


def _described(device: torch.device) -> str:
    try:
        free = f'{format_bytes(available(device))} for a budget of "auto"'
    except Unsupported as error:
        free = str(error)
    if device.type == "cpu":
        return f"cpu, {torch.get_num_threads()} threads, {free}"
    return f"{device}, {accelerator.name_of(device)}, {free}"
