"""Random numbers again (R5): which generators a call draws from, and drawing as before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from rekindle.pytorch.devices import accelerator, is_accelerator
from rekindle.pytorch.operators._positions import Position

#: Generators that a call draws from, each with its state before.
Drawn = tuple[tuple[torch.Generator, Tensor], ...]
#: The same for a recipe, in little memory.
Noted = tuple[tuple[torch.Generator, Tensor | Position], ...]


def generator_of(
    tensors: Sequence[Tensor], extras: Iterable[Any], device: torch.device | None
) -> torch.Generator:
    """The generator that a random operator draws from; `device`: where its result is asked for.

    A number on the CPU may stand beside tensors of a device: the result is there.
    """
    for extra in extras:
        if type(extra) is torch.Generator:
            return extra
    if device is None:
        device = next((t.device for t in tensors if not t.is_cpu), torch.device("cpu"))
    return _default(device)


def generators_of(
    tensors: Sequence[Tensor], devices: Iterable[torch.device]
) -> list[torch.Generator]:
    """Those that compiled code may draw from, where it draws on any of `devices`, too."""
    found = {each.device: None for each in tensors} | dict.fromkeys(devices)
    others = [_default(device) for device in found if is_accelerator(device)]
    return [torch.default_generator, *others]


def drawn_from(generators: Iterable[torch.Generator]) -> Drawn:
    """They are about to be drawn from."""
    return tuple([(generator, generator.get_state()) for generator in generators])


@contextmanager
def drawing_again(drawn: Noted) -> Iterator[None]:
    """Inside, generators go on from where they were then; afterwards from where they are now."""
    if not drawn:
        yield
        return
    with ExitStack() as stack:
        for generator, state in drawn:
            then = state.state() if type(state) is Position else state
            stack.enter_context(_from(generator, then))
        yield


@contextmanager
def _from(generator: torch.Generator, state: Tensor) -> Iterator[None]:
    if is_accelerator(generator.device):
        with accelerator.drawing_from(generator, state):
            yield
        return
    now = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(now)


def _default(device: torch.device) -> torch.Generator:
    if is_accelerator(device):
        return accelerator.default_generator(device)
    return torch.default_generator
