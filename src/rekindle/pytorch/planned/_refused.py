"""Check the arguments of `rekindle.plan`, and raise errors that say what to write instead."""

from __future__ import annotations

import inspect
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch._dynamo import exc
from torch.utils import _pytree as pytree

from rekindle._errors import InvalidArgument, Unsupported


@contextmanager
def checked(model: Any, example_inputs: Any) -> Generator[None]:
    """Raise `InvalidArgument` if `model` is not a model, or does not run with these inputs.

    The body of the context must trace the model. Errors of the tracing are replaced by
    `InvalidArgument`, with the reason and the shapes of the inputs.
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
        return  # `plan_model` refuses other types
    try:
        inspect.signature(model.forward).bind(*positional, **keywords)
    except TypeError as error:
        raise _do_not_fit(model, example_inputs, str(error)) from None
    except ValueError:  # a forward without a signature
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
        "what the model is called with; if it does run with these, with rekindle.budget(...) around"
    )
