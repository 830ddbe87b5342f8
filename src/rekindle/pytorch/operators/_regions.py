"""Compiled regions: code that Inductor made of a graph is one operator here (R12).

PyTorch shows such code to dispatch modes as the higher-order operator `inductor_compiled_code`, if
a setting was on when it was compiled. The graph comes with it, and tells what the code writes, how
large its results will be, and whether it may run twice.

A region of a forward pass that may run twice is recomputed as a whole. Its saved results are
evicted one by one, and one run recomputes all that are missing.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, final

import torch
from torch import Tensor, fx
from torch._higher_order_ops import wrap
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._pytree import tree_map_only

from rekindle._errors import Unsupported
from rekindle.pytorch.operators._doubtful import Doubt, doubt_of, may_differ
from rekindle.pytorch.operators._imports import when_imported
from rekindle.pytorch.operators._operators import EFFECTS, FUNCTIONAL, ROUTING

COMPILED = "inductor_compiled_code"
REGION = "inductor::compiled_region"
#: The setting, and the functions that make CUDA graphs of compiled code.
_WRAPPING = "wrap_inductor_compiled_regions"
_CAPTURING = ("cudagraph_post_compile", "cudagraph_partition_post_compile")


@contextmanager
def regions_shown() -> Iterator[None]:
    """Let dispatch modes see code that is compiled inside the block, without CUDA graphs.

    The code stays visible after the block. torch 2.10 passes no graph with it, so code compiled
    there stays invisible.
    """
    with ExitStack() as stack:
        stack.enter_context(when_imported("torch._inductor.output_code", _nothing_captured))
        if hasattr(wrap, "InductorCompiledCallable"):
            stack.enter_context(when_imported("torch._inductor.config", _wrapped))
        yield


@contextmanager
def _wrapped(config: Any) -> Iterator[None]:
    """Switch the setting on inside the block, for all threads.

    A value of `config` belongs to one thread (`config.patch` sets this thread's), and any thread
    may have imported it. A value forced by the environment applies to all threads. Setting this
    thread's value again makes PyTorch recompute the key of its caches.
    """
    setting = config._config[_WRAPPING]
    value, forced = getattr(config, _WRAPPING), setting.env_value_force
    setting.env_value_force = True
    setattr(config, _WRAPPING, value)
    try:
        yield
    finally:
        setting.env_value_force = forced
        setattr(config, _WRAPPING, value)


@contextmanager
def _nothing_captured(output_code: Any) -> Iterator[None]:
    """Compile without CUDA graphs inside the block, even with `mode="reduce-overhead"`.

    A CUDA graph reads its inputs at fixed addresses, and has private memory that cannot be evicted.
    Values that a region saves for its backward pass would stay in memory.
    """
    before = {name: getattr(output_code, name, None) for name in _CAPTURING}

    def not_captured(
        inputs: Any, compiled: Any, cudagraphs: Any, constants: Any, forward: Any
    ) -> None:
        type(cudagraphs).disable(cudagraphs)
        # The backward pass was compiled ahead.
        if forward is not None and forward.value is not None:
            output_code.maybe_handle_backward_generation(compiled, forward)

    for name, capturing in before.items():
        if capturing is not None:
            setattr(output_code, name, not_captured)
    try:
        yield
    finally:
        for name, capturing in before.items():
            if capturing is not None:
                setattr(output_code, name, capturing)


@final
class Region:
    """The properties of the code of one graph."""

    def __init__(self, code: Callable[[list[Any]], Any], module: fx.GraphModule) -> None:
        self._code = code
        self.predicting = _OnMeta(module).run
        nodes = list(module.graph.nodes)
        arguments = [node for node in nodes if node.op == "placeholder"]
        written = _written(nodes)
        #: Positions and names of the arguments that it writes.
        self.written = tuple((n, each.name) for n, each in enumerate(arguments) if each in written)
        #: True if it writes arguments but no result depends on their old contents: running
        #: statistics, which must be updated only once (R6).
        self.statistics = bool(written) and not _depends(nodes, written)
        #: True for a forward pass that has a backward pass.
        self.training = _is_forward(arguments)
        targets = [node.target for node in nodes if isinstance(node.target, OpOverload)]
        self._doubts = {doubt_of(target._schema) for target in targets} - {Doubt.NONE}
        #: True if it adds up by atomics: one trial is not enough to trust it.
        self.by_atomics = any(each >= Doubt.ATOMICS for each in self._doubts)
        #: True if it makes a decision or talks to the outside (R8, R9): never recompute it.
        self.opaque = any(
            torch.Tag.dynamic_output_shape in target.tags
            or target.namespace in EFFECTS
            or target._schema.name in ROUTING
            for target in targets
        )

    def may_differ(self, tensors: Sequence[Tensor]) -> bool:
        """Return True if running the code again on `tensors` may give different bits."""
        doubts = {Doubt.ATOMICS if each > Doubt.ATOMICS else each for each in self._doubts}
        return any(may_differ(each, None, (), tensors) for each in doubts)

    def func(self, *arguments: Any) -> Any:
        """Run the code, as PyTorch does."""
        with torch.no_grad():
            return self._code(list(arguments))


_regions: weakref.WeakKeyDictionary[Any, Region] = weakref.WeakKeyDictionary()


def region_of(compiled: Any) -> Region:
    """Return the region of `compiled`, the first argument of `inductor_compiled_code`."""
    found = _regions.get(compiled)
    if found is None:
        found = _regions[compiled] = Region(compiled.compiled_callable, compiled.original_gm)
    return found


def _is_forward(arguments: list[fx.Node]) -> bool:
    """Return True for a forward graph that has a backward graph (arguments "primals")."""
    names = [node.name.split("_")[0] for node in arguments]
    return "primals" in names and "tangents" not in names


def _written(nodes: list[fx.Node]) -> set[fx.Node]:
    """Return the arguments that the graph writes, directly or through views."""
    owner = {node: node for node in nodes if node.op == "placeholder"}  # of memory
    written: set[fx.Node] = set()
    for node in nodes:
        if node.target is operator.getitem and node.args[0] in owner:
            owner[node] = owner[node.args[0]]
        elif isinstance(node.target, OpOverload):
            for given, is_write in _aliased(node, node.target):
                if given in owner:
                    owner[node] = owner[given]
                    written |= {owner[given]} if is_write else set()
        elif isinstance(node.target, HigherOrderOperator):
            name = node.target.name()
            if name not in FUNCTIONAL and any(given in owner for given in node.all_input_nodes):
                raise Unsupported(
                    f"a compiled region that calls {name} inside rekindle.budget(...): it may "
                    "write the region's arguments unseen. Let it run outside of the region, by "
                    "torch.compiler.disable, or compile nothing inside the budget, by "
                    'torch.compiler.set_stance("force_eager")'
                )
    return written


def _aliased(node: fx.Node, target: OpOverload) -> Iterator[tuple[Any, bool]]:
    """Iterate over the arguments that the result may alias, each with True if it is written."""
    for position, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None:
            given = node.args[position] if position < len(node.args) else None
            given = node.kwargs.get(argument.name, given)
            for each in given if isinstance(given, (list, tuple)) else (given,):
                yield each, argument.alias_info.is_write


def _depends(nodes: list[fx.Node], on: set[fx.Node]) -> bool:
    """Return True if a result of the graph depends on the contents of the nodes `on`."""
    dependent = set(on)
    for node in nodes:
        if not dependent.isdisjoint(node.all_input_nodes):
            dependent.add(node)
    return nodes[-1] in dependent


@final
class _OnMeta(fx.Interpreter):
    """An interpreter that runs a graph on meta tensors, and makes new tensors on meta as well."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `target` with meta in place of every device argument."""
        args, kwargs = tree_map_only(torch.device, lambda _: torch.device("meta"), (args, kwargs))
        return super().call_function(target, args, kwargs)
