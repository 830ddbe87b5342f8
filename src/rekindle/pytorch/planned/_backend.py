"""`torch.compile(model, backend=rekindle.backend("6GiB"))`: each graph planned within the budget.

Several graphs (after graph breaks) share the budget: each gets what those compiled before it leave
when they are all in flight, that is the budget less what they save between their passes, their
parameters and the gradients of these. Compiling one of them again for other inputs replaces it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch._guards import CompileContext
from torch.utils._python_dispatch import _disable_current_modes

from rekindle._errors import OutOfBudget, Unsupported
from rekindle._types import Bytes
from rekindle._units import format_bytes
from rekindle.planners._result import Plan
from rekindle.pytorch.operators import plain_kernels
from rekindle.pytorch.planned._boxed import boxed
from rekindle.pytorch.planned._joint import Joint, refuse_symbols
from rekindle.pytorch.planned._late_slices import copy_late_slices
from rekindle.pytorch.planned._layouts import lay_out
from rekindle.pytorch.planned._partition import Partition
from rekindle.pytorch.planned._prices import Price, Prices, Report
from rekindle.pytorch.planned._tangents import Tangents
from rekindle.trace import Trace, keep_all_peak

#: A program, bytes, and how many plans were refused before: the more, the less time for this one.
PlanTrace = Callable[[Trace, Bytes, int], Plan]
Inner = Literal["inductor", "eager"]
MOST_ATTEMPTS = 6  #: at a plan whose peak is still within the budget in Inductor's order
Shapes = Literal["replan", "error"]


@final
@dataclass(frozen=True)
class Planned:
    """One graph and its plan. `saved`, in bytes, is what it keeps between its passes."""

    plan: Plan
    trace: Trace
    saved: Bytes = 0
    parameters: Bytes = 0
    gradients: Bytes = 0
    spared: Bytes = 0
    """States of generators that nothing runs again from: counted in the trace, but not kept."""


@final
class Backend:
    """What `torch.compile` calls for each graph."""

    def __init__(
        self,
        budget: Bytes,
        plan_trace: PlanTrace,
        *,
        inner: Inner = "inductor",
        shapes: Shapes = "replan",
        reserve: Bytes = 0,
        prices: Prices | None = None,
        report: Report | None = None,
        besides: Callable[[Bytes], Bytes] = lambda _: 0,
    ) -> None:
        if inner not in ("inductor", "eager"):
            raise Unsupported(f'inner={inner!r}: got neither; write inner="inductor" or "eager"')
        if shapes not in ("replan", "error"):
            raise Unsupported(f'shapes={shapes!r}: got neither; write shapes="replan" or "error"')
        self.budget = budget
        self.inner = inner
        self.shapes = shapes
        self.reserve = reserve
        #: By the number that torch.compile gives each frame: the last graph compiled for it.
        self.graphs: dict[object, Planned] = {}
        #: The last graph planned, with or without success.
        self.last: Planned | None = None
        #: Graphs are compiled, and raise `Rehearsed` where they would run.
        self.rehearsing = False
        self._plan_trace = plan_trace
        self._prices = prices or Prices.of_user()
        self._report = report
        self._besides = besides
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._sizes: tuple[Bytes, Bytes] = (0, 0)
        #: What Inductor's order takes above the planned one, as far as it was seen.
        self._disorder: Bytes = 0
        self._disorder_before: Bytes = 0  #: at the attempt before
        self._plans = 0  #: for the present graph
        #: What the graph finds in memory, and leaves there; None where nothing is planned.
        self._given: Bytes | None = None

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self._same_shapes(module, inputs)
        parameters = [each for each in inputs if isinstance(each, torch.nn.Parameter)]
        self._sizes = (
            _bytes_of(parameters),
            _bytes_of([each for each in parameters if each.requires_grad]),
        )
        self._disorder, self._disorder_before, self._given = 0, 0, None
        compile_inner = self._eagerly if self.inner == "eager" else self._by_inductor
        try:
            compiled = compile_inner(module, inputs)
        except BaseException:
            self.graphs.pop(_frame(), None)  # it will never run: its memory is free for others
            raise

        def run(*args: Any) -> Any:
            if self.rehearsing:
                raise Rehearsed
            return compiled(*args)

        return torch._dynamo.disable(run)

    def _eagerly(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        tangents = Tangents()
        compiler = aot_autograd(
            fw_compiler=tangents.forward,
            bw_compiler=tangents.backward,
            inference_compiler=boxed,
            partition_fn=self._partition,
        )
        settings = functorch_config.patch(functionalize_rng_ops=False, donated_buffer=False)
        with plain_kernels(), settings:
            return tangents.of(compiler(module, inputs))

    def _by_inductor(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Plans within less and less, until the peak is within the budget in Inductor's order."""
        from rekindle.pytorch.planned._inductor import compile_by_inductor

        for _ in range(MOST_ATTEMPTS):
            compiled = compile_by_inductor(module, inputs, self._partition, self._accept)
            if compiled is not None:
                return compiled
        assert self.last is not None
        raise self._out_of_budget(self.last.plan)

    def _accept(self, peak: Bytes) -> bool:
        """Whether a pass may take `peak` beside what it is given, as Inductor orders it."""
        if self._given is None:  # there is no backward pass
            return True
        excess = self._given + peak - self._budget_left()
        if excess > 0:
            self._disorder_before, self._disorder = self._disorder, self._disorder + excess
        return excess <= 0

    def _elsewhere(self) -> Bytes:
        """What the other graphs hold while this one runs."""
        frame = _frame()
        return sum(
            graph.saved + graph.parameters + graph.gradients
            for key, graph in self.graphs.items()
            if key != frame
        )

    def _budget_left(self) -> Bytes:
        return max(self.budget - self.reserve - self._elsewhere(), 0)

    def _room(self) -> Bytes:
        """What may be planned: what is left, less what Inductor's order takes more."""
        return max(self._budget_left() - self._disorder, 0)

    def _partition(
        self, module: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        refuse_symbols(module)
        with _disable_current_modes():
            if self.inner == "eager":
                lay_out(module, self._price)
            joint = self._joint(module, num_fwd_outputs)
            if keep_all_peak(joint.trace) > self._room() and copy_late_slices(module):
                joint = self._joint(module, num_fwd_outputs)
            plan = self._plan(joint.trace)
        self.last = Planned(plan, joint.trace, 0, *self._sizes)
        if plan.schedule is None:
            raise self._out_of_budget(plan)
        self._given = joint.given
        partition = Partition(joint, plan.schedule)
        saved = _saved_bytes(joint, partition)
        self.last = self.graphs[_frame()] = Planned(
            plan, joint.trace, saved, *self._sizes, partition.spared
        )
        return partition.modules()

    def _joint(self, module: fx.GraphModule, forward_outputs: int) -> Joint:
        return Joint(module, forward_outputs, self._price, besides=self._besides)

    def _price(self, nodes: list[fx.Node]) -> dict[fx.Node, Price]:
        return self._prices.of(nodes, self._report)

    def _plan(self, trace: Trace) -> Plan:
        """Within the room there is; or, where that is too little, the least that will do."""
        plan = self._plan_within(trace, self._room())
        left = self._budget_left()
        smallest = plan.smallest_budget
        refused = left - self._disorder_before
        if plan.schedule is None and smallest is not None and smallest < refused:
            self._disorder = left - smallest
            return self._plan_within(trace, smallest)
        return plan

    def _plan_within(self, trace: Trace, room: Bytes) -> Plan:
        self._plans += 1
        return self._plan_trace(trace, room, self._plans - 1)

    def _out_of_budget(self, plan: Plan) -> OutOfBudget:
        held = {
            "other graphs": self._elsewhere(),
            "reserve": self.reserve,
            "what Inductor's order needs more than the planned one": self._disorder,
        }
        smallest = (plan.smallest_budget or plan.needed) + sum(held.values())
        told = "".join(f", {format_bytes(n)} of it for {name}" for name, n in held.items() if n)
        return OutOfBudget(
            f"no plan fits in {self.budget} bytes ({format_bytes(self.budget)}{told}); the "
            f"smallest budget known to do is {smallest} bytes ({format_bytes(smallest)}): write "
            f"budget={smallest}",
            needed=smallest,
            budget=self.budget,
            held=held,
            smallest_budget=smallest,
        )

    def _same_shapes(self, module: fx.GraphModule, inputs: Sequence[Any]) -> None:
        names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
        for name, each in zip(names, inputs, strict=False):
            if not isinstance(each, Tensor):
                continue
            shape = tuple(each.shape)
            planned = self._shapes.setdefault(name, shape)
            if self.shapes == "error" and planned != shape:
                raise Unsupported(
                    f"an input of shape {list(shape)} where the plan is for {list(planned)}: "
                    f'make them alike, or write shapes="replan" to plan for each shape'
                )


class Rehearsed(Exception):
    """A graph was compiled, and would run now."""


def _frame() -> object:
    compile_id = CompileContext.current_compile_id()
    return None if compile_id is None else compile_id.frame_id


def _bytes_of(tensors: Sequence[Tensor]) -> Bytes:
    homes = [tensor.untyped_storage() for tensor in tensors]
    return sum({home._cdata: home.nbytes() for home in homes}.values())


def _saved_bytes(joint: Joint, partition: Partition) -> Bytes:
    """Of the storages that live from the forward pass to the backward pass, without the inputs."""
    trace = joint.trace
    sources = {joint.value[node, 0] for node in [*joint.primals, *joint.constants()]
               if (node, 0) in joint.value}  # fmt: skip
    given = {trace.values[value] for value in sources}
    kept = {trace.values[value] for value in partition.saved_values}
    return sum(trace.storages[storage] for storage in kept - given)
