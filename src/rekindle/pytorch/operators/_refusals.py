"""The errors raised when a value cannot be recomputed correctly."""

from __future__ import annotations

from rekindle._errors import Unsupported
from rekindle._types import Bytes


def changed_size(name: str, now: Bytes, before: Bytes) -> Unsupported:
    """Return the error for an operator whose recomputation made a result of another size."""
    return Unsupported(
        f"{name} made {now} bytes when it ran again, {before} the first time: its result depends "
        "on something outside its arguments. Keep it: run it in "
        "`with rekindle.never_recompute():`"
    )


def resized_input(now: Bytes, before: Bytes) -> Unsupported:
    """Return the error for an input of a recomputation that was resized."""
    return Unsupported(
        f"a tensor of {before} bytes that recomputation needs now has {now}: its memory was "
        "resized outside (as FSDP does after the forward pass). Use reshard_after_forward=False"
    )


def modified_input(made_by: str, now: int, expected: int) -> RuntimeError:
    """Return the error for an input of a recomputation that was written outside the budget (R7)."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: {made_by} that recomputation needs is at version {now}; expected version "
        f"{expected} instead. It was modified where the budget does not see it. Do that inside "
        "`with rekindle.budget(...)`"
    )


def foreign_input(made_by: str) -> RuntimeError:
    """Return the error for an input of a recomputation that was written outside of PyTorch."""
    return RuntimeError(
        f"{made_by} that recomputation needs lies in memory that others may write "
        "(NumPy, another process, a file), and was modified there. Modify it by PyTorch, "
        "inside `with rekindle.budget(...)`, or after the backward pass"
    )


def recomputed_in_a_graph(maker: str) -> Unsupported:
    """Return the error for a recomputation during CUDA graph capture."""
    return Unsupported(
        f"{maker} was evicted, and is needed while CUDA captures a graph, in which its inputs "
        "would not be those of each replay. Capture forward and backward pass together, write "
        "run.keep(tensor) before for what a variable holds, or capture outside of "
        "rekindle.budget(...)"
    )
