"""Describe a joint forward-backward graph of AOTAutograd as a trace.

Inputs of the graph (parameters, buffers, batches, tangents) are sources: values without a recipe,
which the program holds to the end. The program also holds the gradients and the results of the
forward pass, once they are made. All other values are released after their last reader. The graph
is functional: no operator overwrites a tensor that another one reads.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from rekindle._errors import Unsupported
from rekindle._types import Bytes, Nanoseconds, ValueId
from rekindle.pytorch.devices import is_accelerator
from rekindle.pytorch.operators import EFFECTS, ROUTING, UNTAGGED_RANDOM, doubt_of, may_differ
from rekindle.pytorch.planned._prices import Price
from rekindle.pytorch.planned._segments import Segment
from rekindle.trace import Trace, TraceBuilder

#: A tensor in the graph: the call that makes it, and its index among the results of the call.
Place = tuple[fx.Node, int]
CPU_STATE_BYTES = torch.default_generator.get_state().nbytes


@final
class Joint:
    """A joint graph (forward and backward pass in one fx graph), and the trace that describes it.

    Attributes:
        module: The graph module.
        tangents: Placeholders for the gradients of the forward results.
        primals: All other placeholders: parameters, buffers, batches.
        output: The output node.
        forward_results: Results of the forward pass, nodes or constants.
        backward_results: Results of the backward pass, nodes or constants.
        nodes: The node of each operator of the trace; None for memory outside the graph.
        value: Tensor of the graph -> its value in the trace.
        place: Value of the trace -> its tensor in the graph.
        mutations: Input that the forward pass overwrites -> the node with its new contents.
        trace: The trace of the forward and the backward pass.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        forward_outputs: int,
        prices: Callable[[list[fx.Node]], dict[fx.Node, Price]],
        *,
        besides: Callable[[Bytes], Bytes] = lambda _: 0,
        name: str = "model",
    ) -> None:
        """Build the trace.

        Args:
            module: The joint graph.
            forward_outputs: The number of outputs that belong to the forward pass.
            prices: Returns measured costs and sizes of operator calls.
            besides: Gets the bytes of the graph's inputs. Returns the bytes of other memory of the
                model, which the graph does not read.
            name: The name of the trace.
        """
        self.module = module
        nodes = list(module.graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        self.tangents = [node for node in placeholders if is_tangent(node)]
        self.primals = [node for node in placeholders if not is_tangent(node)]
        self.output = next(node for node in reversed(nodes) if node.op == "output")
        results = list(self.output.args[0])  # type: ignore[arg-type]
        self.forward_results: list[Any] = results[:forward_outputs]
        self.backward_results: list[Any] = results[forward_outputs:]

        self.nodes: list[fx.Node | None] = []
        self.value: dict[Place, ValueId] = {}
        self.place: dict[ValueId, Place] = {}
        self._results = {
            place_of(each)
            for each in (*self.forward_results, *self.backward_results)
            if isinstance(each, fx.Node)
        }
        _without_blanks(module)
        calls = [node for node in module.graph.nodes if is_call(node)]
        forward, backward = self._halves(calls)
        self._price = prices(calls)
        self._builder = TraceBuilder(name)
        self.mutations = self._find_mutations()
        self._mutated = {node.meta["val"].untyped_storage()._cdata for node in self.mutations}
        self.trace = self._tell(forward, backward, besides)

    # -- reads and writes of a node ---------------------------------------------------------------

    def is_view(self, node: fx.Node) -> bool:
        """Return True if all results of a call are views of its arguments."""
        results = self._price[node].results
        return bool(results) and all(each.alias >= 0 for each in results) and not mutates(node)

    @staticmethod
    def places(arguments: Any) -> Iterator[Place]:
        """Yield the tensors in the arguments of a node, in order."""
        for leaf in pytree.tree_leaves(arguments, is_leaf=lambda x: isinstance(x, fx.Node)):
            if isinstance(leaf, fx.Node) and isinstance(leaf.meta.get("val"), Tensor):
                yield place_of(leaf)

    def constants(self) -> Iterable[fx.Node]:
        return (node for node in self.module.graph.nodes if node.op == "get_attr")

    def segments(self) -> tuple[Segment, ...]:
        """Return the compiled segments that the graph calls, in order, one entry per call."""
        return tuple(call.target for call in self.calls_of_segments())  # type: ignore[misc]

    def calls_of_segments(self) -> list[fx.Node]:
        return [node for node in self.nodes if node and isinstance(node.target, Segment)]

    # -- the trace --------------------------------------------------------------------------------

    def _halves(self, calls: list[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
        """Return the calls of the forward pass and of the backward pass, each in order."""
        tainted: set[fx.Node] = set(self.tangents)
        for node in self.module.graph.nodes:
            if not tainted.isdisjoint(node.all_input_nodes):
                tainted.add(node)
        wanted: set[fx.Node] = set()
        stack = [node for node in self.forward_results if isinstance(node, fx.Node)]
        stack += [node for node in calls if node not in tainted and mutates(node)]
        while stack:
            node = stack.pop()
            if node not in wanted:
                wanted.add(node)
                stack += node.all_input_nodes
        forward: list[fx.Node] = []
        backward: list[fx.Node] = []
        for node in calls:
            begun = bool(backward)
            late = node in tainted or (begun and node not in wanted)
            (backward if late else forward).append(node)
        return forward, backward

    def _find_mutations(self) -> dict[fx.Node, fx.Node]:
        """Return the inputs that the forward pass overwrites, and the nodes with new contents."""
        named = {node.meta.get("desc"): node for node in self.primals}
        described = self.output.meta.get("desc", ())
        results: Any = self.output.args[0]
        found: dict[fx.Node, fx.Node] = {
            named[each.mutated_input]: result
            for each, result in zip(described, results, strict=False)
            if hasattr(each, "mutated_input")
        }
        # Inductor puts writes into inputs into the graph itself, at its end.
        for node in self.module.graph.nodes:
            if mutates(node) and node.args[0] in self.primals:
                found[node.args[0]] = node.args[1]
        return found

    def _tell(
        self,
        forward: list[fx.Node],
        backward: list[fx.Node],
        besides: Callable[[Bytes], Bytes],
    ) -> Trace:
        homes: dict[int, ValueId] = {}
        for node in [*self.primals, *self.constants()]:
            self._source(node, homes)
        rest = besides(self._size_together(self.primals))
        rest += sum(state_bytes(node) for node in forward if is_random(node))
        if rest > 0:
            self.nodes.append(None)
            self._builder.source(rest, "besides", held=True)
        last = self._last_readers([*forward, *backward])
        for node in forward:
            self._call(node, last, is_backward=False)
        for node in self.tangents:
            self._source(node, {})
        for node in backward:
            self._call(node, last, is_backward=True)
        return self._builder.build()

    def _size_together(self, nodes: Iterable[fx.Node]) -> Bytes:
        tensors = [node for node in nodes if isinstance(node.meta.get("val"), Tensor)]
        homes = {node.meta["val"].untyped_storage()._cdata: self._size(node) for node in tensors}
        return sum(homes.values())

    def _size(self, node: fx.Node) -> Bytes:
        return int(node.meta["val"].untyped_storage().nbytes())

    def _source(self, node: fx.Node, homes: dict[int, ValueId]) -> None:
        """Add an input of the graph to the trace.

        An input that shares a storage with an earlier one becomes a view of that input.

        Args:
            node: The placeholder or constant.
            homes: Address of each storage so far -> the value of the first input in it.
        """
        fake = node.meta.get("val")
        if not isinstance(fake, Tensor):
            return
        address = fake.untyped_storage()._cdata
        self.nodes.append(node)
        if address in homes:
            base = homes[address]
            (made,) = self._builder.call(
                node.name, 0, [base], [0], aliases=[base], replayable=False, held=True
            )
        else:
            made = homes[address] = self._builder.source(self._size(node), node.name, held=True)
        self.value[node, 0] = made
        self.place[made] = (node, 0)

    def _last_readers(self, order: list[fx.Node]) -> dict[Place, fx.Node]:
        return {place: node for node in order for place in self.places((node.args, node.kwargs))}

    def _call(self, node: fx.Node, last: dict[Place, fx.Node], *, is_backward: bool) -> None:
        price = self._price[node]
        read = list(self.places((node.args, node.kwargs)))
        inputs = [self.value[place] for place in read]
        aliases = [inputs[each.alias] if each.alias >= 0 else None for each in price.results]
        self.nodes.append(node)
        results = price.results
        # If the operator writes an argument, its result is that argument, and not a new value.
        if mutates(node):
            for index, alias in enumerate(aliases):
                if alias is not None:
                    self.value[node, index] = alias
            results, aliases = (), []
        made = self._builder.call(
            str(node.target),
            price.cost,
            list(dict.fromkeys(inputs)),
            [each.nbytes for each in results],
            aliases=aliases,
            replayable=self.may_run_again(node),
            is_backward=is_backward,
            workspace=price.workspace,
        )
        for index, value in enumerate(made):
            self.value[node, index] = value
            self.place[value] = (node, index)
            if (node, index) in self._results:
                self._builder.use(value)
            elif (node, index) not in last:
                self._builder.release(value)
        for place in dict.fromkeys(read):
            if last[place] is node and is_call(place[0]) and place not in self._results:
                self._builder.release(self.value[place])

    def cost(self, node: fx.Node) -> Nanoseconds:
        return self._price[node].cost

    def may_run_again(self, node: fx.Node) -> bool:
        """Return True if the call gives the same bits again when it is recomputed."""
        target = node.target
        if isinstance(target, torch._ops.OpOverload):
            name = target._schema.name
            if name in _SEEDS or name in ROUTING or name.split("::")[0] in EFFECTS:
                return False
            if mutates(node) or torch.Tag.dynamic_output_shape in target.tags:
                return False
            if _may_differ(node):
                return False
        elif not isinstance(target, Segment):
            return False
        if makes_statistics(node):
            return True
        return not any(self._is_mutated(place) for place in self.places((node.args, node.kwargs)))

    def _is_mutated(self, place: Place) -> bool:
        fake = place[0].meta.get("val")
        return isinstance(fake, Tensor) and fake.untyped_storage()._cdata in self._mutated


def _may_differ(node: fx.Node) -> bool:
    """Return True if the kernel of the node may give other bits when it is recomputed."""
    args = [each.meta.get("val") if isinstance(each, fx.Node) else each for each in node.args]
    tensors = [each for each in pytree.tree_leaves(args) if isinstance(each, Tensor)]
    doubt = doubt_of(node.target._schema)  # type: ignore[union-attr]
    return may_differ(doubt, node.target._schema, args, tensors)  # type: ignore[union-attr]


def is_tangent(node: fx.Node) -> bool:
    return "tangents" in str(node.target)


def is_call(node: fx.Node) -> bool:
    """Return True if the node calls an operator or a segment, not an input or a `getitem`."""
    return node.op == "call_function" and node.target is not operator.getitem


def mutates(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def makes_statistics(node: fx.Node) -> bool:
    """Return True for a batch norm in training, which returns new running statistics."""
    if isinstance(node.target, Segment):
        return node.target.makes_statistics
    where = _STATISTICS.get(getattr(node.target, "name", str)())
    return where is not None and (where < 0 or bool(node.args[where]))


#: Batch norm operator -> position of its argument `training`; -1 if it has none and always trains.
_STATISTICS = {
    "aten::_native_batch_norm_legit_functional": 5,
    "aten::_batch_norm_with_update_functional": -1,
}


def is_random(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    name = target._schema.name
    if name.startswith("prims::inductor_"):
        # The operator is deterministic: its random seed is an argument, which another operator
        # drew.
        return False
    return torch.Tag.nondeterministic_seeded in target.tags or name in UNTAGGED_RANDOM


#: Operators that draw the seeds of Inductor's random numbers. Seeds are small, and are kept.
_SEEDS = {"prims::inductor_seed", "prims::inductor_seeds"}


def state_bytes(node: fx.Node) -> Bytes:
    """Return the bytes of the generator state that is saved to recompute the random call `node`."""
    leaves = pytree.tree_leaves(node.meta.get("val"))
    device = next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), None)
    return 16 if device is not None and is_accelerator(device) else CPU_STATE_BYTES


def place_of(node: fx.Node) -> Place:
    """Return the tensor of `node` as a pair: the call that makes it, and its index there.

    For a `getitem` this is the call whose result it picks; otherwise it is `node` itself.
    """
    path: list[int] = []
    while node.op == "call_function" and node.target is operator.getitem:
        path.insert(0, int(node.args[1]))  # type: ignore[arg-type]
        node = node.args[0]  # type: ignore[assignment]
    if not path:
        return node, 0
    return node, index_of(node, path)


def index_of(node: fx.Node, path: list[int]) -> int:
    """Return the index of one tensor among all tensors that `node` returns.

    Args:
        node: A call that returns nested tuples or lists.
        path: The indices that lead to the tensor, outermost first.
    """
    numbered = iter(range(1 << 30))
    tree = pytree.tree_map(
        lambda leaf: next(numbered) if isinstance(leaf, Tensor) else None, node.meta["val"]
    )
    for step in path:
        tree = tree[step]
    assert isinstance(tree, int)
    return tree


def paths_of(node: fx.Node) -> list[tuple[int, ...]]:
    """Return the indices that lead to each tensor in the nested result of `node`.

    If the result is one tensor, its path is empty.
    """
    leaves, _ = pytree.tree_flatten_with_path(node.meta.get("val"))
    return [
        tuple(getattr(key, "idx", 0) for key in path)
        for path, leaf in leaves
        if isinstance(leaf, Tensor)
    ]


def _without_blanks(module: fx.GraphModule) -> None:
    """Remove the `empty_like` tensors that CPU dropout fills with random numbers.

    In the functional graph such a tensor is only read for its size and strides. So the argument of
    `empty_like` replaces it, and no memory is needed for it.
    """
    aten = torch.ops.aten
    drawn = (aten.bernoulli.p, torch.ops.rekindle.bernoulli_like.default)
    for node in [each for each in module.graph.nodes if each.target in drawn]:
        blank: Any = node.args[0]
        if blank.target is aten.empty_like.default and set(blank.kwargs) <= {"memory_format"}:
            like = blank.args[0]
            if like.meta["val"].stride() == blank.meta["val"].stride():
                node.update_arg(0, like)
                if not blank.users:
                    module.graph.erase_node(blank)


def refuse_symbols(module: fx.GraphModule) -> None:
    """Raise `Unsupported` if the graph has symbolic sizes (dynamic shapes)."""
    for node in module.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        symbolic = isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) or (
            isinstance(value, Tensor) and not all(type(n) is int for n in value.shape)
        )
        if symbolic:
            raise Unsupported(
                "a plan needs fixed sizes, but torch.compile traced symbolic sizes; write "
                "torch.compile(model, backend=rekindle.backend(...), dynamic=False)"
            )
