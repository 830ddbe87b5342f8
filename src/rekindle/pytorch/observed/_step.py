"""`rekindle.capture(step)`: one whole eager step, written down as a trace."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from rekindle import _checks as checks
from rekindle.pytorch.context import budget
from rekindle.trace import Trace


def capture(step: Callable[[], object], *, device: str | torch.device | None = None) -> Trace:
    """Runs `step()` once and returns what it did: every operator, what it read and made, when the
    program and autograd let go of it.

    step: anything: forward, backward, optimizer, any control flow. It runs as it would without
        this; what it returns is dropped. A second step meets gradients and optimizer state that a
        first one only makes: capture that one for a picture of training.
    device: the device whose memory is meant; default: CUDA if it is in use, else the CPU.

    Sizes are in bytes, costs in ns as measured here. `rekindle.trace.formats.save` puts it into a
    file, `rekindle.simulate` replays it within a budget.
    """
    checks.step(step, "rekindle.capture({})")
    with budget.unlimited(device=device, record=True) as run:
        step()
        return run.trace


def capture_modules(
    step: Callable[[], object], model: nn.Module, *, device: str | torch.device | None = None
) -> tuple[Trace, list[str]]:
    """The same, and for each operator of the forward pass the path of its module in `model`."""
    checks.kind(model, nn.Module, "a model", "rekindle.export({}, step, budget)", "model")
    with _stack_of(model) as stack, budget.unlimited(device=device, record=True) as run:
        places = run._driver.places
        assert places is not None
        places.where = lambda: stack[-1] if stack else ""
        step()
        return run.trace, places.said


@contextmanager
def _stack_of(model: nn.Module) -> Generator[list[str]]:
    """The paths of the modules that are running, the innermost last."""
    names = {module: name for name, module in model.named_modules()}
    stack: list[str] = []

    def enter(module: nn.Module, *_: object) -> None:
        stack.append(names.get(module, stack[-1] if stack else ""))

    def leave(*_: object) -> None:
        stack.pop()

    hooks = [
        register_module_forward_pre_hook(enter),
        register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield stack
    finally:
        for hook in hooks:
            hook.remove()
