"""Turn a schedule into two graphs: one for the forward pass, one for the backward pass.

Each `Compute` action of the schedule becomes a node of one of the graphs. A second `Compute` of the
same operator becomes another node, which recomputes the result. The forward graph saves a value
only if the backward graph reads this value and does not recompute it first. If a random operator is
recomputed, it starts from the state of the random number generator at its first run. A copy of a
storage to host memory or back becomes a call of a method of `Host`.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, fx
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from rekindle._types import Bytes, OpId, StorageId, ValueId
from rekindle.pytorch.planned._host import Host
from rekindle.pytorch.planned._joint import (
    Joint,
    is_random,
    makes_statistics,
    paths_of,
    place_of,
    state_bytes,
)
from rekindle.schedule import Action, Compute, Discard, Free, Schedule, SwapIn, SwapOut

NO_VERSION_CHECK = "saved_tensor_with_no_vc_check"


@final
class Partition:
    """The forward and the backward graph that run a joint graph in the order of a schedule.

    Attributes:
        saved_values: Values that the forward pass saves for the backward pass.
    """

    def __init__(
        self, joint: Joint, schedule: Schedule, budget: Bytes, host: Host | None = None
    ) -> None:
        """Make the graph of the forward pass and the graph of the backward pass.

        Args:
            joint: The joint graph: AOTAutograd's trace of a forward and a backward pass in one
                graph.
            schedule: A valid schedule of the trace of this joint graph.
            budget: The memory limit that the schedule was made for.
            host: The host memory that the schedule swaps storages out to; None if it swaps none.
        """
        self._joint = joint
        self._host = host
        self._budget = budget
        self._resident: set[StorageId] = set()
        self._memory: Bytes = 0  # bytes of resident storages at the current point of the schedule
        # total bytes of the storages that the schedule copies to host memory. So copies that run at
        # the same time never hold more device memory.
        self._leaving: Bytes = 0
        self._copied: dict[StorageId, _Copied] = {}  # storages that have a copy in host memory
        # storages that are being copied back from host memory -> node that began this copy. An
        # entry is removed when a node is inserted that waits for the copy.
        self._coming: dict[StorageId, fx.Node] = {}
        self._contents: list[list[ValueId]] = [[] for _ in joint.trace.storages]
        for value, storage in enumerate(joint.trace.values):
            self._contents[storage].append(ValueId(value))
        self._again = _computed_again(joint, schedule)
        self._constants = {joint.value[node, 0] for node in joint.constants()}
        self._forward = fx.Graph()
        self._backward = fx.Graph()
        self._graph = self._forward
        # resident values -> their nodes in the graph that is being made (`_graph`)
        self._now: dict[ValueId, fx.Node] = {}
        # values that are resident at the end of the forward graph -> their nodes in that graph
        self._before: dict[ValueId, fx.Node] = {}
        # tensors that autograd saves: (node in the forward graph, its placeholder in the backward
        # graph)
        self._saved: list[tuple[fx.Node, fx.Node]] = []
        self.saved_values: list[ValueId] = []
        self._ran: set[fx.Node] = set()
        # random operator in the joint graph -> node with the generator state at the operator's
        # first run
        self._states: dict[fx.Node, fx.Node] = {}
        self._draw(schedule)

    def modules(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        module = self._joint.module
        return fx.GraphModule(module, self._forward), fx.GraphModule(module, self._backward)

    @property
    def spared(self) -> Bytes:
        """Bytes of generator states that the trace counts, but that are not saved.

        The trace counts a state for each random operator. Only recomputed operators need it.
        """
        return sum(
            state_bytes(node) for node in self._ran if is_random(node) and node not in self._states
        )

    def _draw(self, schedule: Schedule) -> None:
        joint = self._joint
        backward = _boundary(joint, schedule)
        for node in joint.primals:
            self._place_holder(node)
        copied = [each.storage for each in schedule.actions if isinstance(each, SwapOut)]
        self._leaving = sum(joint.trace.storages[storage] for storage in copied)
        for action in schedule.actions[:backward]:
            self._perform(action)
        results = self._outputs(joint.forward_results)
        for storage in list(self._coming):
            self._arrive(storage)
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
        match action:
            case Free(storage):
                self._free(storage)
            case SwapOut(storage, keep):
                self._swap_out(storage)
                if not keep:
                    self._free(storage)
            case SwapIn(storage):
                self._swap_in(storage)
            case Discard(storage):
                del self._copied[storage]
            case Compute(op):
                self._take_memory(op)
                node = self._joint.nodes[op]
                if node is not None and node.op == "call_function":
                    self._compute(node)

    def _free(self, storage: StorageId) -> None:
        if storage in self._coming:
            self._arrive(storage)
        for value in self._contents[storage]:
            self._now.pop(value, None)
            self._before.pop(value, None)
        self._resident.remove(storage)
        self._memory -= self._joint.trace.storages[storage]
        copied = self._copied.get(storage)
        if copied is not None and not copied.evicted:
            assert self._host is not None
            copied.evicted = True
            self._graph.call_function(self._host.evict, (self._ticket_of(copied),))

    # -- copies -----------------------------------------------------------------------------------

    def _swap_out(self, storage: StorageId) -> None:
        """Insert the call that begins to copy `storage` to host memory."""
        assert self._host is not None
        trace = self._joint.trace
        values = [
            value
            for value in self._contents[storage]
            if (value in self._now or value in self._before) and not self._is_view(value)
        ]
        if storage in self._coming:
            self._arrive(storage)
        site = trace.ops[trace.maker[values[0]]].name
        nodes = [self._node_of(value) for value in values]
        ticket = self._graph.call_function(self._host.swap_out, (site, *nodes))
        ticket.meta = {"val": _fake_ticket(nodes[0])}
        self._copied[storage] = _Copied(ticket, values, self._graph)

    def _swap_in(self, storage: StorageId) -> None:
        """Insert the call that begins to copy `storage` from host memory back to the device."""
        assert self._host is not None
        size = self._joint.trace.storages[storage]
        self._make_room(size)
        self._resident.add(storage)
        self._memory += size
        ticket = self._ticket_of(self._copied[storage])
        self._coming[storage] = self._graph.call_function(self._host.swap_in, (ticket,))

    def _arrive(self, storage: StorageId) -> None:
        """Insert the call that waits for the copy of `storage` that `_swap_in` began."""
        assert self._host is not None
        copied = self._copied[storage]
        arguments = (self._ticket_of(copied), self._coming.pop(storage))
        made = self._graph.call_function(self._host.arrive, arguments)
        for index, value in enumerate(copied.values):
            result = self._graph.call_function(operator.getitem, (made, index))
            result.meta = {"val": self._fake_of(value)}
            self._now[value] = result

    def _ticket_of(self, copied: _Copied) -> fx.Node:
        if copied.graph is not self._graph:
            copied.ticket, copied.graph = self._save(copied.ticket), self._graph
        return copied.ticket

    def _is_view(self, value: ValueId) -> bool:
        """Return True if `value` is the result of an operator whose results are all views."""
        node = self._joint.nodes[self._joint.trace.maker[value]]
        return node is not None and node.op == "call_function" and self._joint.is_view(node)

    def _fake_of(self, value: ValueId) -> Tensor:
        node, index = self._joint.place[value]
        leaves = pytree.tree_leaves(node.meta["val"])
        return [each for each in leaves if isinstance(each, Tensor)][index]

    def _take_memory(self, op: OpId) -> None:
        """Make room for the results and workspace of operator `op`, and count its new storages."""
        trace = self._joint.trace
        self._make_room(trace.output_bytes(trace.ops[op]) + trace.ops[op].workspace)
        made = set(trace.new_storages(trace.ops[op])) - self._resident
        self._resident |= made
        self._memory += sum(trace.storages[storage] for storage in made)

    def _make_room(self, needed: Bytes) -> None:
        """Insert a call that waits for copies to host memory until `needed` bytes are free."""
        if self._host is None or not self._leaving:
            return
        allowed = max(0, self._budget - self._memory - needed)
        if allowed < self._leaving:
            self._graph.call_function(self._host.make_room, (allowed,))

    # -- operators --------------------------------------------------------------------------------

    def _compute(self, node: fx.Node) -> None:
        arguments = (node.args, node.kwargs)
        # A recomputed batch norm reads the updated running statistics, because its first run has
        # overwritten the old ones. In training, its normalized result does not depend on the
        # statistics.
        if node in self._ran and makes_statistics(node):
            arguments = map_arg(arguments, lambda n: self._joint.mutations.get(n, n))
        self._ran.add(node)
        args, kwargs = map_arg(arguments, self._now_of)
        made = self._run(node, args, kwargs)
        for index, path in enumerate(paths_of(node)):
            value = self._joint.value[node, index]
            if value in self._now or value in self._before:
                continue  # the first result of this operator is still resident, so keep it
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
        """Return the node in `_graph` that has the value of `node`, a node of the joint graph.

        If the backward graph needs a value that only the forward graph has computed, save this
        value.
        """
        if not isinstance(node.meta.get("val"), Tensor):
            # a number instead of a tensor; it is a constant, because all sizes are fixed
            return node.meta["val"]
        return self._node_of(self._joint.value[place_of(node)])

    def _node_of(self, value: ValueId) -> fx.Node:
        """Return the node in `_graph` for `value`, which must be resident or saved."""
        storage = self._joint.trace.values[value]
        if storage in self._coming:
            self._arrive(storage)
        if value not in self._now:
            if value in self._constants:
                self._now[value] = self._copy_of(self._joint.place[value][0])
            elif value in self._before:
                self._now[value] = self._save(self._before[value])
                self.saved_values.append(value)
            else:  # Only the base of a view is copied to host memory, so make the view again.
                assert storage in self._copied
                self._compute(self._joint.place[value][0])
        return self._now[value]

    def _save(self, before: fx.Node) -> fx.Node:
        """Save the result of `before`, a node of the forward graph, for the backward graph.

        Returns:
            The placeholder in the backward graph that gets the saved tensor.
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


@final
@dataclass
class _Copied:
    """A storage that has a copy in host memory.

    Attributes:
        ticket: The node in `graph` whose result identifies the copy for `Host`.
        values: The values that the copy contains. Views of these values are not among them: they
            are made again when needed.
        graph: The graph that contains `ticket`: the forward or the backward graph.
        evicted: True once the device's storage was freed after the copy began.
    """

    ticket: fx.Node
    values: Sequence[ValueId]
    graph: fx.Graph
    evicted: bool = False


def _boundary(joint: Joint, schedule: Schedule) -> int:
    """Return the index of the first action in `schedule` that belongs to the backward pass."""
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


def _fake_ticket(like: fx.Node) -> Tensor:
    with like.meta["val"].fake_mode:
        return torch.empty(1, dtype=torch.int64, device="cpu")


def _described(joint: Joint, start: int, end: int | None) -> dict[str, Any]:
    """Return AOTAutograd's metadata of the results from index `start` to `end`.

    Returns:
        The metadata to store in an output node; empty for versions of PyTorch that make none.
    """
    if "desc" not in joint.output.meta:
        return {}
    return {"desc": list(joint.output.meta["desc"][start:end])}
