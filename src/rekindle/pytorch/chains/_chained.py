"""Run an `nn.Sequential` by a schedule that says which of its stages to recompute.

`Chained` measures time and memory of its stages for each new shape and type of input, and asks a
planner for a schedule. `_nested.py` runs the schedule.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from rekindle._errors import Unsupported
from rekindle._types import Bytes
from rekindle.planners._costs import ChainSchedule, Measured
from rekindle.pytorch.chains._again import autocast_of, devices_of
from rekindle.pytorch.chains._nested import Pass, nested
from rekindle.pytorch.chains._stages import leaves, measure, stages_of
from rekindle.pytorch.tensors import bytes_of, tensors_of

Reshape = Literal["measure", "refuse"]


def total(output: Any) -> Tensor:
    """Return a loss for measurements: the sum of all output tensors that require a gradient."""
    return torch.stack([t.float().sum() for t in tensors_of(output) if t.requires_grad]).sum()


def is_chain(model: object) -> bool:
    """Return True if `model` has the forward of `nn.Sequential`: it calls its children in order."""
    return isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward


@final
class Chained(nn.Sequential):
    """The `nn.Sequential` that `rekindle.sequential` makes, which runs by a schedule.

    Children, parameters, buffers and names are those of the original model. Under `torch.no_grad`
    this module runs like any `nn.Sequential`.
    """

    def __init__(
        self,
        model: nn.Sequential,
        sample: Any,
        plan: Callable[[Measured], ChainSchedule],
        *,
        loss: Callable[[Any], Tensor] | None,
        reserve: Bytes,
        reshape: Reshape,
        watch: Callable[[int, int], None] | None,
    ) -> None:
        super().__init__(OrderedDict(model._modules.items()))  # type: ignore[arg-type]
        self.training = model.training
        for name, value in vars(model).items():
            if "hook" in name:  # the hooks of the model, and what modules note about them
                object.__setattr__(self, name, value)
        self._plan, self._loss = plan, loss or total
        self._reserve, self._reshape, self._watch = reserve, reshape, watch
        self._measured: dict[Any, Measured] = {}
        self._schedules: dict[Any, ChainSchedule] = {}
        self._modules_measured = [module for _, module in leaves(self)]
        self._stages = stages_of(self, sample)
        self.schedule = self._scheduled(sample)

    @property
    def overhead(self) -> float:
        """Predicted time of recomputation, as a fraction of the time of a pass without it."""
        return self.schedule.overhead

    def forward(self, *inputs: Any, **keywords: Any) -> Any:  # type: ignore[override]
        if len(inputs) != 1 or keywords:
            got = f"{len(inputs)} inputs" + (f" and {', '.join(keywords)}=" if keywords else "")
            raise Unsupported(
                f"the model that rekindle.sequential(...) made: got {got}, wanted one input, "
                "which may be a tuple of tensors; write model((a, b)), and unpack the tuple in "
                "the first module"
            )
        x = inputs[0]
        if torch.is_grad_enabled():
            self.schedule = self._scheduled(x)
            parts = nested(self.schedule.operations, len(self._stages))
            if not all(isinstance(part, int) for part in parts):
                return Pass(self._stages).run(parts, x)
        return super().forward(x)

    def __getitem__(self, index: Any) -> Any:
        # A part of the model is an ordinary module: the schedule is one of the whole.
        if isinstance(index, slice):
            return nn.Sequential(OrderedDict(list(self._modules.items())[index]))  # type: ignore[arg-type]
        return super().__getitem__(index)

    def _scheduled(self, x: Any) -> ChainSchedule:
        modules = [module for _, module in leaves(self)]
        if modules != self._modules_measured:  # a module was replaced, or has a hook now
            self._stages, self._modules_measured = stages_of(self, x), modules
            self._measured.clear()
            self._schedules.clear()
        key = _key(x, self)
        leaves_now = [p for p in self.parameters() if p.is_leaf]  # `functional_call` has others
        there = bytes_of([p.grad for p in leaves_now if p.grad is not None])
        found = self._schedules.get((key, there))
        if found is None:
            found = self._schedules[key, there] = self._plan(
                _with_gradients(self._measure(x, key), there)
            )
        return found

    def _measure(self, x: Any, key: Any) -> Measured:
        found = self._measured.get(key)
        if found is None:
            if self._measured and self._reshape == "refuse":
                was = next(iter(self._measured))
                raise Unsupported(
                    f"the model that rekindle.sequential(...) made: got {key}, wanted {was}, with "
                    "which it was measured; give it such an input, or write "
                    'rekindle.sequential(..., reshape="measure")'
                )
            fixed = self._reserve + bytes_of([*self.parameters(), *self.buffers()])
            found = measure(self._stages, x, self._loss, fixed, self._watch)
            self._measured[key] = found
        return found


def _key(x: Any, model: nn.Module) -> Any:
    """Return a key of everything that measured times and memory of the stages depend on."""
    tensors = [(tuple(t.shape), t.dtype, t.device, t.requires_grad) for t in tensors_of(x)]
    kinds = sorted({"cpu", *(device.type for device in devices_of(x))})
    frozen = tuple(not parameter.requires_grad for parameter in model.parameters())
    autocast = tuple(autocast_of(kind) for kind in kinds)
    return (*tensors, model.training, *autocast, hash(frozen))


def _with_gradients(measured: Measured, there: Bytes) -> Measured:
    """Return `measured` for a forward pass before which gradients of parameters exist already.

    Args:
        measured: Costs of the stages. The cost of a stage contains the bytes of the gradients that
            its backward pass makes.
        there: Bytes of the gradients that exist already. They count as fixed memory, and the stages
            make no others. If 0, return `measured` unchanged.
    """
    if not there:
        return measured
    stages = tuple(replace(stage, weights=0) for stage in measured.stages)
    return replace(measured, stages=stages, fixed=measured.fixed + there)
