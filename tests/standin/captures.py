"""Capture CUDA graphs inside a budget: during capture no wait, copy or recomputation may happen.

The stand-in device runs captured operators at once. As CUDA does, it raises during capture at waits
across streams, timed events, and reads of a generator's state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import rekindle
from rekindle.pytorch.native import core as native_core

ROWS = 1 << 16
DEPTH = 24


def vector() -> Tensor:
    return torch.linspace(0.1, 1.0, ROWS, device="cuda").requires_grad_()


def deep(x: Tensor, depth: int = DEPTH) -> Tensor:
    for _ in range(depth):
        x = (x.sin() * x).exp() * 0.5
    return x.sum()


@contextmanager
def capturing(side: Any) -> Iterator[None]:
    """Inside the block, capture operators launched on the stream `side` in a CUDA graph."""
    import _standin

    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        _standin.capture(True)
        try:
            yield
        finally:
            _standin.capture(False)
    torch.cuda.current_stream().wait_stream(side)


Evict = Callable[[], None]
Scene = Callable[[Tensor, Tensor, Any, Evict], list[Tensor]]


def _step_during_copies(weight: Tensor, small: Tensor, side: Any, evict: Evict) -> list[Tensor]:
    """Capture a backward pass and an optimizer step in a CUDA graph.

    During capture, copies to the host are in flight, and values with such copies are freed.
    """
    optimizer = torch.optim.SGD([small], 0.1)
    found: list[Tensor] = []
    for _ in range(3):
        losses = [deep(weight)]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = (small * 2).sin().sum()  # saved last, so its saved value is not evicted
        with capturing(side):
            losses.pop()
            y.backward()
            optimizer.step()
            optimizer.zero_grad()
        found += torch.autograd.grad(deep(weight), weight)
    return [*found, small.detach()]


def _evicted_input(weight: Tensor, small: Tensor, side: Any, evict: Evict) -> list[Tensor]:
    """Capture in a CUDA graph a backward pass whose saved values were evicted."""
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loss = deep(weight)
    with capturing(side):
        return [*torch.autograd.grad(loss, weight)]


def _of_evicted(
    weight: Tensor, side: Any, evict: Evict, read: Callable[[Tensor], object]
) -> list[Tensor]:
    """Evict the value of `held`, and then call `read(held)` while a CUDA graph is captured."""
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        held = weight * 2
        loss = deep(held)
        evict()
    with capturing(side):
        read(held)
    del loss
    return [held.detach()]


def _address_of_evicted(weight: Tensor, small: Tensor, side: Any, evict: Evict) -> list[Tensor]:
    return _of_evicted(weight, side, evict, Tensor.data_ptr)


def _operator_of_evicted(weight: Tensor, small: Tensor, side: Any, evict: Evict) -> list[Tensor]:
    return _of_evicted(weight, side, evict, torch.sin)


def _evicted_afterwards(weight: Tensor, small: Tensor, side: Any, evict: Evict) -> list[Tensor]:
    """Capture an operator in a CUDA graph, and then evict all values that may be evicted.

    The operands of the captured operator must stay, because the graph has their addresses.
    """
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        held = weight * 2
    with capturing(side):
        both = held + weight
    evict()
    return [held.detach(), both.detach()]


SCENES: dict[str, Scene] = {
    "step during copies": _step_during_copies,
    "evicted input": _evicted_input,
    "address of evicted": _address_of_evicted,
    "operator of evicted": _operator_of_evicted,
    "evicted afterwards": _evicted_afterwards,
}


def captured(scene: str, options: dict[str, Any]) -> dict[str, Any]:
    """Run a scene within a budget, and then another step.

    Returns:
        "equal": True if the bits are those without a budget, or "raised": the error. "later": True
        if the other step has the right loss. "of variables": how many storages that variables hold
        were evicted, when the scene evicted all that may be evicted.
    """
    core: Any = native_core()
    core.fix_costs(1_000)
    side, weight = torch.cuda.Stream(), vector()
    expected = [each.cpu() for each in SCENES[scene](weight, vector(), side, lambda: None)]
    small = vector()
    expected_later = deep(weight).item()
    torch.cuda.synchronize()
    amount = torch.cuda.memory_allocated() + 16 * 4 * ROWS
    found: dict[str, Any] = {}

    def evict() -> None:
        driver: Any = run._driver
        driver.core.evict_all(driver.handle)
        found["of variables"] = driver.core.placeholders(driver.handle)

    with rekindle.budget(amount, device="cuda", learn=False, **options) as run:
        try:
            got = [each.cpu() for each in SCENES[scene](weight, small, side, evict)]
            found["equal"] = all(map(torch.equal, got, expected))
        except Exception as error:
            found["raised"] = f"{type(error).__name__}: {error}"
        found["later"] = deep(weight).item() == expected_later
        run._driver.engine.check()  # type: ignore[union-attr]
    found["evictions"] = run.evictions
    found["swapped"] = getattr(run.report().swapped, "out", 0)
    return found
