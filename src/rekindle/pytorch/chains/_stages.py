"""Cut an `nn.Sequential` into stages that can be recomputed one by one, and measure each stage.

Measuring changes no tensor of the program. Random number generators are reset afterwards, stages
write into copies of buffers, and `torch.autograd.grad` computes gradients without filling `.grad`.
But hooks of modules and parameters run, and so do other Python side effects of the modules.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only

from rekindle import _clock
from rekindle._errors import Unsupported
from rekindle._types import Bytes, Nanoseconds
from rekindle.planners._costs import Measured
from rekindle.planners._costs import Stage as Costs
from rekindle.pytorch.chains._again import (
    Stage,
    detached,
    devices_of,
    generators_kept,
    undisturbed,
)
from rekindle.pytorch.tensors import Meter, bytes_of, tensors_of

#: Number of runs that measure a stage's time, of which the median counts. The number of runs that
#: measure memory is one less, and the largest sizes count.
_REPEATS = 3


def stages_of(model: nn.Sequential, sample: Any) -> list[Stage]:
    """Cut `model` into the smallest stages that can be recomputed one by one.

    Nested `nn.Sequential`s are flattened. A layer that returns a view of its input, or writes into
    its input, joins the stage that made the input.

    Args:
        model: The chain.
        sample: An example input, of the shape and type that training uses.

    Raises:
        Unsupported: The chain is empty, or a layer writes into the input of the chain.
    """
    groups: list[list[tuple[str, nn.Module]]] = []
    begins = True  # True if the next layer may begin a new stage
    x = tree_map_only(Tensor, lambda t: t.detach().clone(), sample)
    for name, module in leaves(model, ""):
        try:
            wrote, viewed, x = _try(Stage(name, [module]), x)
        except Exception as error:
            error.add_note(
                f"in layer {name} ({type(module).__name__}), with the given sample: write "
                "rekindle.sequential(model, sample, ...) with a sample like the batches of "
                "training"
            )
            raise
        if wrote and len(groups) <= (not begins):
            raise Unsupported(
                f"layer {name} ({type(module).__name__}) writes into the input of the model, from "
                "which the layers are recomputed. Write inplace=False in this layer"
            )
        belongs = (wrote or viewed) and bool(groups)
        if belongs or not begins:
            groups[-1].append((name, module))
        else:
            groups.append([(name, module)])
        # A layer that returns a view of the chain's input cannot be a stage alone.
        begins = belongs or not viewed
    if not groups:
        raise Unsupported(
            "rekindle.sequential(...): got an empty nn.Sequential, wanted one with at least one "
            "module; write rekindle.sequential(nn.Sequential(first, second), sample, budget)"
        )
    return [Stage(_range(group), [module for _, module in group]) for group in groups]


def _try(stage: Stage, x: Any) -> tuple[bool, bool, Any]:
    """Run a stage a few times, without effects on its buffers and random generators.

    Returns:
        True if the stage writes into its input, True if its output is a view of its input, and the
        output.
    """
    wrote, viewed, output = False, True, x
    with undisturbed(stage, x), torch.no_grad():
        # Run more than once, because a layer that is skipped at random returns its input only
        # sometimes.
        for _ in range(_REPEATS):
            versions = [t._version for t in tensors_of(x)]
            output = stage(x)
            wrote = versions != [t._version for t in tensors_of(x)]
            viewed = not _homes(x).isdisjoint(_homes(output))
            if wrote or not viewed:
                break
    return wrote, viewed, output


def leaves(model: nn.Sequential, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """Return names and modules of `model` in order, with nested `nn.Sequential`s flattened.

    A nested `nn.Sequential` with hooks stays one module, because its hooks must run.
    """
    found: list[tuple[str, nn.Module]] = []
    for name, child in model._modules.items():
        assert child is not None
        hooks = any(
            (
                child._forward_hooks,
                child._forward_pre_hooks,
                child._backward_hooks,
                child._backward_pre_hooks,
            )
        )
        if type(child) is nn.Sequential and not hooks and len(child):
            found += leaves(child, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", child))
    return found


def _range(group: Sequence[tuple[str, nn.Module]]) -> str:
    first, last = group[0][0], group[-1][0]
    return first if first == last else f"{first} to {last}"


def _homes(values: Any) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors_of(values)}


def measure(
    stages: Sequence[Stage],
    sample: Any,
    loss: Callable[[Any], Tensor],
    fixed: Bytes,
    watch: Callable[[int, int], None] | None = None,
) -> Measured:
    """Measure time and memory of every stage, each with a separate autograd graph.

    The activations of only one stage are in memory at any time.

    Args:
        stages: The stages of the chain.
        sample: An input of the chain.
        loss: Computes the loss from the output of the chain.
        fixed: Bytes that are in memory during the whole pass, such as parameters.
        watch: Called after each stage with two numbers: how many stages are measured so far, and
            how many there are.
    """
    x = detached(sample)
    owned: set[int] = set()
    costs: list[Costs] = []
    gradient = _gradient_bytes(x)
    for number, stage in enumerate(stages):
        with undisturbed(stage, x):
            cost, output = _measure_stage(stage, x, owned)
        costs.append(cost)
        x = output
        if watch is not None:
            watch(number + 1, len(stages))
    fixed += 2 * bytes_of([m._buffers[name] for stage in stages for m, name in stage.moving()])
    loss_ns, loss_extra, loss_bytes = _measure_loss(loss, x)
    fixed += 2 * loss_bytes  # for the loss tensor and its gradient
    return Measured(tuple(costs), fixed, bytes_of(sample), gradient, loss_ns, loss_extra)


def _measure_stage(stage: Stage, x: Any, owned: set[int]) -> tuple[Costs, Any]:
    wanted = [each for each in tensors_of(x) if each.requires_grad]
    parameters = [each for each in stage.parameters if each.requires_grad]
    forward, backward = _times(stage, x, [*wanted, *parameters])
    with torch.enable_grad():
        runs = [_sizes(stage, x, [*wanted, *parameters]) for _ in range(_REPEATS - 1)]
    sizes = [max(size) for size in zip(*(size for size, _ in runs), strict=True)]
    output = runs[-1][1]
    tape, taped_extra, dropped_extra, backward_extra = sizes
    new = [each for each in parameters if id(each) not in owned]
    owned.update(map(id, new))
    return Costs(
        forward,
        backward,
        bytes_of(output),
        _gradient_bytes(output),
        tape,
        taped_extra,
        dropped_extra,
        backward_extra,
        sum(each.numel() * each.element_size() for each in new),
    ), output


def _sizes(stage: Stage, x: Any, wanted: Sequence[Tensor]) -> tuple[tuple[Bytes, ...], Any]:
    """Measure the memory of a stage: return four sizes in bytes, and the output of the stage.

    The first size is that of the output and all tensors that autograd saves. The others are the
    peaks of a forward pass that saves tensors, of one that saves none, and of the backward pass,
    each without the memory that remains allocated afterwards.
    """
    with Meter() as meter:
        meter.count((x, list(stage.parameters), [m._buffers[name] for m, name in stage.buffers()]))
        meter.restart()
        before = meter.alive
        with saved_tensors_hooks(_nothing, _nothing):
            output = detached(stage(x))
        dropped_extra = meter.peak - meter.alive
        del output
        meter.restart()
        taped = stage(x)
        tape = meter.alive - before
        taped_extra = meter.peak - meter.alive
        output = detached(taped)
        end = _end(taped)
        del taped
        meter.restart()
        start = meter.alive
        _backward(end, wanted, meter.disregard)
        both = _gradient_bytes(output) + _gradient_bytes(x)
        backward_extra = meter.peak - start - both
    return (tape, taped_extra, dropped_extra, backward_extra), output


def _times(stage: Stage, x: Any, wanted: Sequence[Tensor]) -> tuple[Nanoseconds, Nanoseconds]:
    forward: list[Nanoseconds] = []
    backward: list[Nanoseconds] = []
    devices = devices_of(x)
    for _ in range(_REPEATS):
        with torch.enable_grad():
            started = _now(devices)
            output = stage(x)
            forward.append(_now(devices) - started)
            end = _end(output)
            started = _now(devices)
            _backward(end, wanted)
            backward.append(_now(devices) - started)
    return int(statistics.median(forward)), int(statistics.median(backward))


def _now(devices: Sequence[torch.device]) -> Nanoseconds:
    for device in devices:
        torch.get_device_module(device).synchronize(device)
    return _clock.now()


class _End(torch.autograd.Function):
    """Makes a scalar from outputs. Its backward makes gradients that only autograd holds."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> Tensor:
        ctx.like = [(each.shape, each.dtype, each.device) for each in outputs]
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:  # type: ignore[override]
        return tuple(torch.ones(shape, dtype=t, device=where) for shape, t, where in ctx.like)


def _end(output: Any) -> Tensor | None:
    outputs = [each for each in tensors_of(output) if each.requires_grad]
    return _End.apply(*outputs) if outputs else None  # type: ignore[no-any-return]


def _gradient_bytes(values: Any) -> Bytes:
    return sum(t.numel() * t.element_size() for t in tensors_of(values) if t.requires_grad)


def _backward(
    end: Tensor | None,
    wanted: Sequence[Tensor],
    arrived: Callable[[Tensor], None] | None = None,
) -> None:
    """Run the backward pass of a stage without filling `.grad` of any tensor.

    Args:
        end: The scalar to differentiate; None if no output requires a gradient.
        wanted: Tensors to differentiate `end` with respect to.
        arrived: Called with each gradient of a parameter when autograd has computed it.
    """
    if end is None or not wanted:
        return
    hooks = [
        each.register_hook(arrived)
        for each in wanted
        if arrived is not None and isinstance(each, nn.Parameter)
    ]
    try:
        torch.autograd.grad(end, wanted, allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()


def _measure_loss(loss: Callable[[Any], Tensor], output: Any) -> tuple[Nanoseconds, Bytes, Bytes]:
    """Measure the loss and its backward pass: return a time in ns and two sizes in bytes.

    The first size is the peak during both, without `output` and its gradient. The second size is
    that of the loss tensor.
    """
    wanted = [each for each in tensors_of(output) if each.requires_grad]
    if not wanted:
        return 0, 0, 0
    with generators_kept(output), torch.enable_grad():
        started = _now(devices_of(output))
        torch.autograd.grad(loss(output), wanted, allow_unused=True)
        elapsed = _now(devices_of(output)) - started
        with Meter() as meter:
            meter.count(output)
            before = meter.alive
            kept = loss(output)
            torch.autograd.grad(kept, wanted, allow_unused=True)
    extra = max(0, meter.peak - before - _gradient_bytes(output))
    return elapsed, extra, bytes_of(kept)


def _nothing(_: Any) -> Any:
    return None
