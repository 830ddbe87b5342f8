"""Run a stage of a model a second time with the same buffers.

A **stage** is a few `nn.Module`s in sequence. A `Moment` saves the buffers of a stage before it
runs. `Moment.restored` sets the saved buffers for a second run of the stage, and resets the current
ones afterwards. So a second run updates no batch-norm statistics.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
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

    def present_parameters(self) -> Iterator[Tensor]:
        """Yield the parameters that the modules have now: `functional_call` replaces them."""
        for module in self._all:
            yield from (each for each in module._parameters.values() if each is not None)

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
        """Record which buffers a run of this stage changed since they were copied to `before`.

        Statistics of norms count as changed: those of a batch of zeros may be what they were.
        """
        if self.mode not in self._moving:
            self._moving[self.mode] = [
                (module, name)
                for module, name, copy in before
                if (module.training and getattr(module, "track_running_stats", False))
                or not _equal(module._buffers[name], copy)
            ]


def _equal(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and one.shape == other.shape and torch.equal(one, other)


@final
class _Present:
    """A parameter, with its version counter now. Equal to itself while nothing writes it."""

    def __init__(self, parameter: Tensor) -> None:
        self._parameter, self._version = parameter, parameter._version

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Present)
            and self._parameter is other._parameter
            and self._version == other._version
        )

    __hash__ = None  # type: ignore[assignment]


@final
class Moment:
    """The state that a stage started from: its buffers, and the versions of its parameters.

    `torch.utils.checkpoint` restores the random number generators and autocast for a second run.
    This class restores the buffers, and raises an error if a parameter was modified.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._buffers = _copies(stage.moving())
        self._parameters = self._current()

    def after(self) -> None:
        """Free the copies of buffers that the run of the stage did not change."""
        self._stage.learn(self._buffers)
        moving = {*self._stage.moving()}
        self._buffers = [entry for entry in self._buffers if entry[:2] in moving]

    @contextmanager
    def restored(self) -> Generator[None]:
        """Inside the block, the stage runs as in its first run, and changes no buffer."""
        if self._parameters != self._current():
            raise RuntimeError(
                f"a parameter of stage {self._stage.name} was modified in place or replaced "
                "between the forward and the backward pass, so it cannot be recomputed. Call "
                "loss.backward() before optimizer.step(), and before torch.func.functional_call "
                "ends"
            )
        with _buffers([(module, name, copy.clone()) for module, name, copy in self._buffers]):
            yield

    def _current(self) -> list[_Present]:
        return [_Present(each) for each in self._stage.present_parameters()]


@contextmanager
def undisturbed(stage: Stage, x: Any) -> Generator[None]:
    """Inside the block, let runs of `stage` change neither its buffers nor random generators.

    The stage writes into copies of its buffers. After the block, the states of the random number
    generators are reset. So a trial run of the stage does not affect the program.
    """
    before = [(module, name, _buffer(module, name)) for module, name in stage.buffers()]
    with generators_kept(x), _buffers(_copies(stage.buffers())):
        yield
        stage.learn(before)


def generators_kept(values: Any) -> AbstractContextManager[None]:
    """Inside the block, random numbers change no generator; on the devices of `values` as well."""
    devices = devices_of(values)
    kind = devices[0].type if devices else "cuda"
    return torch.random.fork_rng(devices, device_type=kind)


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


def _copies(buffers: Iterable[tuple[nn.Module, str]]) -> list[tuple[nn.Module, str, Tensor]]:
    return [(module, name, _buffer(module, name).detach().clone()) for module, name in buffers]


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
