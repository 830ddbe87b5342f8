"""Make the errors that Rekindle raises if it cannot recompute a value correctly."""

from __future__ import annotations

from rekindle._errors import OutOfBudget, Unsupported
from rekindle._types import Bytes
from rekindle._units import format_bytes


def changed_size(name: str, now: Bytes, before: Bytes) -> Unsupported:
    """Return the error for an operator whose recomputed result has another size."""
    return Unsupported(
        f"{name} returned {now} bytes when it was recomputed, but {before} bytes the first time: "
        "its result depends on more than its arguments. To keep its result in memory, run it in "
        "`with rekindle.never_recompute():`"
    )


def resized_input(now: Bytes, before: Bytes) -> Unsupported:
    """Return the error for a tensor, needed to recompute, that was resized."""
    return Unsupported(
        f"a tensor that is needed for a recomputation had {before} bytes and now has {now}: its "
        "storage was resized outside of the budget (as FSDP does after the forward pass). Write "
        "fully_shard(..., reshard_after_forward=False)"
    )


def gathered_input(nbytes: Bytes, changed: bool) -> Unsupported:
    """Return the error for a parameter, needed to recompute, that FSDP has freed or changed."""
    if changed:
        return Unsupported(
            f"a parameter of {format_bytes(nbytes)} that FSDP gathered again has other contents "
            "than in the forward pass, so values of that pass cannot be recomputed. Change "
            "parameters after the backward pass, or write "
            "fully_shard(module, reshard_after_forward=False)"
        )
    return Unsupported(
        f"a parameter of {format_bytes(nbytes)} that recomputation needs is not gathered: FSDP "
        "freed it after the forward pass, and a value of its module is read outside the module's "
        "backward pass. Write fully_shard(module, reshard_after_forward=False) for this module"
    )


def lost_value(made_by: str, nbytes: Bytes, budget: Bytes) -> OutOfBudget:
    """Return the error for a value without room, read after a tensor it needs was overwritten.

    Args:
        made_by: The operator that made the value.
        nbytes: The size of the value.
        budget: The budget in bytes; 0 if it has ended.
    """
    return OutOfBudget(
        f"a result of {made_by} ({format_bytes(nbytes)}) had no room in the budget, so it was only "
        "computed in slices, where operators read it. A tensor that it is computed from was "
        "overwritten since (by an optimizer step, for example), so it cannot be computed any more. "
        "Read it before that, or raise the budget by its size",
        needed=nbytes,
        budget=budget,
        smallest_budget=budget + nbytes if budget else 0,
        operator=made_by,
    )


def modified_input(made_by: str, now: int, expected: int) -> RuntimeError:
    """Return the error for a modified tensor that a recomputation needs (R7, version check)."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: {made_by} that recomputation needs is at version {now}; expected version "
        f"{expected} instead. The tensor was modified outside of the budget. Modify it inside "
        "`with rekindle.budget(...):`"
    )


def collective_in_replay(name: str) -> Unsupported:
    """Return the error for a collective that the body of a recomputed operator calls."""
    return Unsupported(
        f"{name}: an operator that did not communicate when it first ran communicates when it is "
        "recomputed, which the other ranks would not answer. To keep its results in memory, run it "
        "in `with rekindle.never_recompute():`"
    )


def foreign_input(made_by: str) -> RuntimeError:
    """Return the error for a tensor, needed to recompute, that NumPy or the like wrote."""
    return RuntimeError(
        f"{made_by} is needed for a recomputation, but was modified outside of PyTorch, which "
        "shares its memory with NumPy, another process or a file. Modify the tensor with PyTorch "
        "inside `with rekindle.budget(...):`, or after the backward pass"
    )


def recomputed_in_a_graph(maker: str) -> Unsupported:
    """Return the error for a value that must be recomputed during CUDA graph capture."""
    return Unsupported(
        f"{maker} was evicted, and is needed while CUDA captures a graph. It cannot be recomputed "
        "there, because replays of the graph have other inputs. Capture the forward and the "
        "backward pass together, write run.keep(tensor) before the capture if a variable holds "
        "the tensor, or capture outside of rekindle.budget(...)"
    )
