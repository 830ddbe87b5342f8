"""Turn a schedule into two graphs: one for the forward pass, one for the backward pass.

Each `Compute` of the schedule becomes a node, also the second `Compute` of an operator, which is a
recomputation. The forward graph saves only values that the backward graph reads before it
recomputes them. A random operator that is recomputed starts from the generator state that it had
when it first ran.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, fx
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from rekindle._types import Bytes, StorageId, ValueId
from rekindle.pytorch.planned._joint import (
    Joint,
    is_random,
    makes_statistics,
    paths_of,
    place_of,
    state_bytes,
)
from rekindle.schedule import Action, Compute, Free, Schedule

NO_VERSION_CHECK = "saved_tensor_with_no_vc_check"


@final
class Partition:
    """The forward and the backward graph of a joint graph under a schedule.

    Attributes:
        saved_values: Values that the forward pass saves for the backward pass.
    """

    def __init__(self, joint: Joint, schedule: Schedule) -> None:
        self._joint = joint
        self._contents: list[list[ValueId]] = [[] for _ in joint.trace.storages]
        for value, storage in enumerate(joint.trace.values):
            self._contents[storage].append(ValueId(value))
        self._again = _computed_again(joint, schedule)
        self._constants = {joint.value[node, 0] for node in joint.constants()}
        self._forward = fx.Graph()
        self._backward = fx.Graph()
        self._graph = self._forward
        self._now: dict[ValueId, fx.Node] = {}  # resident values: their nodes in the current graph
        self._before: dict[ValueId, fx.Node] = {}  # those of the forward graph at its end
        self._saved: list[tuple[fx.Node, fx.Node]] = []  # pairs: in forward, in backward graph
        self.saved_values: list[ValueId] = []
        self._ran: set[fx.Node] = set()
        self._states: dict[fx.Node, fx.Node] = {}  # generator states, by node of the joint graph
        self._draw(schedule)

    def modules(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        module = self._joint.module
        return fx.GraphModule(module, self._forward), fx.GraphModule(module, self._backward)

    @property
    def spared(self) -> Bytes:
        """Bytes of the generator states of random operators that the schedule does not recompute.

        The trace counts these states, but they are not saved.
        """
        return sum(
            state_bytes(node) for node in self._ran if is_random(node) and node not in self._states
        )

    def _draw(self, schedule: Schedule) -> None:
        joint = self._joint
        backward = _boundary(joint, schedule)
        for node in joint.primals:
            self._place_holder(node)
        for action in schedule.actions[:backward]:
            self._perform(action)
        results = self._outputs(joint.forward_results)
        self._begin_backward()
        for action in schedule.actions[backward:]:
            self._perform(action)
        self._finish_backward(self._outputs(joint.backward_results))
        self._finish_forward(results)

    def _place_holder(self, node: fx.Node) -> None:
        made = self._copy_of(node)
        if (node, 0) in self._joint.value:
            self._now[self._joint.value[node, 0]] = made

    def _copy_of(self, node: fx.Node) -> fx.Node:
        made = self._graph.create_node(node.op, node.target, node.args, node.kwargs, node.name)
        made.meta = copy.copy(node.meta)
        return made

    def _begin_backward(self) -> None:
        self._graph = self._backward
        self._before, self._now = self._now, {}
        for node in self._joint.tangents:
            self._place_holder(node)

    def _perform(self, action: Action) -> None:
        if isinstance(action, Free):
            self._free(action.storage)
            return
        assert isinstance(action, Compute), "graphs are planned without swapping"
        node = self._joint.nodes[action.op]
        if node is not None and node.op == "call_function":
            self._compute(node)

    def _free(self, storage: StorageId) -> None:
        for value in self._contents[storage]:
            self._now.pop(value, None)
            self._before.pop(value, None)

    def _compute(self, node: fx.Node) -> None:
        arguments = (node.args, node.kwargs)
        # A recomputed batch norm reads the new running statistics, as the old ones are overwritten.
        # In training its normalized result does not depend on them.
        if node in self._ran and makes_statistics(node):
            arguments = map_arg(arguments, lambda n: self._joint.mutations.get(n, n))
        self._ran.add(node)
        args, kwargs = map_arg(arguments, self._now_of)
        made = self._run(node, args, kwargs)
        for index, path in enumerate(paths_of(node)):
            value = self._joint.value[node, index]
            if value in self._now or value in self._before:
                continue  # it is still resident
            result = made
            fake = node.meta["val"]
            for step in path:
                fake = fake[step]
                result = self._graph.call_function(operator.getitem, (result, step))
                result.meta = {"val": fake}
            self._now[value] = result

    def _run(self, node: fx.Node, args: Any, kwargs: Any) -> fx.Node:
        if node not in self._again or not is_random(node):
            made = self._graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        elif node in self._states:
            state = self._state(node)
            arguments: Any = (state, node.target, *args)
            made = self._graph.call_function(run_with_rng_state, arguments, kwargs)
        else:
            arguments = (node.target, *args)
            both = self._graph.call_function(run_and_save_rng_state, arguments, kwargs)
            fake_state = _fake_state(node)
            both.meta = {"val": (fake_state, node.meta["val"])}
            self._states[node] = self._graph.call_function(operator.getitem, (both, 0))
            self._states[node].meta = {"val": fake_state}
            made = self._graph.call_function(operator.getitem, (both, 1))
        made.meta = copy.copy(node.meta)
        return made

    def _state(self, node: fx.Node) -> fx.Node:
        state = self._states[node]
        if state.graph is not self._graph:
            state = self._states[node] = self._save(state)
        return state

    def _now_of(self, node: fx.Node) -> Any:
        """Return the node in the current graph for the value of `node` in the joint graph.

        In the backward graph, a value that only the forward graph has computed becomes a saved one.
        """
        if not isinstance(node.meta.get("val"), Tensor):
            return node.meta["val"]  # a number: sizes are fixed
        value = self._joint.value[place_of(node)]
        found = self._now.get(value)
        if found is None:
            if value in self._constants:
                found = self._copy_of(place_of(node)[0])
            else:
                found = self._save(self._before[value])
                self.saved_values.append(value)
            self._now[value] = found
        return found

    def _save(self, before: fx.Node) -> fx.Node:
        """Make `before`, a node of the forward graph, a saved tensor.

        Returns:
            Its placeholder in the backward graph.
        """
        first = next(iter(self._backward.nodes), None)
        point = self._backward.inserting_before(first)
        with point:
            after = self._backward.placeholder(before.name)
        after.meta = copy.copy(before.meta)
        self._saved.append((before, after))
        return after

    def _outputs(self, results: Sequence[Any]) -> list[Any]:
        return [self._now_of(each) if isinstance(each, fx.Node) else each for each in results]

    def _finish_backward(self, results: list[Any]) -> None:
        count = len(self._joint.forward_results)
        self._backward.output(tuple(results)).meta.update(_described(self._joint, count, None))
        self._saved.sort(key=lambda pair: bool(pair[0].meta.get(NO_VERSION_CHECK)))
        first = next(iter(self._backward.nodes))
        for _, after in reversed(self._saved):
            if after is not first:
                first.prepend(after)
                first = after

    def _finish_forward(self, results: list[Any]) -> None:
        saved = [before for before, _ in self._saved]
        described = _described(self._joint, 0, len(results))
        if described:
            from torch._functorch._aot_autograd.descriptors import SavedForBackwardsAOTOutput

            described["desc"] += [SavedForBackwardsAOTOutput(i) for i in range(len(saved))]
        self._forward.output((*results, *saved)).meta.update(described)
        for graph in (self._forward, self._backward):
            graph.lint()


def _boundary(joint: Joint, schedule: Schedule) -> int:
    """Return the index of the first action of the backward pass."""
    tangents = set(joint.tangents)
    ran: set[int] = set()
    for index, action in enumerate(schedule.actions):
        if isinstance(action, Compute) and action.op not in ran:
            ran.add(action.op)
            if joint.nodes[action.op] in tangents or joint.trace.ops[action.op].is_backward:
                return index
    return len(schedule.actions)


def _computed_again(joint: Joint, schedule: Schedule) -> set[fx.Node]:
    seen: set[int] = set()
    again: set[fx.Node] = set()
    for action in schedule.actions:
        if isinstance(action, Compute):
            node = joint.nodes[action.op]
            if action.op in seen and node is not None:
                again.add(node)
            seen.add(action.op)
    return again


def _fake_state(node: fx.Node) -> Tensor:
    fake = pytree.tree_leaves(node.meta["val"])[0]
    with fake.fake_mode:
        return torch.empty(state_bytes(node), dtype=torch.uint8, device="cpu")


def _described(joint: Joint, start: int, end: int | None) -> dict[str, Any]:
    """Return AOTAutograd's descriptions of some results; empty if this torch makes none."""
    if "desc" not in joint.output.meta:
        return {}
    return {"desc": list(joint.output.meta["desc"][start:end])}
