"""The kind of an optimizer's step: steps of equal kind need the same memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, optim

from rekindle.pytorch.optimizers._dry_run import chosen_foreach, copy_of_number

StepKind = tuple[object, ...]


def kind_of_step(optimizer: optim.Optimizer, device: torch.device, tensors: bytes) -> StepKind:
    """Return a key of the step that `optimizer` makes next.

    Args:
        optimizer: The optimizer.
        device: The device whose bytes are counted.
        tensors: A key of its parameters, gradients and state (`Driver.begin_step`).
    """
    kind: list[object] = [type(optimizer), device, tensors]
    for group in optimizer.param_groups:
        for name, value in group.items():
            if name != "params":
                kind.append(_kind_of_setting(value))
    return (*kind, *_phases(optimizer))


def _kind_of_setting(value: object) -> object:
    """Return the part of an optimizer's setting that affects the memory of its step.

    The value of a number has no effect, except that zero may switch a feature off (weight decay).
    """
    if type(value) in (int, float):
        return bool(value)
    return value if value is None or type(value) is bool else type(value)


def _phases(optimizer: optim.Optimizer) -> list[bool]:
    """Return for each parameter if the next step of `RAdam` rectifies, or that of `ASGD` averages.

    `RAdam` rectifies once enough steps are made, and `ASGD` averages from step `t0` on. The step
    then runs other operators, so it may need other memory. The vectorized and capturable versions
    of these optimizers always run the same operators: for them the list is empty.
    """
    is_late = _IS_LATE.get(type(optimizer))
    if is_late is None:
        return []
    found: list[bool] = []
    for group in optimizer.param_groups:
        if not group["capturable"] and not (group | chosen_foreach(group))["foreach"]:
            states = (optimizer.state.get(parameter) for parameter in group["params"])
            found += [bool(state) and is_late(group, state) for state in states]
    return found


def _rectifies(group: Mapping[str, Any], state: Mapping[str, Any]) -> bool:
    """Return True if the next step of `RAdam` rectifies (its formula for the length `rho_t`)."""
    beta, step = float(group["betas"][1]), _number(state["step"]) + 1
    longest = 2 / (1 - beta) - 1
    return longest - 2 * step * beta**step / (1 - beta**step) > 5


def _averages(_: Mapping[str, Any], state: Mapping[str, Any]) -> bool:
    """Return True if the next step of the optimizer `ASGD` averages the parameters."""
    return _number(state["mu"]) != 1


def _number(value: Tensor | float) -> float:
    return float(copy_of_number(value) if isinstance(value, Tensor) else value)


_IS_LATE = {optim.RAdam: _rectifies, optim.ASGD: _averages}
