"""Check the arguments of `rekindle.plan`, and raise errors that say what to write instead."""

from __future__ import annotations

import inspect
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, fx, nn
from torch._dynamo import exc
from torch.utils import _pytree as pytree

from rekindle._errors import InvalidArgument, Unsupported


@contextmanager
def checked(model: Any, example_inputs: Any) -> Generator[None]:
    """Raise `InvalidArgument` if `model` is no `nn.Module`, or cannot run on `example_inputs`.

    The `with` block must trace the model. If tracing fails because of the inputs, the error is
    replaced by `InvalidArgument`, with the reason and the shapes of the inputs.
    """
    if not isinstance(model, nn.Module):
        got = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise InvalidArgument(
            f"rekindle.plan: got {got}, wanted a model (an nn.Module), a trace, or the path of "
            "one; write rekindle.plan(model, (batch,), budget=...), or for a function "
            "rekindle.plan(rekindle.capture(function), budget=...)"
        )
    _check_signature(model, example_inputs)
    try:
        yield
    except (exc.TorchRuntimeError, Unsupported) as error:
        failed = error.__cause__ if isinstance(error, Unsupported) else error
        if not isinstance(failed, exc.TorchRuntimeError):
            raise
        found = re.search(r"got \w+\(['\"](.*?)['\"]\)", str(failed), re.DOTALL)
        reason = found[1] if found else str(failed).partition("\n")[0]
        raise _do_not_fit(model, example_inputs, reason.rstrip(".")) from failed


def refuse_numpy(module: fx.GraphModule) -> None:
    """Raise `Unsupported` if the graph computes with NumPy.

    torch.compile replaces NumPy's functions by PyTorch's. PyTorch's results may differ in the last
    bits, and its random numbers come from another generator. A function of plain numbers, such as
    `np.sqrt(64)`, raises no error.
    """
    data = {node for node in module.graph.nodes if node.op in ("placeholder", "get_attr")}
    for node in module.graph.nodes:
        reads_data = not data.isdisjoint(node.all_input_nodes)
        if reads_data:
            data.add(node)
        if _is_of_numpy(node.target) and (reads_data or _is_random(node.target)):
            raise Unsupported(
                f"this model cannot be planned ahead, because it computes with NumPy "
                f"({_numpy_name(node.target)}): a plan would compute that with PyTorch, whose "
                "results may differ in the last bits. Write that part with PyTorch, or write "
                "`with rekindle.budget(...):` around the training step instead of a plan"
            )


def _is_of_numpy(target: object) -> bool:
    """Return True if `target` is a function by which torch.compile replaces a NumPy function."""
    kind = type(target)
    return kind.__module__ == "torch._dynamo.utils" and kind.__name__.startswith("numpy_")


def _is_random(target: Any) -> bool:
    return getattr(getattr(target, "f", None), "__module__", "") == "torch._numpy.random"


def _numpy_name(target: Any) -> str:
    return "numpy." + str(target.__name__).removeprefix("wrapped_")


def _check_signature(model: nn.Module, example_inputs: Any) -> None:
    positional: tuple[Any, ...] = ()
    keywords: dict[str, Any] = {}
    if isinstance(example_inputs, Mapping):
        keywords = dict(example_inputs)
    elif isinstance(example_inputs, Tensor):
        positional = (example_inputs,)
    elif isinstance(example_inputs, list | tuple):
        positional = tuple(example_inputs)
    else:
        return  # `plan_model` raises an error for other types
    try:
        inspect.signature(model.forward).bind(*positional, **keywords)
    except TypeError as error:
        raise _do_not_fit(model, example_inputs, str(error)) from None
    except ValueError:  # `model.forward` has no signature that Python can inspect
        return


def _do_not_fit(model: nn.Module, example_inputs: Any, reason: str) -> InvalidArgument:
    shapes = [
        f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
        for leaf in pytree.tree_leaves(example_inputs)
        if isinstance(leaf, Tensor)
    ]
    return InvalidArgument(
        f"rekindle.plan: {type(model).__name__} cannot be traced with these example inputs "
        f"({', '.join(shapes)}): {reason}. Write rekindle.plan(model, (batch,), budget=...) with "
        "the arguments of a call of the model. If the model does run with these inputs, write "
        "`with rekindle.budget(...):` around the training step instead"
    )
