"""Forecast the budget that a whole training step needs, after `OutOfBudget` in the first step.

The step is rehearsed: it runs on fake tensors, with the shapes of the arguments of an earlier call
of the model. The trace of this step is then simulated within smaller and smaller budgets. The
result is only a forecast, because three things are unknown. They are the operators outside the
model, the function that computes the loss, and the cost of operators that never ran.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from rekindle._types import Bytes, Nanoseconds
from rekindle.policies import Policy
from rekindle.pytorch.online import (
    OPTIMIZER,
    ModelCall,
    keep_generators,
)
from rekindle.pytorch.operators import BackwardNode, Operator
from rekindle.pytorch.rehearsed._costs import Costs, Measured
from rekindle.pytorch.rehearsed._fakes import FakeStep
from rekindle.pytorch.rehearsed._moving_needs import MovingNeeds
from rekindle.pytorch.rehearsed._tracer import Tracer
from rekindle.pytorch.tensors import bytes_of, living_objects, tensors_of
from rekindle.simulator import smallest_budget
from rekindle.trace import Trace, keep_all_peak

#: Factor on the budget that the simulation needs. Measured costs differ from those in a simulation,
#: so a real run evicts other values and may need a little more.
_SPARE: Final = 1.05


class Forecast(NamedTuple):
    """The memory that steps of one model need.

    Attributes:
        needed: The smallest budget (bytes) within which they should run.
        coming: The part of it (bytes) that the first step of the optimizer allocates for its state.
    """

    needed: Bytes
    coming: Bytes


def forecast(
    call: ModelCall,
    held: Mapping[str, Bytes],
    device: torch.device,
    policy: Policy,
    measured: Measured,
    node: Callable[[], BackwardNode | None],
    report: Callable[[str], None] = lambda text: None,
    *,
    moves: bool = False,
) -> Forecast | None:
    """Forecast the smallest budget within which whole steps of a model should run.

    Args:
        call: The call of the model that is repeated on fake tensors.
        held: Bytes that could not be evicted when the program raised `OutOfBudget`, by category.
        device: The device of the budget.
        policy: The policy of the budget.
        measured: Costs and workspaces of operators that ran before.
        node: Returns the autograd node that runs on this thread.
        report: Called with a text each time the progress changes. It may raise an error to stop the
            rehearsal.
        moves: Weights, gradients and optimizer state may move to the host.

    Returns:
        The forecast. None if the model no longer exists, or inside a process group.
    """
    model = call.model()
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    # In a process group, collective operators would wait for ranks that do not rehearse the step.
    if model is None or distributed:
        return None
    generators = keep_generators()
    try:
        with _disable_current_modes(), torch.enable_grad(), _quietly():
            step = _Step(model, call, device, measured, node, report)
            if moves:
                return Forecast(step.need_if_state_moves(), 0)
            trace = step.rehearse()
    finally:
        for put_back in generators:
            put_back()
    needed = min(int(_SPARE * smallest_budget(trace, policy)), keep_all_peak(trace))
    return Forecast(needed + _of_other_models(step.held, held), step.coming)


def _of_other_models(own: Mapping[str, Bytes], held: Mapping[str, Bytes]) -> Bytes:
    """Return the bytes of other models: those in `held` that the rehearsed model does not use.

    Args:
        own: Bytes that belong to the rehearsed model, by category.
        held: Bytes of the whole program that cannot be evicted, by category.
    """
    return sum(max(0, held.get(name, 0) - nbytes) for name, nbytes in own.items())


@contextmanager
def _quietly() -> Iterator[None]:
    """Inside the block, silence warnings, and PyTorch's log of operators without fake kernel."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.disabled = before


@final
class _Step:
    """One training step, run on fake tensors and recorded.

    Attributes:
        held: Bytes of the copy's parameters, gradients, optimizer state and inputs, by category.
        coming: Bytes of optimizer state that the first step of the optimizers allocates.
    """

    def __init__(
        self,
        model: nn.Module,
        call: ModelCall,
        device: torch.device,
        measured: Measured,
        node: Callable[[], BackwardNode | None],
        report: Callable[[str], None],
    ) -> None:
        self._costs, self._node, self._report = Costs(measured, device), node, report
        self._step = step = FakeStep(model, device)
        for copied, parameter in zip(step.model.parameters(), model.parameters(), strict=True):
            if parameter.grad is not None:
                copied.grad = step.fakes.like(parameter.grad)
        step.inputs = step.fakes.inputs(call.arguments(step.fakes.of))
        for optimizer in _optimizers_of(model):
            step.add(step.fakes.copy(optimizer))
        self.held: dict[str, Bytes] = {}
        self.coming: Bytes = 0

    def rehearse(self) -> Trace:
        """Run the optimizers, then a forward and a backward pass, and return the trace."""
        with self._step.running():
            tracer = Tracer(self._step.fakes, self._take, self._node)
            self._run_all(tracer)
            return tracer.build()

    def need_if_state_moves(self) -> Bytes:
        """Return the smallest budget if weights, gradients and state may move to the host."""
        with self._step.running():
            needs = MovingNeeds(self._take)
            self._run_all(needs)
            return needs.budget

    def _run_all(self, mode: Tracer | MovingNeeds) -> None:
        """Run the optimizers, then a forward and a backward pass, within `mode`."""
        step = self._step
        for name, tensors in step.tensors().items():
            self.held[name] = bytes_of(tensors)
            for tensor in tensors:
                mode.meet(tensor)
        with mode:
            for optimizer in step.optimizers:
                self._optimize(optimizer)
                if isinstance(mode, MovingNeeds):
                    mode.stepped(optimizer)
                optimizer.zero_grad()
            self.coming = bytes_of(step.tensors()[OPTIMIZER]) - self.held[OPTIMIZER]
            self._run()

    def _optimize(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
        optimizer.step()

    def _run(self) -> None:
        args, kwargs = self._step.inputs
        # Hold the model's output until the backward pass has ended, because the program may do so
        # too.
        output = self._step.model(*args, **kwargs)
        loss = _loss_of(output)
        if loss is not None:
            loss.backward()

    def _take(
        self, facts: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], made: Bytes
    ) -> tuple[Nanoseconds, Bytes]:
        """Report progress, and return cost (ns) and workspace (bytes) of an operator call."""
        self._report("rehearsing the step on shapes, to find a budget for the whole step")
        return self._costs.of(facts, args, kwargs, made)


def _loss_of(output: Any) -> Tensor | None:
    """Return the loss in `output`, or a substitute with the memory of a cross entropy."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss if loss.requires_grad else None
    parts = [each for each in tensors_of(output) if each.requires_grad]
    losses = [each.float().log_softmax(-1).sum() if each.dim() else each for each in parts]
    return torch.stack(losses).sum() if losses else None


def _optimizers_of(model: nn.Module) -> list[Optimizer]:
    """Return the optimizers that exist in the program and have parameters of `model`."""
    own = {id(parameter) for parameter in model.parameters()}
    return [
        optimizer
        for optimizer in living_objects(Optimizer)
        if any(id(each) in own for group in optimizer.param_groups for each in group["params"])
    ]
