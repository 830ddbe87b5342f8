"""`rekindle.capture(step)`: record one whole eager step as a trace."""

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
    """Run a step once and return its trace.

    The first step of a program creates gradients and optimizer state, later ones find them. To
    see typical training, capture the second step.

    Args:
        step: A function without arguments: forward, backward, optimizer, any control flow. It runs
            as usual; its return value is ignored.
        device: The device whose memory is recorded. Default: CUDA if the program uses it, else the
            CPU.

    Returns:
        A `Trace`: every operator with its inputs, outputs, bytes and measured cost (ns), and the
        moments at which the program and autograd release tensors. `rekindle.trace.formats.save`
        writes it to a file; `rekindle.simulate` replays it.
    """
    checks.step(step, "rekindle.capture({})")
    with budget.unlimited(device=device, record=True) as run:
        step()
        return run.trace


def capture_modules(
    step: Callable[[], object], model: nn.Module, *, device: str | torch.device | None = None
) -> tuple[Trace, list[str]]:
    """Capture a step as `capture` does, with the `nn.Module` that called each operator.

    Args:
        step: As for `capture`.
        model: The model whose submodules are looked for.
        device: As for `capture`.

    Returns:
        The trace, and for each operator of the forward pass the path of its module in `model`,
        such as "layers.0.mlp".
    """
    checks.kind(model, nn.Module, "a model", "rekindle.export({}, step, budget)", "model")
    with _stack_of(model) as stack, budget.unlimited(device=device, record=True) as run:
        places = run._driver.places
        assert places is not None
        places.where = lambda: stack[-1] if stack else ""
        step()
        return run.trace, places.said


@contextmanager
def _stack_of(model: nn.Module) -> Generator[list[str]]:
    """While open, keep a list of the paths of the submodules whose forward runs, innermost last."""
    names = {module: name for name, module in model.named_modules()}
    stack: list[str] = []

    # Dynamo traces these hooks inside compiled code. Modules there are part of one operator.
    def enter(module: nn.Module, *_: object) -> None:
        if not torch.compiler.is_compiling():
            stack.append(names.get(module, stack[-1] if stack else ""))

    def leave(*_: object) -> None:
        if not torch.compiler.is_compiling():
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
