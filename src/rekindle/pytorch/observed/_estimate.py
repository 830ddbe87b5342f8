"""`rekindle.estimate`: predict the peak memory of a training step without allocating it.

The step runs on fake tensors (`torch._subclasses.FakeTensorMode`), which have shapes and storage
sizes but no contents. It runs twice, because the first step creates the optimizer's state. Where
the program reads a number from a tensor, it gets 1 or False, and `assumed` names the source line.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.optim import Optimizer

from rekindle import _checks as checks
from rekindle._errors import InvalidArgument, Unsupported
from rekindle._types import Bytes
from rekindle._units import format_bytes, parse_bytes, parse_memory
from rekindle.policies import Swap
from rekindle.pytorch.chains import total
from rekindle.pytorch.context import Run
from rekindle.pytorch.native import signatures_seen
from rekindle.pytorch.online import keep_generators, table_of, users_line
from rekindle.pytorch.rehearsed import Costs, FakeStep, MovingNeeds
from rekindle.pytorch.tensors import Meter

ACTIVATIONS = "activations and temporaries"


@final
@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a step: its name, its peak (bytes), and the bytes at the peak by category."""

    name: str
    peak: Bytes
    held: Mapping[str, Bytes]


@final
@dataclass(frozen=True, slots=True)
class Comparison:
    """An estimated peak and a measured peak, in bytes."""

    estimated: Bytes
    measured: Bytes

    @property
    def error(self) -> float:
        """The relative error: 0.02 means that the estimate is 2 % above the measured peak."""
        return self.estimated / self.measured - 1

    def __str__(self) -> str:
        both = f"{format_bytes(self.estimated)}, measured {format_bytes(self.measured)}"
        return f"estimated {both}: {self.error:+.1%}"


@final
@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimated peak of a training step, for each phase.

    It is a step after the first one, so the state of the optimizer exists already.

    Attributes:
        phases: Each phase with its name, its peak (bytes), and the bytes at the peak by category.
        assumed: Source lines that read a number or a condition from a tensor. They got 1 or False.
        smallest_budget: With `swap=`, the smallest budget (bytes) for `evict="anything"` and
            `swap=`, with which weights, gradients and optimizer state move to the host. Else None.
    """

    phases: tuple[Phase, ...]
    assumed: tuple[str, ...]
    smallest_budget: Bytes | None = None

    @property
    def peak(self) -> Bytes:
        """The largest peak of all phases, in bytes."""
        return max(phase.peak for phase in self.phases)

    @property
    def least(self) -> Bytes:
        """The bytes at the peak that cannot be evicted: everything except activations."""
        return max(phase.peak - phase.held.get(ACTIVATIONS, 0) for phase in self.phases)

    @property
    def host(self) -> Bytes:
        """With `swap=`, the most bytes on the host within the smallest budget; else 0.

        It is an upper bound: copies of what is in memory again count too.
        """
        return 0 if self.smallest_budget is None else self.peak + self.peak // 4

    def fits(self, amount: str | int) -> bool:
        """Return True if a step stays within `amount` without recomputing or moving anything.

        Args:
            amount: Bytes, or text such as "6GiB".
        """
        return self.peak <= parse_bytes(amount, line="estimate.fits({})")

    def compare(self, run: Run | Bytes) -> Comparison:
        """Compare this estimate with a measurement.

        Args:
            run: A `Run`, or measured bytes.

        Returns:
            A comparison with `error`: 0.02 means that the estimate was 2 % too high.
        """
        return Comparison(self.peak, run.peak if isinstance(run, Run) else run)

    def __str__(self) -> str:
        lines = [f"peak {format_bytes(self.peak)}"]
        for phase in self.phases:
            lines += [f"{phase.name}: {format_bytes(phase.peak)}", *table_of(phase.held)]
        if self.smallest_budget is not None:
            lines.append(
                f"fits into {format_bytes(self.smallest_budget)} with at most "
                f"{format_bytes(self.host)} on the host: rekindle.budget({self.smallest_budget}, "
                f'evict="anything", swap={self.host})'
            )
        if self.assumed:
            lines.append(
                "assumed to be 1 or False, because the values depend on data: "
                + ", ".join(self.assumed)
            )
        return "\n".join(lines)


def estimate(
    model: nn.Module,
    example_inputs: Any,
    *,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    device: str | torch.device | None = None,
    swap: str | int | Swap | None = None,
) -> Estimate:
    """Estimate the peak memory of a training step without running it.

    The model runs on fake tensors, which have shapes but no memory and no data. The estimate
    assumes that the caller holds the output until the backward pass ends, and that gradients are
    None before the next step. It leaves out workspaces of operators and fragmentation.

    Args:
        model: The model, on any device; on "meta" it need not fit anywhere. It is not changed.
        example_inputs: A tensor, a tuple of positional arguments, or a dictionary of keyword
            arguments. Only shapes and types count, so tensors on "meta" suffice.
        optimizer: An optimizer of `model`, or a function that makes one from parameters, such as
            `torch.optim.AdamW`. Default: no optimizer.
        loss: A function from the output of the model to a scalar. Default: the attribute `loss` of
            the output if there is one, else the sum of the output.
        device: The device on which the step is to run. Default: that of the model, but the CPU for
            a model on "meta".
        swap: As for `rekindle.budget`. The estimate then has the smallest budget for
            `evict="anything"` and `swap=`, with workspaces of operators. To find it, the step runs
            once more. On a CPU, operators in slices may need less, which only `rekindle.profile`
            measures.

    Returns:
        An `Estimate`, with the peak of each phase by category.

    Raises:
        Unsupported: The size of a result depends on data. Record a real step with
            `rekindle.capture` instead.
    """
    line = "rekindle.estimate({}, batch)"
    checks.kind(model, nn.Module, "a model (an nn.Module)", line, "model")
    _check_optimizer(optimizer, model)
    if loss is not None:
        line = "rekindle.estimate(model, batch, loss={})"
        checks.function(loss, line, "lambda output: output.mean()", "output")
    if swap is not None and not isinstance(swap, Swap):
        parse_memory(swap, line="rekindle.estimate(model, batch, swap={})")
    where = _device_of(model) if device is None else _possible(device)
    generators = keep_generators()
    try:
        rehearsal = _Rehearsal(model, example_inputs, where)
        return rehearsal.run(optimizer, loss or _default_loss, moves=swap is not None)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise Unsupported(
            f"rekindle.estimate: the size of a result of {error.func} at {users_line()} depends "
            "on its data, so it cannot be estimated from shapes. Run a small step under "
            "rekindle.budget.unlimited() and read run.peak"
        ) from error
    finally:
        for put_back in generators:
            put_back()


def _default_loss(output: Any) -> Tensor:
    loss = getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) else total(output)


@final
class _Rehearsal:
    """Runs a training step on fake copies of the model, its inputs and its optimizer."""

    def __init__(self, model: nn.Module, inputs: Any, device: torch.device) -> None:
        self._step = FakeStep(model, device, users_line)
        self._step.inputs = self._step.fakes.inputs(inputs)
        self._meter = Meter()

    def run(self, optimizer: Any, loss: Callable[[Any], Tensor], *, moves: bool) -> Estimate:
        """Run the step, and estimate what it needs.

        Args:
            optimizer: As for `estimate`.
            loss: As for `estimate`.
            moves: Also find the smallest budget if weights, gradients and state may move.
        """
        step = self._step
        with step.running():
            if isinstance(optimizer, Optimizer):
                step.add(step.fakes.copy(optimizer))
            elif optimizer is not None:
                step.add(optimizer(step.model.parameters()))
            with self._meter as meter:
                meter.count(step.tensors())
                self._phases(loss)
                phases = tuple(self._phases(loss))
            need = self._need_if_state_moves(loss) if moves else None
        return Estimate(phases, tuple(step.made_up.assumed), need)

    def _need_if_state_moves(self, loss: Callable[[Any], Tensor]) -> Bytes:
        """Run the step once more, and return its smallest budget for `evict="anything"`."""
        step = self._step
        costs = Costs(signatures_seen(), step.fakes.device)
        with MovingNeeds(costs.of) as needs:
            for tensors in step.tensors().values():
                for tensor in tensors:
                    needs.meet(tensor)
            step.model.zero_grad()
            output = self._call()
            _number(loss(output)).backward()
            del output
            for optimizer in step.optimizers:
                optimizer.step()
                needs.stepped(optimizer)
        return needs.budget

    def _phases(self, loss: Callable[[Any], Tensor]) -> list[Phase]:
        """Run the step once, and return its phases."""
        for parameter in self._step.model.parameters():
            parameter.grad = None
        self._meter.restart()
        output = self._call()
        value = _number(loss(output))
        phases = [self._phase("forward")]
        value.backward()
        phases.append(self._phase("backward"))
        del output, value
        self._meter.restart()
        for optimizer in self._step.optimizers:
            optimizer.step()
            phases.append(self._phase("optimizer"))
        return phases

    def _call(self) -> Any:
        model, inputs = self._step.model, self._step.inputs
        if isinstance(inputs, Mapping):
            return model(**inputs)
        return model(*inputs) if isinstance(inputs, tuple) else model(inputs)

    def _phase(self, name: str) -> Phase:
        """Return the phase that ends now, with its peak by category, and start the next one."""
        meter = self._meter
        held = {key: meter.at_peak(tensors) for key, tensors in self._step.tensors().items()}
        held[ACTIVATIONS] = max(0, meter.peak - sum(held.values()))
        phase = Phase(name, meter.peak, {key: size for key, size in held.items() if size})
        meter.restart()
        return phase


def _check_optimizer(optimizer: object, model: nn.Module) -> None:
    line, instead = "rekindle.estimate(model, batch, optimizer={})", "torch.optim.AdamW"
    if not isinstance(optimizer, Optimizer):
        if optimizer is not None:
            checks.function(optimizer, line, instead, "parameters")
        return
    own = {id(parameter) for parameter in model.parameters()}
    theirs = {id(each) for group in optimizer.param_groups for each in group["params"]}
    if own.isdisjoint(theirs):
        raise InvalidArgument(
            f"{line.format('...')}: got {type(optimizer).__name__} with none of the model's "
            f"parameters; write {line.format(instead)}, which gets the parameters of the model"
        )


def _possible(device: object) -> torch.device:
    """Return `device` as a `torch.device`; raise if this PyTorch was not built for its type.

    The device need not exist on this machine.
    """
    built = torch.accelerator.current_accelerator()
    kinds = ("cpu",) if built is None else ("cpu", built.type)
    try:
        found = torch.device(device)  # type: ignore[arg-type]
    except (RuntimeError, TypeError):
        found = None
    if found is not None and found.type in kinds:
        return found
    got = "no device that PyTorch knows"
    if found is not None:
        got = "a device that this PyTorch was not built for"
    lines = " or ".join(f'rekindle.estimate(model, batch, device="{kind}")' for kind in kinds)
    raise InvalidArgument(
        f"rekindle.estimate(model, batch, device={str(device)!r}): got {got}; write {lines}"
    )


def _number(value: object) -> Tensor:
    """Return `value` if it is a loss: a single number that requires a gradient. Else raise."""
    if isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad:
        return value
    if not isinstance(value, Tensor):
        got = type(value).__name__
    elif value.numel() != 1:
        got = f"a tensor of {tuple(value.shape)}"
    else:
        got = "a number without a gradient (are all parameters frozen?)"
    raise InvalidArgument(
        f"rekindle.estimate: the loss is {got}, wanted one number with a gradient; write "
        "rekindle.estimate(model, batch, loss=lambda output: output.mean())"
    )


def _device_of(model: nn.Module) -> torch.device:
    tensors = itertools.chain(model.parameters(), model.buffers())
    device = next((tensor.device for tensor in tensors), torch.device("cpu"))
    return torch.device("cpu") if device.type == "meta" else device
