"""Plan a model (`rekindle.plan(model, ...)`), and make the module that runs the plan."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from logging import Logger
from typing import Any, final

import torch
from torch import Tensor, fx, nn
from torch._dynamo import config as dynamo_config
from torch._dynamo import exc
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _pytree as pytree

from rekindle._errors import OutOfBudget, RekindleError, Unsupported
from rekindle._types import Bytes, Nanoseconds
from rekindle._units import format_bytes, format_ns
from rekindle.planners._result import Plan, Status
from rekindle.policies import Swap
from rekindle.pytorch.planned._backend import Backend, Planned, PlanTrace, Rehearsed, Shapes
from rekindle.pytorch.planned._host import Host, host_for
from rekindle.pytorch.planned._path import Path, as_if_eager
from rekindle.pytorch.planned._prices import Prices, Report
from rekindle.pytorch.planned._refused import refuse_numpy
from rekindle.trace import Trace


@final
class ModelPlan:
    """The plan of a model, and the module that runs this plan. Memory is in bytes, time in ns.

    The budget counts everything that one forward and backward pass holds: parameters, buffers,
    inputs, activations, gradients. `reserve` is the part of the budget for other memory, such as
    optimizer state.
    """

    def __init__(self, backend: Backend, module: nn.Module, path: Path) -> None:
        assert backend.last is not None
        self._planned: Planned = backend.last
        self._module = module
        self.path = path
        self.budget = backend.budget
        self.reserve = backend.reserve
        self.host = backend.host

    @property
    def plan(self) -> Plan:
        """The result of the planner. Memory sizes in it do not include `reserve`."""
        return self._planned.plan

    @property
    def trace(self) -> Trace:
        """The trace of one forward and backward pass."""
        return self._planned.trace

    @property
    def status(self) -> Status:
        """The planner's status of the plan, such as optimal or infeasible."""
        return self.plan.status

    @property
    def peak(self) -> Bytes | None:
        """The predicted peak of memory (bytes), `reserve` included; None without a plan."""
        if self.plan.peak is None:
            return None
        return self.plan.peak - self._planned.spared + self.reserve

    @property
    def time_ns(self) -> Nanoseconds | None:
        """The predicted time (ns) of one forward and backward pass; None without a plan."""
        return self.plan.cost_ns

    @property
    def overhead(self) -> float | None:
        """Time that a pass spends on recomputation and on waiting for copies to or from the host.

        It is a fraction of the time of the same pass without a budget; None without a plan.
        """
        return self.plan.overhead

    @property
    def lower_bound(self) -> float:
        """A lower bound on the overhead (fraction of time) of any plan within the budget."""
        return self.plan.lower_bound

    @property
    def gap(self) -> float | None:
        """Upper bound on how much slower the plan is than an optimal plan, as a fraction."""
        return self.plan.gap

    @property
    def saved(self) -> Bytes:
        """Bytes that the forward pass saves for the backward pass."""
        return self._planned.saved

    @property
    def smallest_budget(self) -> Bytes:
        """The smallest known budget (bytes) that has a plan."""
        if self.peak is not None:
            return self.peak
        return (self.plan.smallest_budget or self.plan.needed) + self.reserve

    def apply(self) -> nn.Module:
        """Return the module that runs the plan, to use instead of the model.

        It has the class, parameters and flags (such as `training`) of the model.

        Raises:
            OutOfBudget: There is no plan within the budget.
        """
        if self.plan.schedule is None:
            raise OutOfBudget(
                f"there is no plan to apply, because none fits into {format_bytes(self.budget)} "
                f"({self.plan.message}); write rekindle.plan(model, ..., "
                f"budget={self.smallest_budget})",
                needed=self.smallest_budget,
                budget=self.budget,
                held={"reserve": self.reserve},
                smallest_budget=self.smallest_budget,
            )
        return self._module

    def report(self) -> str:
        """Return a table with the figures of the plan, one per line."""
        plan = self.plan
        rows = [("status", str(self.status)), ("budget", format_bytes(self.budget))]
        if self.reserve:
            rows.append(("reserve", format_bytes(self.reserve)))
        if self.peak is None or plan.cost_ns is None:
            rows.append(("smallest budget", format_bytes(self.smallest_budget)))
        else:
            rows += [
                ("predicted peak", format_bytes(self.peak)),
                ("saved for backward", format_bytes(self.saved)),
                ("predicted time", format_ns(plan.cost_ns)),
                ("recomputation", f"{(plan.overhead or 0.0) - self._waiting:.2%}"),
            ]
        if self.host is not None and plan.schedule is not None:
            rows.append(("waiting for copies", f"{self._waiting:.2%}"))
            rows.append(("copied to the host", format_bytes(plan.swapped_out)))
        if self._planned.segments:
            distinct = len(set(self._planned.segments))
            calls = f"{len(self._planned.segments)} calls of {distinct} segments"
            rows.append(("compiled", f"{calls}, {len(self.trace.ops)} operators with them"))
        rows.append(("lower bound", f"{plan.lower_bound:.2%}"))
        if plan.gap is not None:
            shown = f"{plan.gap:.2%}"
            rows.append(("gap", "< 0.01%" if plan.gap > 0 and shown == "0.00%" else shown))
        rows.append(("planned by", f"{plan.planner} in {plan.seconds:.1f} s"))
        if self.path == "compiled":
            path = "traced as for a compiler, because the plain model cannot be traced"
            rows.append(("path", path))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {figure}" for name, figure in rows)

    @property
    def _waiting(self) -> float:
        """Time that a pass waits for host copies, as a fraction of its time without a budget."""
        return self.plan.waiting_ns / self.plan.compute_ns if self.plan.compute_ns else 0.0

    def __str__(self) -> str:
        return self.report()


def plan_model(
    model: nn.Module,
    example_inputs: Any,
    budget: Bytes,
    plan_trace: PlanTrace,
    *,
    shapes: Shapes = "replan",
    reserve: Bytes = 0,
    host: Host | None = None,
    prices: Prices | None = None,
    report: Report | None = None,
    compiled: bool = False,
) -> ModelPlan:
    """Trace `model` on fake copies of `example_inputs`, and make a plan from the trace.

    Models may run other code if `torch.compiler.is_compiling()` returns True. The model is first
    traced while that function returns False. If this trace fails, the model is traced while the
    function returns True.

    Args:
        model: The model.
        example_inputs: A tuple of arguments, a mapping of keyword arguments, or one tensor.
        budget: The budget in bytes.
        plan_trace: Makes a plan from a trace and a budget.
        shapes: "replan" plans for each shape of inputs; "error" refuses a second shape.
        reserve: Bytes of the budget for memory that the plan does not count.
        host: The host memory that the plan may swap values to, from `open_host`. None: the plan
            swaps nothing.
        prices: Measured costs of operators. Default: the costs in the user's cache.
        report: Called with a text each time the progress changes.
        compiled: If True, let Inductor compile groups of light operators (pointwise ones,
            reductions).
    """
    args, kwargs = _arguments(example_inputs)
    around = _bytes_around(model, (args, kwargs))

    def planned(path: Path) -> ModelPlan:
        backend = Backend(
            budget,
            plan_trace,
            inner="inductor" if compiled else "eager",
            shapes=shapes,
            reserve=reserve,
            host=host,
            prices=prices,
            report=report,
            besides=lambda counted: max(around - counted, 0),
        )
        # The planned module shares parameters and children with the model, but has its own flags
        # and hooks.
        module = copy.copy(model)
        module._compiled_call_impl = _Call(module, backend, path)  # type: ignore[assignment]
        _rehearse(backend, lambda: module(*args, **kwargs))
        return ModelPlan(backend, module, path)

    try:
        return planned("eager")
    except _Untraceable:
        pass  # Trace again after this handler, or a later error would show this one as its context.
    return planned("compiled")


def open_host(
    model: nn.Module,
    example_inputs: Any,
    budget: Bytes | None,
    swap: str | int | Swap,
    directory: str | os.PathLike[str] | None,
) -> Host:
    """Open host memory that a plan of `model` may swap values to, and measure its bandwidth.

    Args:
        model: The model.
        example_inputs: As for `plan_model`.
        budget: The budget, which limits the size of the copies that measure the bandwidth.
        swap: The size of the host memory to use, or a `Swap` with size and bandwidths.
        directory: The folder for the swap file of a model on the CPU.
    """
    tensors = [*model.parameters(), *model.buffers(), *_tensors_in(_arguments(example_inputs))]
    return host_for(tensors, swap, directory, budget)


def _rehearse(backend: Backend, run: Callable[[], object]) -> None:
    """Call `run` so that `backend` traces and plans the model's graph, but does not run it."""
    backend.rehearsing = True
    try:
        with torch.enable_grad():
            run()
    except Rehearsed:
        pass
    except OutOfBudget:
        if backend.last is None:
            raise
    finally:
        backend.rehearsing = False
    if backend.last is None:
        raise Unsupported(
            "rekindle.plan(model, ...): no result of the model requires a gradient, so there is "
            "nothing to plan. If all parameters are frozen, write model.requires_grad_(True); "
            "otherwise run the model without a plan"
        )


def training_step(model: nn.Module, example_inputs: Any) -> Callable[[], Any]:
    """Return a function that runs a forward and a backward pass of `model` and returns its results.

    The backward pass starts from results that are scalars, such as a loss. If there are no scalars,
    it starts from all results, with random gradients that are the same in each call.

    Args:
        model: A model, or the module from `ModelPlan.apply()`.
        example_inputs: As for `plan_model`.
    """
    args, kwargs = _arguments(example_inputs)
    leaves = [*model.parameters(), *(x for x in _tensors_in((args, kwargs)) if x.is_leaf)]

    def step() -> Any:
        for leaf in leaves:
            leaf.grad = None
        with torch.enable_grad():
            results = model(*args, **kwargs)
        made = [each for each in _tensors_in(results) if each.requires_grad]
        made = [each for each in made if each.dim() == 0] or made
        if made:
            torch.autograd.backward(made, [_gradient_for(each) for each in made])
        return results

    return step


def _gradient_for(result: Tensor) -> Tensor:
    with torch.no_grad():
        if result.dim() == 0:
            return torch.ones_like(result)
        generator = torch.Generator(result.device).manual_seed(0)
        return torch.empty_like(result).normal_(generator=generator)


class _Untraceable(Unsupported):
    """The model cannot be traced into one graph. For example, its control flow depends on data."""


_NOT_TRACED = (
    exc.Unsupported,
    exc.UserError,
    exc.TorchRuntimeError,  # an operator cannot run on fake tensors
    GuardOnDataDependentSymNode,
)


@final
class _Call:
    """Calls a module as one compiled graph.

    An error of Rekindle is raised as it is, without the error that torch.compile wraps around it.
    """

    def __init__(self, module: nn.Module, backend: Backend, path: Path) -> None:
        self._path = as_if_eager if path == "eager" else nullcontext()
        self._compiled = torch.compile(
            _own_code(module._call_impl),
            backend=partial(_compile, backend),
            fullgraph=True,
            dynamic=False,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            # Dynamo checks by default that no hook was added since, but only outside of modules.
            settings = dynamo_config.patch(
                ignore_logger_methods=_loggers(), skip_nnmodule_hook_guards=False
            )
            with settings, self._path:
                return self._compiled(*args, **kwargs)
        except exc.BackendCompilerFailed as error:
            inner = error.inner_exception
            if isinstance(inner, RekindleError):
                raise inner from None
            raise
        except exc.FailOnRecompileLimitHit as error:
            raise Unsupported(
                "this planned model got too many kinds of input (shapes, train and eval mode, "
                "with and without gradients). Give batches of one shape, or allow more kinds: "
                "write torch._dynamo.config.recompile_limit = 64"
            ) from error
        except _NOT_TRACED as error:
            raise _Untraceable(
                "this model cannot be planned ahead, because the operators that it runs depend "
                f"on data or on something outside of the model: {_first_lines(error)}. To evict "
                "and recompute while the model runs instead, write `with rekindle.budget(...):` "
                "around the training step"
            ) from error
        except RuntimeError as error:
            if "found no compiled frames" not in str(error):
                raise
            raise Unsupported(
                "a planned model was called inside another dispatch mode (such as a counter of "
                "operators), where nothing can be compiled. Call the planned model outside of "
                "that mode, or the plain model inside it"
            ) from error


def _compile(backend: Backend, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    refuse_numpy(module)
    return backend(module, inputs)


def _loggers() -> set[Any]:
    """Return the methods of `Logger` that torch.compile must skip, so that models may log."""
    names = ("debug", "info", "warning", "error", "log", "warning_once", "warning_advice")
    return {getattr(Logger, name) for name in names if hasattr(Logger, name)}


def _own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `function` and shares its code object with no other function.

    torch.compile keeps a limited number of compiled versions per code object. If all plans shared
    the code object of `nn.Module._call_impl`, a new plan would displace an older one.
    """

    def planned(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    planned.__code__ = planned.__code__.replace()
    return planned


def _first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]).rstrip(".")


def _arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example_inputs, Mapping):
        return (), {str(name): value for name, value in example_inputs.items()}
    if isinstance(example_inputs, Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, Sequence) and not isinstance(example_inputs, str):
        return tuple(example_inputs), {}
    raise Unsupported(
        f"rekindle.plan(model, example_inputs, ...): got {type(example_inputs).__name__}, wanted "
        "the arguments of a call of the model; write rekindle.plan(model, (x, y), ...) or "
        "rekindle.plan(model, {'x': x}, ...)"
    )


def _bytes_around(model: nn.Module, inputs: Any) -> Bytes:
    """Return the bytes of all parameters, buffers and inputs, even if no operator reads them."""
    given = [*model.parameters(), *model.buffers(), *_tensors_in(inputs)]
    homes = [each.untyped_storage() for each in given]
    return sum({home._cdata: home.nbytes() for home in homes}.values())


def _tensors_in(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
