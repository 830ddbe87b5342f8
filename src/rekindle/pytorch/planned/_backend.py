"""`torch.compile(model, backend=rekindle.backend("6GiB"))`: plan each graph within the budget.

If graph breaks split a model into several graphs, they share the budget. A graph may use the budget
less the saved values, parameters and gradients of the graphs that were compiled before it. If a
graph is compiled again for other inputs, only the new version counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
from rekindle._units import format_bytes, format_ns
from rekindle.planners._result import Plan
from rekindle.pytorch.operators import plain_kernels
from rekindle.pytorch.planned._boxed import boxed
from rekindle.pytorch.planned._channels_last import put_channels_last
from rekindle.pytorch.planned._cut import Cut
from rekindle.pytorch.planned._host import Host
from rekindle.pytorch.planned._joint import Joint, refuse_symbols
from rekindle.pytorch.planned._late_slices import copy_late_slices
from rekindle.pytorch.planned._layouts import lay_out
from rekindle.pytorch.planned._partition import Partition
from rekindle.pytorch.planned._prices import Price, Prices, Report
from rekindle.pytorch.planned._segments import Segment
from rekindle.pytorch.planned._tangents import Tangents
from rekindle.trace import Trace, keep_all_peak

PlanTrace = Callable[[Trace, Bytes], Plan]
Inner = Literal["inductor", "eager"]
Shapes = Literal["replan", "error"]


@final
@dataclass(frozen=True)
class Planned:
    """The plan of one graph that torch.compile captured.

    Attributes:
        plan: The result of the planner.
        trace: The trace of the forward and the backward pass.
        saved: Bytes that the graph keeps from its forward to its backward pass.
        parameters: Bytes of the parameters that the graph reads.
        gradients: Bytes of the gradients of these parameters.
        spared: Bytes of generator states that the trace counts but the plan does not save, as it
            does not recompute these random operators.
        segments: The compiled segments that the trace calls, in order, one entry per call.
    """

    plan: Plan
    trace: Trace
    saved: Bytes = 0
    parameters: Bytes = 0
    gradients: Bytes = 0
    spared: Bytes = 0
    segments: tuple[Segment, ...] = ()


@final
class Backend:
    """The backend that `torch.compile` calls for each graph.

    Attributes:
        budget: The budget in bytes for all graphs together.
        inner: "inductor" compiles light operators in segments; "eager" runs operators one by one.
        shapes: "replan" plans for each shape of inputs; "error" refuses a second shape.
        reserve: Bytes of the budget that the plan leaves unused, for memory outside the graphs.
        host: Where plans may swap values to, or None.
        graphs: The last graph that was compiled for each frame of torch.compile.
        last: The last graph that was planned, even if no plan fits the budget.
        rehearsing: While True, graphs are compiled but not run: a call raises `Rehearsed`.
        when_compiled: Called after each attempt to compile a graph, successful or not.
    """

    def __init__(
        self,
        budget: Bytes,
        plan_trace: PlanTrace,
        *,
        inner: Inner = "inductor",
        shapes: Shapes = "replan",
        reserve: Bytes = 0,
        host: Host | None = None,
        prices: Prices | None = None,
        report: Report | None = None,
        besides: Callable[[Bytes], Bytes] = lambda _: 0,
    ) -> None:
        if inner not in ("inductor", "eager"):
            raise Unsupported(
                f'rekindle.backend(..., inner={inner!r}): wanted one of "inductor", "eager"; '
                'write inner="inductor" or inner="eager"'
            )
        if shapes not in ("replan", "error"):
            raise Unsupported(
                f'rekindle.backend(..., shapes={shapes!r}): wanted one of "replan", "error"; '
                'write shapes="replan" or shapes="error"'
            )
        self.budget = budget
        self.inner = inner
        self.shapes = shapes
        self.reserve = reserve
        self.host = host
        self.graphs: dict[object, Planned] = {}
        self.last: Planned | None = None
        self.rehearsing = False
        self._plan_trace = plan_trace
        self._prices = prices or Prices.of_user()
        self._report = report
        self._besides = besides
        self.when_compiled: Callable[[], None] = lambda: None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._sizes: tuple[Bytes, Bytes] = (0, 0)
        # Only the keys matter: they keep the compiled segments alive.
        self._segments: dict[Segment, None] = {}

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self._same_shapes(module, inputs)
        parameters = [each for each in inputs if isinstance(each, torch.nn.Parameter)]
        self._sizes = (
            _bytes_of(parameters),
            _bytes_of([each for each in parameters if each.requires_grad]),
        )
        try:
            compiled = self._compiled(module, inputs)
        except BaseException:
            # The graph did not compile, so it needs no share of the budget.
            self.graphs.pop(_frame(), None)
            raise
        finally:
            self.when_compiled()

        def run(*args: Any) -> Any:
            if self.rehearsing:
                raise Rehearsed
            return compiled(*args)

        return torch._dynamo.disable(run)

    def _compiled(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        tangents = Tangents()
        compiler = aot_autograd(
            fw_compiler=tangents.forward,
            bw_compiler=tangents.backward,
            inference_compiler=self._inference,
            partition_fn=self._partition,
        )
        settings = functorch_config.patch(functionalize_rng_ops=False, donated_buffer=False)
        with plain_kernels(), settings:
            return tangents.of(compiler(module, inputs))

    def _elsewhere(self) -> Bytes:
        """Return the bytes that the other graphs keep in memory while the present graph runs."""
        frame = _frame()
        return sum(
            graph.saved + graph.parameters + graph.gradients
            for key, graph in self.graphs.items()
            if key != frame
        )

    def _budget_left(self) -> Bytes:
        return max(self.budget - self.reserve - self._elsewhere(), 0)

    def _partition(
        self, module: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        refuse_symbols(module)
        with _disable_current_modes():
            if self.inner == "inductor":
                put_channels_last(module, num_fwd_outputs)
            lay_out(module, self._price)
            joint = self._joint(module, num_fwd_outputs)
            # With compiled segments, late slices are copied whatever the budget: segments, and so
            # the bits of results, must not depend on the budget.
            is_tight = self.inner == "inductor" or keep_all_peak(joint.trace) > self._budget_left()
            if is_tight and copy_late_slices(module):
                joint = self._joint(module, num_fwd_outputs)
            if self.inner == "inductor":
                joint = self._in_segments(joint, num_fwd_outputs)
            plan = self._plan_trace(joint.trace, self._budget_left())
            if plan.schedule is not None:
                self._compile(joint.segments())
        self.last = Planned(plan, joint.trace, 0, *self._sizes)
        if plan.schedule is None:
            raise self._out_of_budget(plan)
        partition = Partition(joint, plan.schedule, self._budget_left(), self.host)
        saved = _saved_bytes(joint, partition)
        self.last = self.graphs[_frame()] = Planned(
            plan, joint.trace, saved, *self._sizes, partition.spared, joint.segments()
        )
        return partition.modules()

    def _inference(self, module: fx.GraphModule, inputs: object) -> Callable[..., Any]:
        if self.inner == "inductor":
            results = len(module.graph.output_node().args[0])  # type: ignore[arg-type]
            with _disable_current_modes():
                put_channels_last(module, results)
                lay_out(module, self._price)
                joint = self._in_segments(self._joint(module, results), results)
                self._compile(joint.segments())
        else:
            with _disable_current_modes():
                lay_out(module, self._price)
        return boxed(module)

    def _in_segments(self, joint: Joint, forward_outputs: int) -> Joint:
        """Cut the graph of `joint` into segments for Inductor.

        A segment that is slower than its operators one by one is left out.
        """
        if self._report is not None:
            time, peak = format_ns(joint.trace.compute_ns), format_bytes(keep_all_peak(joint.trace))
            self._report(f"before compilation {time} and {peak} a step, nothing evicted")
        cutting = Cut(joint)
        while True:
            cutting.write()
            found = self._joint(joint.module, forward_outputs)
            if not cutting.leave_out_slow(found):
                return found

    def _compile(self, segments: Iterable[Segment]) -> None:
        """Compile `segments`. Inductor's cache on disk keeps the kernels for later processes."""
        distinct = dict.fromkeys(segments)
        self._segments.update(distinct)
        for number, segment in enumerate(distinct):
            if self._report is not None and not segment.is_compiled:
                self._report(f"compiling segment {number + 1} of {len(distinct)}")
            segment.compile()

    def _joint(self, module: fx.GraphModule, forward_outputs: int) -> Joint:
        return Joint(module, forward_outputs, self._price, besides=self._besides)

    def _price(self, nodes: list[fx.Node]) -> dict[fx.Node, Price]:
        return self._prices.of(nodes, self._report)

    def _out_of_budget(self, plan: Plan) -> OutOfBudget:
        held = {"other graphs": self._elsewhere(), "reserve": self.reserve}
        smallest = (plan.smallest_budget or plan.needed) + sum(held.values())
        parts = "".join(f", {format_bytes(n)} of it for {name}" for name, n in held.items() if n)
        return OutOfBudget(
            f"no plan fits in {self.budget} bytes ({format_bytes(self.budget)}{parts}); the "
            f"smallest budget with a known plan is {smallest} bytes ({format_bytes(smallest)}): "
            f"write budget={smallest}",
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
                    f"got an input of shape {list(shape)}, wanted {list(planned)}, for which the "
                    'plan was made; give inputs of one shape, or write shapes="replan" to make '
                    "a plan for each shape"
                )


class Rehearsed(Exception):
    """Raised in place of running a graph, while the backend is `rehearsing`."""


def _frame() -> object:
    compile_id = CompileContext.current_compile_id()
    return None if compile_id is None else compile_id.frame_id


def _bytes_of(tensors: Sequence[Tensor]) -> Bytes:
    homes = [tensor.untyped_storage() for tensor in tensors]
    return sum({home._cdata: home.nbytes() for home in homes}.values())


def _saved_bytes(joint: Joint, partition: Partition) -> Bytes:
    """Return the bytes saved from the forward to the backward pass, without graph inputs."""
    trace = joint.trace
    sources = {joint.value[node, 0] for node in [*joint.primals, *joint.constants()]
               if (node, 0) in joint.value}  # fmt: skip
    given = {trace.values[value] for value in sources}
    kept = {trace.values[value] for value in partition.saved_values}
    return sum(trace.storages[storage] for storage in kept - given)
