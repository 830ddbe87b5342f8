"""Install the stand-in as the device `cuda`, before torch is imported, in a process of its own.

It replaces the Python functions of `torch.cuda` that need a real driver. The rest of PyTorch
(guards, events, autograd's thread for the device, autocast) uses the stand-in as if it were CUDA.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

DEVICES = 2
_CUDA = 1  # the value of c10::DeviceType::CUDA


def install(extension: Path) -> ModuleType:
    """Install `extension`, compiled by `tests.standin.process`, as the CUDA of this process."""
    assert "torch" not in sys.modules, "torch asks but once which devices there are"
    spec = importlib.util.spec_from_file_location("_standin", extension)
    assert spec is not None
    assert spec.loader is not None
    standin = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(standin)

    import torch

    sys.modules["_standin"] = standin
    vars(torch.cuda).update(_functions(standin))
    vars(torch.cuda.memory).update(_snapshot=lambda: _snapshot(standin))
    torch.backends.cuda.is_built = lambda: True
    torch.UntypedStorage.resize_ = _resizing(standin, torch.UntypedStorage.resize_)
    torch.UntypedStorage.__new__ = _making(torch.UntypedStorage.__new__)
    return standin


def _snapshot(standin: ModuleType) -> dict[str, Any]:
    """Return the part of the allocator's snapshot that Rekindle reads."""
    states = {True: "active_allocated", False: "inactive"}
    return {
        "segments": [
            {
                "device": device,
                "blocks": [
                    {"address": address, "size": nbytes, "state": states[used]}
                    for address, nbytes, used in segment
                ],
            }
            for device in range(DEVICES)
            for segment in standin.segments(device)
        ]
    }


def _resizing(standin: ModuleType, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `resize_` that knows the device; that of a CPU-only PyTorch does not."""
    import torch

    def resize_(self: Any, nbytes: int) -> Any:
        if self.device.type != "cuda":
            return plain(self, nbytes)
        standin.resize(torch.empty(0, dtype=torch.uint8, device="cuda").set_(self), nbytes)
        return self

    return resize_


def _making(plain: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    def new(kind: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            return plain(kind, *args, **({} if device is None else {"device": device}), **kwargs)
        with torch._C._DisableTorchDispatch():
            return torch.empty(*args, dtype=torch.uint8, device=device).untyped_storage()

    return new


def _functions(standin: ModuleType) -> dict[str, Any]:
    """Return replacements for the functions of `torch.cuda` that programs and Rekindle use."""
    import torch

    def at(device: Any = None) -> int:
        if isinstance(device, int):
            return device
        index = None if device is None else torch.device(device).index
        return standin.device() if index is None else index

    def made(index: int, stream_id: int) -> torch.Stream:
        return torch.Stream(stream_id=stream_id, device_index=index, device_type=_CUDA)

    def stream_of(
        device: Any = None,
        priority: int = 0,
        *,
        stream_id: int | None = None,
        device_index: int = 0,
        device_type: int = _CUDA,
    ) -> torch.Stream:
        if stream_id is None:
            return made(at(device), standin.new_stream(at(device)))
        assert device_type == _CUDA
        return made(device_index, stream_id)

    def event(enable_timing: bool = False, blocking: bool = False) -> torch.Event:
        assert not standin.is_capturing(), "an event with a time while a graph is captured"
        return torch.Event("cuda", enable_timing=enable_timing)  # elapsed_time rejects subclasses

    @contextlib.contextmanager
    def stream(wanted: torch.Stream | None) -> Iterator[None]:
        if wanted is None:
            yield
            return
        before = standin.stream(wanted.device_index)
        standin.set_stream(wanted.device_index, wanted.stream_id)
        try:
            yield
        finally:
            standin.set_stream(wanted.device_index, before)

    @contextlib.contextmanager
    def device(wanted: Any) -> Iterator[None]:
        before = at()
        standin.set_device(at(wanted))
        try:
            yield
        finally:
            standin.set_device(before)

    def nested(device: Any = None) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, figure in standin.stats(at(device)).items():
            *outer, last = name.split(".")
            inner = found
            for part in outer:
                inner = inner.setdefault(part, {})
            inner[last] = figure
        return found

    def stat(name: str) -> Callable[..., int]:
        return lambda device=None: standin.stats(at(device))[name]

    generators = [standin.default_generator(index) for index in range(DEVICES)]
    return {
        "Event": event,
        "Stream": stream_of,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "current_device": at,
        "current_stream": lambda device=None: made(at(device), standin.stream(at(device))),
        "default_generators": generators,
        "default_stream": lambda device=None: made(at(device), 0),
        "device": device,
        "device_count": lambda: DEVICES,
        "empty_cache": standin.empty_cache,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "get_device_name": lambda device=None: "stand-in",
        "get_device_properties": lambda device=None: SimpleNamespace(uuid=f"stand-in {at(device)}"),
        "get_rng_state": lambda device=None: generators[at(device)].get_state(),
        "get_rng_state_all": lambda: [generator.get_state() for generator in generators],
        "init": lambda: None,
        "is_available": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_current_stream_capturing": standin.is_capturing,
        "is_initialized": lambda: True,
        "manual_seed": lambda seed: generators[at()].manual_seed(seed),
        "manual_seed_all": lambda seed: [each.manual_seed(seed) for each in generators],
        "max_memory_allocated": stat("allocated_bytes.all.peak"),
        "max_memory_reserved": stat("reserved_bytes.all.peak"),
        "mem_get_info": lambda device=None: standin.memory_info(at(device)),
        "memory_allocated": stat("allocated_bytes.all.current"),
        "memory_reserved": stat("reserved_bytes.all.current"),
        "memory_stats": lambda device=None: standin.stats(at(device)),
        "memory_stats_as_nested_dict": nested,
        "reset_peak_memory_stats": lambda device=None: standin.reset_peak(at(device)),
        "set_device": lambda device: standin.set_device(at(device)),
        "set_rng_state": lambda state, device=None: generators[at(device)].set_state(state),
        "stream": stream,
        "synchronize": lambda device=None: standin.synchronize(at(device)),
    }
