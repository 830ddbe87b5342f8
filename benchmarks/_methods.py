"""Define the methods of training in less memory that the benchmarks compare.

Each method has several settings, such as budgets. A setting is a point of the method's curve in a
plot of time against memory. It changes a model, and gives a context in which steps run. The methods
have the names that plots show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from _chains import chain
from _workloads import Workload
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import rekindle

FRACTIONS = (0.7, 0.5, 1 / 3, 0.25, 0.12)  #: budgets: fractions of the plain activation memory
QUICK = (0.5, 0.25, 0.12)  #: those of them that `--quick` measures


@dataclass(frozen=True)
class Point:
    """One setting of one method.

    Attributes:
        prepare: Changes the model, or returns another model with the same parameters.
        around: Returns the context in which steps run, given the plain run's constants and peak.
        warm_up: The number of steps before the measurement; compilers and learned plans need some.
    """

    method: str
    setting: str
    prepare: Callable[[nn.Module, Workload, Any], nn.Module] = lambda model, workload, batch: model
    around: Callable[[int, int], AbstractContextManager[Any]] = lambda constants, peak: (
        nullcontext()
    )
    warm_up: int = 2


def points(
    workload: Workload, fractions: Sequence[float] = FRACTIONS, *, quick: bool = False
) -> Iterator[Point]:
    """Yield every point to measure for a workload, those of a method from the most memory down.

    Args:
        fractions: Budgets as fractions of the plain activation memory, for methods with a budget.
    """
    fractions = tuple(f for f in fractions if f in QUICK) if quick else fractions
    for fraction in fractions:
        yield Point("rekindle online", f"{fraction:.0%}", around=_budget(fraction, learn=False))
    for fraction in fractions:
        yield Point(
            "rekindle learned", f"{fraction:.0%}", around=_budget(fraction, learn=True), warm_up=6
        )
    if workload.name != "tree_lstm":  # it recurses over objects and has no modules to wrap
        for every in (3, 2, 1):
            yield Point("checkpoint", f"1 in {every}", prepare=partial(_checkpointed, every=every))
            yield Point("torch_remat", f"1 in {every}", prepare=partial(_remat, every=every))
        for every in (2, 1):
            yield Point("selective", f"1 in {every}", prepare=partial(_selective, every=every))
    if workload.is_chain:
        for fraction in fractions:
            yield Point("rekindle sequential", f"{fraction:.0%}", prepare=_sequential(fraction))
    if not workload.dynamic:
        for fraction in fractions:
            yield Point("rekindle planned", f"{fraction:.0%}", prepare=_planned(fraction))
        for fraction in fractions[:1] if quick else fractions:
            yield Point("rekindle compiled", f"{fraction:.0%}", prepare=_planned_inductor(fraction))
        for share in (1.0, 0.5) if quick else (1.0, 0.7, 0.5, 0.3, 0.1):
            yield Point("torch.compile", f"{share}", prepare=partial(_compiled, share=share))


def _bytes(fraction: float, constants: int, peak: int) -> int:
    return constants + int(fraction * (peak - constants))


def _budget(fraction: float, **options: Any) -> Callable[[int, int], AbstractContextManager[Any]]:
    def around(constants: int, peak: int) -> AbstractContextManager[Any]:
        return rekindle.budget(_bytes(fraction, constants, peak), **options)

    return around


def _wrapped(
    model: nn.Module, workload: Workload, every: int, wrap: Callable[[str, Any], Any]
) -> nn.Module:
    for number, block in enumerate(workload.blocks(model)):
        if number % every == 0:
            block.forward = wrap(f"block{number}", block.forward)  # type: ignore[method-assign]
    return model


def _checkpointed(model: nn.Module, workload: Workload, batch: Any, *, every: int) -> nn.Module:
    return _wrapped(
        model, workload, every, lambda _, forward: partial(checkpoint, forward, use_reentrant=False)
    )


_MATMULS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten.convolution.default,
}


def _save_matmuls(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if op in _MATMULS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _selective(model: nn.Module, workload: Workload, batch: Any, *, every: int) -> nn.Module:
    contexts = partial(create_selective_checkpoint_contexts, _save_matmuls)
    return _wrapped(
        model,
        workload,
        every,
        lambda _, forward: partial(checkpoint, forward, use_reentrant=False, context_fn=contexts),
    )


class _RandomState:
    """Saves and restores generator states; torch_remat requires this code for dropout."""

    def snapshot(self) -> Any:
        gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        return torch.get_rng_state(), gpu

    def restore(self, state: Any) -> None:
        torch.set_rng_state(state[0])
        if state[1] is not None:
            torch.cuda.set_rng_state(state[1])


def _remat(model: nn.Module, workload: Workload, batch: Any, *, every: int) -> nn.Module:
    import torch_remat  # pyright: ignore[reportMissingImports]  # may be missing

    def wrap(name: str, forward: Any) -> Any:
        return torch_remat.checkpoint(region_name=name, recompute_state_hooks=(_RandomState(),))(
            forward
        )

    return _wrapped(model, workload, every, wrap)


def _compiled(model: nn.Module, workload: Workload, batch: Any, *, share: float) -> Any:
    import torch._functorch.config as functorch

    functorch.activation_memory_budget = share
    return torch.compile(model)


Prepare = Callable[[nn.Module, Workload, Any], Any]  #: returns what the steps call


def _planned(fraction: float) -> Prepare:
    def prepare(model: nn.Module, workload: Workload, about: Any) -> nn.Module:
        budget = _bytes(fraction, about["constants"], about["peak"])
        inputs = (about["inputs"][0],)
        return rekindle.plan(model, inputs, budget=budget, reserve=about["reserve"]).apply()

    return prepare


def _sequential(fraction: float) -> Prepare:
    def prepare(model: nn.Module, workload: Workload, about: Any) -> nn.Module:
        budget = _bytes(fraction, about["constants"], about["peak"])
        inputs, others = about["inputs"][0], about["reserve"] + about["inputs"][1].nbytes
        return rekindle.sequential(chain(model), inputs, budget, reserve=others)

    return prepare


def _planned_inductor(fraction: float) -> Prepare:
    def prepare(model: nn.Module, workload: Workload, about: Any) -> Any:
        budget = _bytes(fraction, about["constants"], about["peak"])
        backend = rekindle.backend(budget=budget, reserve=about["reserve"])
        return torch.compile(model, backend=backend)

    return prepare
