"""Export a plan as `torch.utils.checkpoint` calls; the model then does not need Rekindle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from rekindle._errors import Unsupported
from rekindle._types import Bytes, Nanoseconds
from rekindle._units import format_bytes

#: Operator calls whose results are saved: name of the operator, and which call of it in the block.
Saved = frozenset[tuple[str, int]]


@final
@dataclass(frozen=True)
class Export:
    """The blocks of a model to wrap in `torch.utils.checkpoint`. Bytes and ns are predictions.

    Attributes:
        budget: The budget in bytes.
        peak: The peak (bytes) of a step with the checkpoints.
        keep_all_peak: The peak (bytes) of a step without checkpoints.
        recompute_ns: Time (ns) of recomputation in a step with the checkpoints.
        compute_ns: Time (ns) of a step without checkpoints.
        blocks: Path of a module in the model -> the operator calls whose results are saved.
    """

    budget: Bytes
    peak: Bytes
    keep_all_peak: Bytes
    recompute_ns: Nanoseconds
    compute_ns: Nanoseconds
    blocks: Mapping[str, Saved]

    @property
    def fits(self) -> bool:
        """True if the predicted peak with the checkpoints is within the budget."""
        return self.peak <= self.budget

    @property
    def excess(self) -> Bytes:
        """Bytes by which the predicted peak exceeds the budget."""
        return max(0, self.peak - self.budget)

    def policy(self, block: str) -> Callable[..., CheckpointPolicy]:
        """Return a `policy_fn` for selective checkpointing of `block`.

        The function counts operator calls, so it serves only one forward pass and its
        recomputation.
        """
        return _Policy(self.blocks[block])

    def contexts(self, block: str) -> Any:
        """Return the `context_fn` of `block` for `torch.utils.checkpoint`."""
        return create_selective_checkpoint_contexts(self.policy(block))

    def apply(self, model: nn.Module) -> Callable[[], None]:
        """Wrap the blocks of `model` in place.

        Parameters and their names do not change. `torch.utils.checkpoint` runs the forward of a
        block twice, so a batch norm in it updates its running statistics twice.

        Args:
            model: The model.

        Returns:
            A function that removes the checkpoints.
        """
        wrapped = [model.get_submodule(name) for name in self.blocks]
        for name, block in zip(self.blocks, wrapped, strict=True):
            more = {"context_fn": partial(self.contexts, name)} if self.blocks[name] else {}
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, **more)

        def undo() -> None:
            for block in wrapped:
                del block.forward

        return undo

    def code(self) -> str:
        """Return Python code to paste after the line that makes `model`; it imports torch only."""
        if any(self.blocks.values()):
            raise Unsupported(
                "export.code(): a selective export needs a table of operators, which cannot be "
                "written as code; save the export with pickle and write export.apply(model), or "
                "write rekindle.export(..., selective=False)"
            )
        names = "".join(f"    {name!r},\n" for name in self.blocks)
        return (
            "from functools import partial\n"
            "from torch.utils.checkpoint import checkpoint\n\n"
            f"for name in [\n{names}]:\n"
            "    block = model.get_submodule(name)\n"
            "    block.forward = partial(checkpoint, block.forward, use_reentrant=False)\n"
        )

    def __str__(self) -> str:
        over = f", {format_bytes(self.excess)} over it" if self.excess else ""
        return (
            f"{len(self.blocks)} blocks: predicted peak {format_bytes(self.peak)} of "
            f"{format_bytes(self.budget)}{over}; {format_bytes(self.keep_all_peak)} without"
        )


@final
class _Policy:
    """The `policy_fn` that saves the results of certain operator calls.

    It counts calls of each operator, separately in the forward pass and in the recomputation.
    """

    def __init__(self, saved: Saved) -> None:
        self._saved = saved
        self._names = {name for name, _ in saved}
        self._calls: Counter[tuple[bool, str]] = Counter()

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = op._schema.name if isinstance(op, torch._ops.OpOverload) else ""
        if name not in self._names:
            return CheckpointPolicy.PREFER_RECOMPUTE
        call = self._calls[ctx.is_recompute, name]
        self._calls[ctx.is_recompute, name] += 1
        save = (name, call) in self._saved
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


def candidates(model: nn.Module, ran: set[str]) -> list[str]:
    """Return the paths of modules of `model` that may be checkpointed as a block.

    They are the outermost children of `nn.ModuleList`s and `nn.Sequential`s that have parameters.

    Args:
        model: The model.
        ran: Paths of the modules whose forward ran in the step.
    """
    found: list[str] = []
    for name, module in model.named_modules():
        in_list = isinstance(
            model.get_submodule(name.rpartition(".")[0]), nn.ModuleList | nn.Sequential
        )
        within = any(name.startswith(other + ".") for other in found)
        has_weights = any(True for _ in module.parameters())
        if name and name in ran and in_list and has_weights and not within:
            found.append(name)
    return found
