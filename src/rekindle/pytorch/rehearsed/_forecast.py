"""Forecast the budget that a whole training step needs, after `OutOfBudget` in the first step.

The step is rehearsed: it runs on fake tensors, with the shapes of the arguments of an earlier call
of the model. The trace of this step is then simulated within smaller and smaller budgets. The
result is only a forecast, because three things are unknown. They are the operators outside the
model, the function that computes the loss, and the cost of operators that never ran.
"""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from rekindle._types import Bytes, Nanoseconds
from rekindle.policies import Policy
from rekindle.pytorch.devices import is_accelerator
from rekindle.pytorch.online import (
    OPTIMIZER,
    ModelCall,
)
from rekindle.pytorch.operators import (
    BackwardNode,
    Invocation,
    Operator,
    Signature,
    is_roomy_on_host,
    signature_of,
    tensors_in,
)
from rekindle.pytorch.rehearsed._fakes import FakeStep
from rekindle.pytorch.rehearsed._tracer import Tracer
from rekindle.pytorch.tensors import bytes_of, living_objects, tensors_of
from rekindle.simulator import smallest_budget
from rekindle.trace import Trace, keep_all_peak

Known = dict[tuple[str, tuple[tuple[int, ...], ...]], tuple[Nanoseconds, Bytes]]
"""(name of an operator, sizes of its tensors) -> measured cost (ns) and workspace (bytes)"""

#: Factor on the budget that the simulation needs. Measured costs differ from those in a simulation,
#: so a real run evicts other values and may need a little more.
_SPARE: Final = 1.05
_HALF: Final = (torch.float16, torch.bfloat16)


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
    known: Known,
    node: Callable[[], BackwardNode | None],
    report: Callable[[str], None] = lambda text: None,
) -> Forecast | None:
    """Forecast the smallest budget within which whole steps of a model should run.

    Args:
        call: The call of the model that is repeated on fake tensors.
        held: Bytes that could not be evicted when the program raised `OutOfBudget`, by category.
        device: The device of the budget.
        policy: The policy of the budget.
        known: Costs and workspaces of operators that ran before.
        node: Returns the autograd node that runs on this thread.
        report: Called with a text each time the progress changes. It may raise an error to stop the
            rehearsal.

    Returns:
        The forecast. None if the model no longer exists, or inside a process group.
    """
    model = call.model()
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    # In a process group, collective operators would wait for ranks that do not rehearse the step.
    if model is None or distributed:
        return None
    state = torch.get_rng_state(), random.getstate()
    try:
        with _disable_current_modes(), torch.enable_grad(), _quietly():
            step = _Step(model, call, device, known, node, report)
            trace = step.rehearse()
    finally:
        torch.set_rng_state(state[0])
        random.setstate(state[1])
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


def _drop_listeners(module: nn.Module) -> None:
    """Remove the program's forward and backward hooks, which expect real tensors.

    Hooks from the package that defines the module's class stay, because the module may need them.
    Forward pre-hooks stay too, because they may make weights.
    """
    package = type(module).__module__.partition(".")[0]
    for hooks in (module._forward_hooks, module._backward_hooks):
        for key, hook in list(hooks.items()):
            code = getattr(hook, "__code__", None)
            installed = code is not None and "-packages" in code.co_filename
            if not installed or hook.__module__.partition(".")[0] != package:
                del hooks[key]


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
        known: Known,
        node: Callable[[], BackwardNode | None],
        report: Callable[[str], None],
    ) -> None:
        self._known, self._node, self._report = known, node, report
        self._device = device
        self._place = (device, True) if is_accelerator(device) else None
        self._step = step = FakeStep(model, device)
        for module in step.model.modules():
            _drop_listeners(module)
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
        step = self._step
        with step.running():
            tracer = Tracer(step.fakes, self._take, self._node)
            for name, tensors in step.tensors().items():
                self.held[name] = bytes_of(tensors)
                for tensor in tensors:
                    tracer.meet(tensor)
            with tracer:
                for optimizer in step.optimizers:
                    self._optimize(optimizer)
                self.coming = bytes_of(step.tensors()[OPTIMIZER]) - self.held[OPTIMIZER]
                self._run()
            return tracer.build()

    def _optimize(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
        optimizer.step()
        optimizer.zero_grad()

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
        """Return cost (ns) and workspace (bytes) of an operator call.

        Both were measured if an operator of this name ran before on tensors of these sizes.
        Otherwise they are estimated from the bytes of the tensors.

        Args:
            facts: The operator that is called.
            args: The positional arguments of the call.
            kwargs: The keyword arguments of the call.
            made: Bytes of the storages that the call makes.
        """
        self._report("rehearsing the step on shapes, to find a budget for the whole step")
        tensors = tensors_in([*args, *kwargs.values()])
        found = self._known.get((facts.name, tuple(tuple(each.size()) for each in tensors)))
        if found is not None:
            return found
        with _disable_current_modes():
            shapes, named = tree_map_only(Tensor, _shape_of, (args, kwargs))
        signature = signature_of(facts, Invocation(facts, shapes, named).key, self._place)
        return 1_000 + made // 10, _guessed_workspace(signature, self._device)


def _shape_of(fake: Tensor) -> Tensor:
    """Return a meta tensor with shape, strides and dtype of `fake`, to look up a signature."""
    return torch.empty_strided(fake.size(), fake.stride(), dtype=fake.dtype, device="meta")


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


def _guessed_workspace(signature: Signature, device: torch.device) -> Bytes:
    """Estimate the workspace of an operator that never ran, from the bytes of its tensors.

    The estimate is the bytes of all inputs and results. On a CPU it is 0 for operators known to
    need no workspace. It is doubled for half precision, which CPUs compute in single precision. For
    the backward of an LSTM layer it is halved. The function `one_copy` in native/ops/workspaces.cpp
    computes the same and gives the reasons.
    """
    on_host = not is_accelerator(device)
    if on_host and not is_roomy_on_host(signature.operator.name):
        return 0
    reads = sum(each.size.numel() * each.dtype.itemsize for each in signature.geometries())
    wider = on_host and any(each.dtype in _HALF for each in signature.geometries())
    copy = (reads + max(0, signature.needed)) * (2 if wider else 1)
    return copy // 2 if signature.operator.name == "aten::mkldnn_rnn_layer_backward" else copy
