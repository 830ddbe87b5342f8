"""Cut a joint graph into segments, which Inductor compiles. The planner runs afterwards.

Inductor reorders the operators that it compiles together. So the planner treats each segment as one
operator, and decides what to keep, free and recompute between segments. Segments depend on the
graph alone, not on the budget. So the same compiled code, with the same bits, serves all budgets.

Cuts are chosen by counting the bytes that operators read and write, because light operators are
bound by memory bandwidth:

- Operators that cannot be fused stand alone. These are matrix products, convolutions, attention and
  others that Inductor leaves to a library, random operators, operators that write into arguments,
  and operators that choose by value, such as `argmax`.
- A run consists of the light operators between two of these, all in the forward pass or all in the
  backward pass. A run is split into groups of operators that read common tensors or each other's
  results: only within such a group does fusion save memory traffic.
- A forward group is cut where few bytes cross. A tensor that others read is written to memory even
  without a cut, so a cut after it costs one more read. The cut is made if the tensors that cross it
  have at most half the bytes of the inputs that only the operators before it read. An example is
  the sum of two products, from which a norm and gates are computed. With the cut, only the sum must
  be resident to recompute these.
- A segment is compiled only if that saves enough memory traffic. The saving is the bytes that its
  operators move one by one, less those that the segment reads and writes as a whole. It must be at
  least `WORTH` of all bytes that light operators move. This limits compile time.
- A segment that is measured to be slower than its operators is not used.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from rekindle._types import Bytes
from rekindle.pytorch.planned._joint import (
    Joint,
    Place,
    is_call,
    is_random,
    makes_statistics,
    mutates,
    place_of,
)
from rekindle.pytorch.planned._segments import Segment, segment_of

#: least saving of memory traffic by a compiled segment, as a fraction of the bytes that all light
#: operators move
WORTH = 0.004
#: overhead of one operator call, as the number of bytes that it could move in this time
CALL_BYTES = 8 << 10
#: most operators in a compiled segment: larger ones compile longer, and need more memory
MOST_OPERATORS = 32
#: Names of operators that are light although they are not tagged as pointwise or as a reduction.
LIGHT = {
    "_adaptive_avg_pool2d",
    "_log_softmax",
    "_log_softmax_backward_data",
    "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit_no_training",
    "_softmax",
    "_softmax_backward_data",
    "_to_copy",
    "_unsafe_masked_index",
    "_batch_norm_with_update_functional",
    "arange",
    "avg_pool2d",
    "batch_norm_backward",
    "cat",
    "clone",
    "constant_pad_nd",
    "full",
    "full_like",
    "mse_loss",
    "mse_loss_backward",
    "native_batch_norm_backward",
    "native_group_norm",
    "native_group_norm_backward",
    "native_layer_norm",
    "native_layer_norm_backward",
    "new_full",
    "new_zeros",
    "ones_like",
    "scalar_tensor",
    "select_backward",
    "slice_backward",
    "stack",
    "upsample_nearest2d",
    "var_mean",
    "zeros_like",
}
_TAGGED = (torch.Tag.pointwise, torch.Tag.reduction)


@final
@dataclass
class _Group:
    """Operators that may become a segment.

    Attributes:
        nodes: The operators, in order.
        inputs: Tensors that these operators read from outside the group.
        outputs: Tensors that these operators make and nodes outside the group read.
        segment: The segment to call; None if the operators run one by one.
    """

    nodes: list[fx.Node]
    inputs: list[Place] = field(default_factory=list)
    outputs: list[Place] = field(default_factory=list)
    segment: Segment | None = None


@final
class Cut:
    """Divides a joint graph (forward and backward pass) into groups of operators.

    `write` replaces those groups that are worth compiling by calls of segments.
    """

    def __init__(self, joint: Joint) -> None:
        self._joint = joint
        self._graph = joint.module.graph
        #: For each tensor, its node: the call that makes it, or the `getitem` that picks it from
        #: results.
        self._node_at: dict[Place, fx.Node] = {}
        self._readers: dict[Place, set[fx.Node]] = {}
        for node in self._graph.nodes:
            if isinstance(node.meta.get("val"), Tensor):
                self._node_at.setdefault(place_of(node), node)
            if node.op == "output" or (is_call(node) and not joint.is_view(node)):
                for place in self._bases(node.all_input_nodes):
                    self._readers.setdefault(place, set()).add(node)

        forward, backward = self._halves()
        self._passes = [self._groups(forward, True), self._groups(backward, False)]
        self._choose(self._all())

    def write(self) -> None:
        """In the module of the joint graph, replace groups of operators by calls of segments."""
        writer = _Writer(self, self._graph)
        writer.write(self._passes[0], self._joint.forward_results)
        writer.write(self._passes[1], self._joint.backward_results)
        writer.finish(self._joint.output)
        self._joint.module.graph = writer.new
        self._joint.module.recompile()

    def leave_out_slow(self, written: Joint) -> bool:
        """Remove segments that are slower than their operators run one by one.

        The decision for a segment holds for the whole process. Two plans, one with compiled code
        and one with single operators, would otherwise give different bits.

        Args:
            written: The joint graph with the segments, and with their measured costs.

        Returns:
            True if any segment was removed, so that `write` must run again.
        """
        cost = {call.target: written.cost(call) for call in written.calls_of_segments()}
        slow: set[Segment] = set()
        for group in self._all():
            if group.segment is not None:
                alone = sum(self._joint.cost(node) for node in group.nodes)
                if _is_slow.setdefault(group.segment.key, cost[group.segment] > alone):
                    slow.add(group.segment)
        for group in self._all():
            if group.segment in slow:
                group.segment = None
        return bool(slow)

    def _all(self) -> list[_Group]:
        return [group for groups in self._passes for group in groups]

    # -- reads and writes -------------------------------------------------------------------------

    def _bases(self, nodes: Iterable[fx.Node]) -> Iterator[Place]:
        """Yield the tensors of `nodes`; for a view, yield the tensor that owns its storage."""
        for node in nodes:
            maker, index = place_of(node)
            if is_call(maker) and self._joint.is_view(maker):
                yield from self._bases(maker.all_input_nodes)
            else:
                yield maker, index

    def reads(self, nodes: Sequence[fx.Node]) -> list[Place]:
        """Return the tensors that `nodes` read and that are made outside `nodes`."""
        inside = set(nodes)
        places = (place for node in nodes for place in self._bases(node.all_input_nodes))
        return [place for place in dict.fromkeys(places) if place[0] not in inside]

    def leaves(self, nodes: Sequence[fx.Node]) -> list[Place]:
        """Return the results of `nodes` that nodes outside `nodes` read."""
        inside = set(nodes)
        made = ((node, index) for node in nodes for index in range(len(_fakes(node))))
        return [place for place in made if self._readers.get(place, set()) - inside]

    def node_at(self, place: Place) -> fx.Node:
        return self._node_at[place]

    # -- runs and their parts ---------------------------------------------------------------------

    def _halves(self) -> tuple[list[fx.Node], list[fx.Node]]:
        halves: tuple[list[fx.Node], list[fx.Node]] = [], []
        for node, op in zip(self._joint.nodes, self._joint.trace.ops, strict=True):
            if node is not None and is_call(node) and not self._joint.is_view(node):
                halves[op.is_backward].append(node)
        return halves

    def _groups(self, calls: Sequence[fx.Node], is_forward: bool) -> list[_Group]:
        """Divide all of `calls` into groups, in an order in which the groups can run."""
        found: list[list[fx.Node]] = []
        run: list[fx.Node] = []
        for node in calls:
            if self._is_light(node):
                run.append(node)
            else:
                found += [*self._parts(run, is_forward), [node]]
                run = []
        found += self._parts(run, is_forward)
        return [_Group(nodes, self.reads(nodes), self.leaves(nodes)) for nodes in found]

    def _is_light(self, node: fx.Node) -> bool:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or mutates(node) or is_random(node):
            return False
        space, _, name = target._schema.name.partition("::")
        if space != "aten" or not (name in LIGHT or any(tag in target.tags for tag in _TAGGED)):
            return False
        if not _fakes(node) or any(fake.is_sparse or fake.is_complex() for fake in _fakes(node)):
            return False
        if any(not _fakes(each) for each in node.all_input_nodes):
            return False
        return self._joint.may_run_again(node)

    def _parts(self, run: list[fx.Node], is_forward: bool) -> Iterator[list[fx.Node]]:
        for nodes in _connected(run, [self._ties(node) for node in run]):
            for part in self._at_waists(nodes) if is_forward else [nodes]:
                yield from self._of_size(part)

    def _ties(self, node: fx.Node) -> set[Place]:
        """Return the tensors that tie `node` to other light operators, which join its group.

        They are the results of `node`, and its inputs of at least half the size of its largest one.
        """
        read = [place for place in self._bases(node.all_input_nodes) if is_call(place[0])]
        largest = max((_bytes(place) for place in read), default=0)
        ties = {place for place in read if 2 * _bytes(place) >= largest}
        return ties | {(node, index) for index in range(len(_fakes(node)))}

    def _at_waists(self, nodes: list[fx.Node]) -> Iterator[list[fx.Node]]:
        """Split `nodes` into successive parts where few bytes pass from one part to the next.

        A split is made if all tensors that pass it are also read by operators outside `nodes`: such
        tensors are written to memory even without the split. They must have at most half the bytes
        of the inputs that only the first part reads.
        """
        begun = 0
        for end in range(1, len(nodes)):
            made, rest = nodes[begun:end], nodes[end:]
            before = set(made)
            needed = self.reads(rest)
            passing = [place for place in needed if place[0] in before]
            if not passing or any(self._readers[place] <= {*made, *rest} for place in passing):
                continue
            spared = set(self.reads(nodes[begun:])).difference(needed)
            if 2 * _sum(passing) <= _sum(spared):
                yield made
                begun = end
        yield nodes[begun:]

    def _of_size(self, nodes: list[fx.Node]) -> Iterator[list[fx.Node]]:
        """Split `nodes` into parts of at most `MOST_OPERATORS` operators.

        Each split is at the position where the fewest bytes pass from one part to the next.
        """
        if len(nodes) <= MOST_OPERATORS:
            yield nodes
            return
        ends = range(len(nodes) // 4, len(nodes) - len(nodes) // 4)
        end = min(ends, key=lambda end: _sum(self._passing(nodes, end)))
        yield from self._of_size(nodes[:end])
        yield from self._of_size(nodes[end:])

    def _passing(self, nodes: list[fx.Node], end: int) -> list[Place]:
        before = set(nodes[:end])
        return [place for place in self.reads(nodes[end:]) if place[0] in before]

    # -- worthwhile segments ----------------------------------------------------------------------

    def _choose(self, groups: Sequence[_Group]) -> None:
        """Give a segment to each group whose fusion saves enough memory traffic.

        Groups with equal operators share a segment, and their savings are added.
        """
        moved = 0
        saved: Counter[Segment] = Counter()
        for group in groups:
            if not self._is_light(group.nodes[0]):
                continue
            alone = sum(
                CALL_BYTES + _sum(self.reads([node])) + _sum(self.leaves_of(node))
                for node in group.nodes
            )
            moved += alone
            if len(group.nodes) > 1 and group.outputs:
                group.segment = self._segment(group)
                together = 2 * CALL_BYTES + _sum([*group.inputs, *group.outputs])
                saved[group.segment] += alone - together
        for group in groups:
            if group.segment is not None and saved[group.segment] < WORTH * moved:
                group.segment = None

    @staticmethod
    def leaves_of(node: fx.Node) -> list[Place]:
        return [(node, index) for index in range(len(_fakes(node)))]

    def _segment(self, group: _Group) -> Segment:
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        given: dict[Place, fx.Node] = {}
        for number, place in enumerate(group.inputs):
            given[place] = graph.placeholder(f"a{number}")
            given[place].meta = {"val": _fake(place)}

        def copy_of(node: fx.Node) -> fx.Node:
            """Copy `node` into the segment, with the views that it reads; views cost nothing."""
            if place_of(node) in given:
                return given[place_of(node)]
            if node not in copies:
                copies[node] = graph.node_copy(node, copy_of)
            return copies[node]

        for node in group.nodes:
            copy_of(node)
        graph.output([copy_of(self.node_at(place)) for place in group.outputs])
        learns = any(makes_statistics(node) for node in group.nodes)
        return segment_of(graph, makes_statistics=learns)


@final
class _Writer:
    """Writes a new joint graph that calls segments in place of their operators."""

    def __init__(self, parts: Cut, graph: fx.Graph) -> None:
        self.new = fx.Graph()
        self._parts = parts
        self._copies: dict[fx.Node, fx.Node] = {}
        self._made: dict[Place, fx.Node] = {}
        for node in graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._copy_of(node)

    def write(self, groups: Iterable[_Group], results: Iterable[Any]) -> None:
        for group in groups:
            if group.segment is not None:
                self._call(group, group.segment)
            else:
                for node in group.nodes:
                    self._copy_of(node)
        for each in results:  # make the views of results as early as possible
            if isinstance(each, fx.Node):
                self._copy_of(each)

    def finish(self, output: fx.Node) -> None:
        self.new.node_copy(output, self._copy_of)
        self.new.lint()

    def _copy_of(self, node: fx.Node) -> fx.Node:
        made = self._made.get(place_of(node))
        if made is not None:
            return made
        if node not in self._copies:
            self._copies[node] = self.new.node_copy(node, self._copy_of)
        return self._copies[node]

    def _call(self, group: _Group, segment: Segment) -> None:
        arguments = tuple(self._copy_of(self._parts.node_at(place)) for place in group.inputs)
        call = self.new.call_function(segment, arguments)
        call.meta = {**group.nodes[-1].meta, "val": [_fake(place) for place in group.outputs]}
        for index, place in enumerate(group.outputs):
            made = self.new.call_function(operator.getitem, (call, index))
            made.meta = {**self._parts.node_at(place).meta, "val": _fake(place)}
            self._made[place] = made


#: For each key of a segment, True if its operators run faster one by one than as a segment.
_is_slow: dict[str, bool] = {}


def _connected(nodes: Sequence[fx.Node], ties: Sequence[set[Place]]) -> Iterator[list[fx.Node]]:
    """Split `nodes` into groups that no tie connects, ordered by the last node of each group.

    Args:
        nodes: Operators in order.
        ties: For each node, the tensors that connect it with others.
    """
    groups: list[tuple[set[Place], list[fx.Node]]] = []
    for node, places in zip(nodes, ties, strict=True):
        tied = [group for group in groups if not group[0].isdisjoint(places)]
        groups = [group for group in groups if group[0].isdisjoint(places)]
        together = [each for _, members in tied for each in members]
        groups.append((places.union(*(known for known, _ in tied)), [*together, node]))
    position = {node: index for index, node in enumerate(nodes)}
    for _, members in groups:
        yield sorted(members, key=position.__getitem__)


def _fakes(node: fx.Node) -> list[Tensor]:
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _fake(place: Place) -> Tensor:
    return _fakes(place[0])[place[1]]


def _bytes(place: Place) -> Bytes:
    fake = _fake(place)
    return fake.numel() * fake.element_size()


def _sum(places: Iterable[Place]) -> Bytes:
    return sum(_bytes(place) for place in places)
