"""Find out when FSDP2 (`fully_shard`) frees gathered parameters, and reset it after `OutOfBudget`.

PyTorch has no public hook for freed parameters, so this file reads stack frames and private names
of FSDP. If such a name is missing, parameters count as freed for good, and nothing is reset.
Nothing here imports FSDP: if its module is not loaded, the program does not use it.

An error during a forward or backward pass leaves parameters gathered. The next step then mixes them
with sharded ones, and fails, unless the program calls PyTorch's `FSDPModule.reset_iter_state`. This
file makes that call for programs that retry a step after `OutOfBudget`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, Final, final

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

NEVER: Final = -1  #: result of `gathered_after` for a storage that is not gathered again
_ALWAYS: Final = 1 << 62  # A sequence number greater than that of any autograd node.
_GROUP: Final = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
_STATES: Final = "torch.distributed._composable_state"
# Most stack frames between the resize of a storage and FSDP's method: 7 in torch 2.13.
_MOST_FRAMES: Final = 10


def gathered_after(frame: FrameType | None) -> int:
    """Return the autograd node before which FSDP2 gathers a storage again that `frame` frees now.

    Returns:
        The sequence number of the newest node of the module's result, if the storage is freed after
        the module's forward pass: FSDP gathers it again by a hook before that node. `NEVER` if
        other code frees the storage, or if FSDP may gather it too late.
    """
    module = sys.modules.get(_GROUP)
    if module is None:
        return NEVER
    passes = {code: name for name, code in _passes_of(getattr(module, "FSDPParamGroup", None))}
    for _ in range(_MOST_FRAMES):
        if frame is None:
            break
        if frame.f_code in passes:
            return _gathered_after(passes[frame.f_code], frame.f_locals)
        frame = frame.f_back
    return NEVER


def _gathered_after(name: str, variables: Mapping[str, Any]) -> int:
    """Return the result of `gathered_after` for the method `name` of FSDP's group of parameters."""
    group = variables["self"]
    if not getattr(group, "unshard_in_backward", False):
        return NEVER
    if name == "post_forward":
        leaves = pytree.tree_leaves(variables["output"])
        nodes = [leaf.grad_fn for leaf in leaves if isinstance(leaf, Tensor)]
        return max((node._sequence_nr() for node in nodes if node is not None), default=NEVER)
    # If FSDP kept the parameters after the forward pass, modules that ran later may have saved
    # values that need them.
    freed_before = getattr(group, "_reshard_after_forward", False)
    return _ALWAYS if freed_before or name == "_reset_iter_state" else NEVER


def _passes_of(group: Any) -> Iterator[tuple[str, CodeType]]:
    """Yield name and code of each method of FSDP's class `group` that frees parameters."""
    for name in ("post_forward", "post_backward", "_reset_iter_state"):
        method = getattr(group, name, None)
        if method is not None:
            yield name, inspect.unwrap(method).__code__


@final
class InterruptedPasses:
    """Resets FSDP2 after forward and backward passes that `OutOfBudget` ended."""

    def __init__(self) -> None:
        self._next_forward: RemovableHandle | None = None
        self._within = False  # the program is inside the block of `watch`

    def expect(self) -> None:
        """Reset FSDP2 when the program next calls a root module, because `OutOfBudget` is raised.

        Until that call the forward or backward pass may still be running, because the program may
        catch the error inside. After the end of the budget this does nothing, because nothing would
        remove the hook.
        """
        if self._within and self._next_forward is None and any(_roots()):
            self._next_forward = register_module_forward_pre_hook(self._before_forward)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Inside the block, allow resets of FSDP2. At its end, remove the hook of a planned one."""
        self._within = True
        try:
            yield
        finally:
            self._within = False
            self._forget()

    def _forget(self) -> None:
        if self._next_forward is not None:
            self._next_forward.remove()
            self._next_forward = None

    def _before_forward(self, module: nn.Module, inputs: object) -> None:
        if torch.compiler.is_compiling():
            return  # Dynamo traces this hook inside compiled code, where no root module begins
        # In a backward pass, activation checkpointing calls the module again.
        in_backward = torch._C._current_graph_task_id() != -1
        if not in_backward and any(root is module for root, _ in _roots()):
            self._forget()
            reset_interrupted()


def reset_interrupted() -> None:
    """Reset each root module whose forward or backward pass an error ended, and shard it again."""
    for _, state in _roots():
        # `_reset_iter_state` exists from torch 2.13 on.
        if _is_interrupted(state) and hasattr(state, "_reset_iter_state"):
            state._reset_iter_state()


def _roots() -> Iterator[tuple[nn.Module, Any]]:
    """Yield the root modules of `fully_shard`, with their states."""
    states = getattr(sys.modules.get(_STATES), "_module_state_mapping", {})
    for module, reference in list(states.items()):
        state = reference()
        if getattr(state, "_is_root", False):
            yield module, state


def _is_interrupted(state: Any) -> bool:
    """Return True if a forward or backward pass of the root module with `state` was interrupted."""
    context = getattr(state, "_state_ctx", None)
    units = () if context is None else context.all_states
    return any(
        each._training_state.name != "IDLE"
        for unit in units
        for each in (unit, *getattr(unit, "_fsdp_param_groups", ()))
    )
