"""Treat code that Inductor compiles from a graph as one operator (R12, compiled regions).

A setting of Inductor makes PyTorch run compiled code as the higher-order operator
`inductor_compiled_code`, which dispatch modes see. An argument of this operator has the graph of
the code. From the graph, this file derives which arguments the code writes, how large its results
are, and whether it can be recomputed.

A region of a forward pass is recomputed as a whole. Its results are evicted one by one. One run of
the region recomputes all evicted results.
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

from rekindle.pytorch.operators._doubtful import Doubt, doubt_of, may_differ
from rekindle.pytorch.operators._imports import when_imported
from rekindle.pytorch.operators._operators import EFFECTS, FUNCTIONAL, OWN, ROUTING

COMPILED = "inductor_compiled_code"
REGION = "inductor::compiled_region"
#: Name of the setting of Inductor that shows compiled code to dispatch modes.
_WRAPPING = "wrap_inductor_compiled_regions"
#: Names of the functions of Inductor that make CUDA graphs of compiled code.
_CAPTURING = ("cudagraph_post_compile", "cudagraph_partition_post_compile")


@contextmanager
def regions_shown() -> Iterator[None]:
    """Make code that Inductor compiles inside the block visible to dispatch modes.

    The code is compiled without CUDA graphs, and stays visible after the block. If this version of
    torch does not give dispatch modes the graph of compiled code, the code stays invisible.
    """
    with ExitStack() as stack:
        stack.enter_context(when_imported("torch._inductor.output_code", _nothing_captured))
        if hasattr(wrap, "InductorCompiledCallable"):
            stack.enter_context(when_imported("torch._inductor.config", _wrapped))
        yield


@contextmanager
def _wrapped(config: Any) -> Iterator[None]:
    """Inside the block, make Inductor show compiled code to dispatch modes, in all threads.

    A value in Inductor's `config` belongs to one thread. A value forced by an environment variable
    applies to all threads, so the setting `_WRAPPING` is forced in this way. Setting this thread's
    value again makes PyTorch recompute the key of its compile caches.
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
    """Inside the block, compile code without CUDA graphs, even with `mode="reduce-overhead"`.

    A CUDA graph reads its inputs at fixed addresses, and has private memory that cannot be evicted.
    So the values that compiled code saves for its backward pass would stay in memory.
    """
    before = {name: getattr(output_code, name, None) for name in _CAPTURING}

    def not_captured(
        inputs: Any, compiled: Any, cudagraphs: Any, constants: Any, forward: Any
    ) -> None:
        type(cudagraphs).disable(cudagraphs)
        # The backward pass may have been compiled together with the forward pass.
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
    """A region: the compiled code of one graph, with its properties as an operator."""

    def __init__(self, code: Callable[[list[Any]], Any], module: fx.GraphModule) -> None:
        self._code = code
        self.predicting = _OnMeta(module).run
        nodes = list(module.graph.nodes)
        arguments = [node for node in nodes if node.op == "placeholder"]
        written = _written(nodes)
        #: Positions and names of the arguments that the region writes.
        self.written = tuple((n, each.name) for n, each in enumerate(arguments) if each in written)
        #: True if the region writes arguments, but no result depends on their old contents. These
        #: arguments are running statistics, which a recomputation must not update again (R6, hidden
        #: writes).
        self.statistics = bool(written) and not _depends(nodes, written)
        #: True if the region is a forward pass that has a backward pass.
        self.training = _is_forward(arguments)
        targets = [node.target for node in nodes if isinstance(node.target, OpOverload)]
        self._doubts = {doubt_of(target._schema) for target in targets} - {Doubt.NONE}
        # True if the region calls operators that are not PyTorch's own, which may do anything.
        self._calls_others = any(each.namespace not in (*OWN, *EFFECTS) for each in targets)
        #: True if the region sums by atomics, so its bits vary. One trial with equal bits proves
        #: little.
        self.by_atomics = any(each >= Doubt.ATOMICS for each in self._doubts)
        #: True if the region must not be recomputed, because it makes a decision (R8, routing) or
        #: has external effects (R9, everything else runs once).
        self.opaque = any(_is_unknown(node.target) for node in nodes) or any(
            torch.Tag.dynamic_output_shape in target.tags
            or target.namespace in EFFECTS
            or target._schema.name in ROUTING
            for target in targets
        )

    def may_differ(self, tensors: Sequence[Tensor]) -> bool:
        """Return True if the region is recomputed on trial only, as its bits may differ."""
        if self._calls_others:
            return True
        doubts = {Doubt.ATOMICS if each > Doubt.ATOMICS else each for each in self._doubts}
        return any(may_differ(each, None, (), tensors) for each in doubts)

    def func(self, *arguments: Any) -> Any:
        """Run the compiled code, as PyTorch does."""
        with torch.no_grad():
            return self._code(list(arguments))


_regions: weakref.WeakKeyDictionary[Any, Region] = weakref.WeakKeyDictionary()


def region_of(compiled: Any) -> Region:
    """Return the `Region` for `compiled`, the first argument of `inductor_compiled_code`."""
    found = _regions.get(compiled)
    if found is None:
        found = _regions[compiled] = Region(compiled.compiled_callable, compiled.original_gm)
    return found


def _is_forward(arguments: list[fx.Node]) -> bool:
    """Return True if `arguments` are those of a forward graph that has a backward graph."""
    names = [node.name.split("_")[0] for node in arguments]
    return "primals" in names and "tangents" not in names


def _written(nodes: list[fx.Node]) -> set[fx.Node]:
    """Return the arguments that the graph with these nodes writes, directly or through views."""
    # For each node of the graph, the argument of the graph whose memory it shares: the node is that
    # argument or a view of it.
    owner = {node: node for node in nodes if node.op == "placeholder"}
    written: set[fx.Node] = set()
    for node in nodes:
        if node.target is operator.getitem and node.args[0] in owner:
            owner[node] = owner[node.args[0]]
        elif isinstance(node.target, OpOverload):
            for given, is_write in _aliased(node, node.target):
                if given in owner:
                    owner[node] = owner[given]
                    written |= {owner[given]} if is_write else set()
        elif _is_unknown(node.target):
            for given in owner.keys() & {*node.all_input_nodes}:
                owner[node] = owner[given]
                written.add(owner[given])
    return written


def _is_unknown(target: Any) -> bool:
    """Return True for a higher-order operator that may write its arguments, and return them."""
    return isinstance(target, HigherOrderOperator) and target.name() not in FUNCTIONAL


def _aliased(node: fx.Node, target: OpOverload) -> Iterator[tuple[Any, bool]]:
    """Iterate over the arguments of `node` that its operator writes or returns a view of.

    Yields:
        The argument, and True if the operator writes it.
    """
    for position, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None:
            given = node.args[position] if position < len(node.args) else None
            given = node.kwargs.get(argument.name, given)
            for each in given if isinstance(given, (list, tuple)) else (given,):
                yield each, argument.alias_info.is_write


def _depends(nodes: list[fx.Node], on: set[fx.Node]) -> bool:
    """Return True if a result of the graph depends on the contents of a node in `on`."""
    dependent = set(on)
    for node in nodes:
        if not dependent.isdisjoint(node.all_input_nodes):
            dependent.add(node)
    return nodes[-1] in dependent


@final
class _OnMeta(fx.Interpreter):
    """An interpreter that runs a graph on meta tensors, also where the graph creates tensors."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `target` with the meta device in place of each argument that is a device."""
        args, kwargs = tree_map_only(torch.device, lambda _: torch.device("meta"), (args, kwargs))
        return super().call_function(target, args, kwargs)
