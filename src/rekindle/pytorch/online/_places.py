"""Record where each operator ran: its `nn.Module`, and its line. Active only during a recording.

The place of an operator of the forward pass is the innermost running module and the user's line. An
operator of the backward pass gets the place of the forward operator that its autograd node
differentiates. Autograd numbers nodes in the order of their creation, and that forward operator
runs right after the node is made.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from rekindle.pytorch.online._users_line import users_line
from rekindle.pytorch.operators import BackwardNode

OUTSIDE = "(outside of modules)"


class Place(NamedTuple):
    """A place in the program: an `nn.Module` and a line.

    Attributes:
        module: The path of the module from the outermost one ("GPT.blocks.3.out").
        line: "file:line".
    """

    module: str
    line: str


@final
@dataclass(frozen=True, slots=True)
class Site:
    """An operator of the program, and the line that called it, as "file:line"."""

    operator: str
    line: str

    def __str__(self) -> str:
        return f"{self.operator} at {self.line}" if self.line else self.operator


@final
class Places:
    """The places of all operators since `watch`: `of_op[i]` is the place of operator i."""

    def __init__(self, node: Callable[[], BackwardNode | None]) -> None:
        """Make an object without places.

        Args:
            node: Returns the autograd node that runs on this thread.
        """
        self._node = node
        self.of_op: list[Place] = []
        #: If set, called at each operator of the forward pass. Returns a label to store for it.
        self.where: Callable[[], str] | None = None
        self.said: list[str] = []  #: the label that `where` returned, for each operator
        self.parameters: dict[int, str] = {}  #: path of the module that owns a parameter, by its id
        # paths of the modules whose forward pass runs, the innermost last
        self._running: list[str] = []
        self._paths: dict[nn.Module, str] = {}  # path of each module from the outermost one
        self._nodes: list[int] = []  # sequence numbers of autograd nodes, ascending
        # for each autograd node in `_nodes`, the place where it was made
        self._made_at: list[Place] = []

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Track which `nn.Module` is running, inside the block."""
        with ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(self._enter).remove)
            stack.callback(register_module_forward_hook(self._leave, always_call=True).remove)
            # The keys of `_paths` are modules. A module that holds its results, whose graph refers
            # to this object, would otherwise never be freed.
            stack.callback(self._paths.clear)
            yield

    def note(self, operators: int) -> None:
        """Record the current place for each operator that ran since the last call.

        Args:
            operators: The number of operators that ran since `watch`.
        """
        more = operators - len(self.of_op)
        if more > 0:
            backward = torch._C._current_graph_task_id() >= 0
            said = "" if backward or self.where is None else self.where()
            self.of_op += [self._here()] * more
            self.said += [said] * more

    def _here(self) -> Place:
        """Return the place of the operator that is running."""
        node = self._node()
        if node is not None:
            if node.parameter is not None:
                return Place(self.parameters.get(id(node.parameter), OUTSIDE), users_line())
            return self._made_near(node.number)
        place = Place(self._running[-1] if self._running else OUTSIDE, users_line())
        latest = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]
        if not self._nodes or latest > self._nodes[-1]:
            self._nodes.append(latest)
            self._made_at.append(place)
        return place

    def _made_near(self, number: int) -> Place:
        """Return the place where the autograd node with the sequence number `number` was made.

        Views are not operators of the core, so a view's node gets the place of the next operator.
        """
        found = bisect_left(self._nodes, number)
        return self._made_at[found] if found < len(self._nodes) else Place(OUTSIDE, users_line())

    def _enter(self, module: nn.Module, args: Any) -> None:
        """Push the path of `module`, whose forward pass begins."""
        if torch.compiler.is_compiling():
            return  # modules inside compiled code are part of one operator, so they have no place
        path = self._paths.get(module)
        if path is None:
            path = self._discover(module)
        self._running.append(path)

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        """Pop the path of `module`, whose forward pass ends."""
        if not torch.compiler.is_compiling() and self._running:
            self._running.pop()

    def _discover(self, root: nn.Module) -> str:
        """Assign paths to the outermost module `root` and all modules inside. Return its path."""
        prefix = type(root).__name__
        for name, module in root.named_modules():
            path = f"{prefix}.{name}" if name else prefix
            self._paths.setdefault(module, path)
            for parameter in module.parameters(recurse=False):
                self.parameters.setdefault(id(parameter), path)
        return self._paths[root]
