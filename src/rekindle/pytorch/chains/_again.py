"""Run a stage of a model a second time with the same random numbers, autocast and buffers.

A **stage** is a few `nn.Module`s in sequence. Its result depends on its input, its parameters and
other state: random number generators, autocast and buffers. A `Moment` saves this other state
before a stage runs. `Moment.restored` sets the saved state for a second run of the stage, and
resets the current state afterwards. So a second run advances no random number generator and updates
no batch-norm statistics.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from rekindle._errors import Unsupported
from rekindle.pytorch.tensors import tensors_of


@final
class Stage:
    """Successive modules of a chain that a schedule runs and recomputes as a unit.

    Attributes:
        name: The name of the stage in error messages.
        modules: The modules, in order.
        parameters: The parameters of these modules, each once.
    """

    def __init__(self, name: str, modules: Sequence[nn.Module]) -> None:
        self.name = name
        self.modules = tuple(modules)
        self._all = tuple({m: None for each in modules for m in each.modules()})
        self.parameters = tuple({p: None for each in modules for p in each.parameters()})
        self._moving: dict[tuple[bool, ...], list[tuple[nn.Module, str]]] = {}

    def __call__(self, x: Any) -> Any:
        for module in self.modules:
            x = module(x)
        return x

    @property
    def mode(self) -> tuple[bool, ...]:
        return tuple([module.training for module in self._all])

    def buffers(self) -> Iterator[tuple[nn.Module, str]]:
        for module in self._all:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield module, name

    def moving(self) -> list[tuple[nn.Module, str]]:
        """Return the buffers that a run of this stage changes in the current training mode.

        Before the first run in this mode (training or evaluation), return all buffers.
        """
        known = self._moving.get(self.mode)
        return list(self.buffers()) if known is None else known

    def learn(self, before: Sequence[tuple[nn.Module, str, Tensor]]) -> None:
        """Record which buffers a run of this stage changed since they were copied to `before`."""
        if self.mode not in self._moving:
            self._moving[self.mode] = [
                (module, name)
                for module, name, copy in before
                if not _equal(module._buffers[name], copy)
            ]


def _equal(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and one.shape == other.shape and torch.equal(one, other)


@final
class Moment:
    """The state that a run of a stage started from: generators, autocast and buffers.

    A second run of the stage starts from this state, so it gives the same result. The versions of
    the parameters are recorded to detect changes.
    """

    def __init__(self, stage: Stage, x: Any) -> None:
        self.stage = stage
        self.devices = devices_of(x)
        self.generators: list[Tensor] | None = [*_states(self.devices)]
        self.autocast = [autocast_of(kind) for kind in ("cpu", *self._kinds())]
        self.buffers: list[tuple[nn.Module, str, Tensor]] = [
            (module, name, _buffer(module, name).detach().clone())
            for module, name in stage.moving()
        ]
        self.versions = [parameter._version for parameter in stage.parameters]

    def _kinds(self) -> list[str]:
        return sorted({device.type for device in self.devices})

    def after(self) -> None:
        """Free the saved state that the run of the stage did not change. Called after the run."""
        self.stage.learn(self.buffers)
        moving = {*self.stage.moving()}
        self.buffers = [entry for entry in self.buffers if entry[:2] in moving]
        now = _states(self.devices)
        assert self.generators is not None
        if all(map(torch.equal, self.generators, now)):
            self.generators = None

    @contextmanager
    def restored(self) -> Generator[None]:
        """Inside the block, set the saved state, so that the stage runs as in its first run."""
        self._check_parameters()
        with ExitStack() as stack:
            if self.generators is not None:
                stack.enter_context(_generators(self.devices, self.generators))
            for kind, dtype, enabled in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            swapped = [(m, name, copy.clone()) for m, name, copy in self.buffers]
            stack.enter_context(_buffers(swapped))
            stack.enter_context(torch.enable_grad())
            yield

    def _check_parameters(self) -> None:
        if self.versions != [parameter._version for parameter in self.stage.parameters]:
            raise RuntimeError(
                f"a parameter of stage {self.stage.name} was modified in place between the "
                "forward and the backward pass, so the stage cannot be recomputed. Call "
                "loss.backward() before optimizer.step()"
            )


@contextmanager
def undisturbed(stage: Stage, x: Any) -> Generator[None]:
    """Inside the block, let runs of `stage` change neither its buffers nor random generators.

    The stage writes into copies of its buffers. After the block, the states of the random number
    generators are reset. So a trial run of the stage does not affect the program.
    """
    devices = devices_of(x)
    copies = [(module, name, _buffer(module, name).clone()) for module, name in stage.buffers()]
    before = [(module, name, _buffer(module, name)) for module, name in stage.buffers()]
    with _generators(devices, _states(devices)), _buffers(copies):
        yield
        stage.learn(before)


def devices_of(values: Any) -> list[torch.device]:
    """Return the devices of the tensors in `values`, except the CPU."""
    found = {each.device: None for each in tensors_of(values) if each.device.type != "cpu"}
    return list(found)


def autocast_of(kind: str) -> tuple[str, torch.dtype, bool]:
    """Return `kind` (a device type), autocast's dtype for it, and True if autocast is on."""
    return kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)


def detached(values: Any) -> Any:
    """Detach the tensors in `values`; each requires a gradient if it did before."""
    return tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), values)


def _buffer(module: nn.Module, name: str) -> Tensor:
    buffer = module._buffers[name]
    if buffer is None:
        raise Unsupported(
            f"buffer {name} of {type(module).__name__} was removed after rekindle.sequential(...) "
            "measured the model; write rekindle.sequential(...) again"
        )
    return buffer


def _states(devices: Sequence[torch.device]) -> list[Tensor]:
    """Return the states of the default random number generators of the CPU and of `devices`."""
    others = [torch.get_device_module(device).get_rng_state(device) for device in devices]
    return [torch.get_rng_state(), *others]


@contextmanager
def _generators(devices: Sequence[torch.device], states: Sequence[Tensor]) -> Generator[None]:
    before = _states(devices)
    try:
        _set(devices, states)
        yield
    finally:
        _set(devices, before)


def _set(devices: Sequence[torch.device], states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0])
    for device, state in zip(devices, states[1:], strict=True):
        torch.get_device_module(device).set_rng_state(state, device)


@contextmanager
def _buffers(stand_ins: Sequence[tuple[nn.Module, str, Tensor]]) -> Generator[None]:
    """Inside the block, replace buffers of modules by other tensors.

    Args:
        stand_ins: Each module, the name of its buffer, and the tensor to use instead.
    """
    originals = [(module, name, _buffer(module, name)) for module, name, _ in stand_ins]
    try:
        for module, name, copy in stand_ins:
            module._buffers[name] = copy
        yield
    finally:
        for module, name, original in originals:
            module._buffers[name] = original
