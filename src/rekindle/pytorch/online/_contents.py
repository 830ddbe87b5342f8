"""Record the contents of Python containers and the states of generators, to restore them later."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch

from rekindle.pytorch.devices import accelerator

_CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)

PutBack = Callable[[], Any]


def keep_generators() -> list[PutBack]:
    """Return functions that set the generators of torch, Python and NumPy to their state now."""
    found: list[PutBack] = []

    def remember(get: Callable[[], Any], put: Callable[[Any], Any]) -> None:
        state = get()
        found.append(lambda: put(state))

    remember(torch.get_rng_state, torch.set_rng_state)
    remember(random.getstate, random.setstate)
    if accelerator.in_use():
        remember(accelerator.generator_states, accelerator.set_generator_states)
    if "numpy" in sys.modules:
        numpy_random = sys.modules["numpy"].random
        remember(numpy_random.get_state, numpy_random.set_state)
    return found


def keep(value: Any) -> PutBack:
    """Return a function that returns `value`, for items that need no restoring."""
    return lambda: value


def put_back(
    value: Any, seen: dict[int, PutBack], item_kept: Callable[[Any], PutBack] = keep
) -> PutBack:
    """Record the contents of `value` and of all containers inside `value`.

    The restoring function fills the same container objects again, because handles of hooks and C++
    code refer to them.

    Args:
        value: A container, or anything else.
        seen: The containers recorded so far, by id. Pass an empty dict.
        item_kept: Records one item that is not a container.

    Returns:
        A function that restores the contents and returns `value`.
    """
    if type(value) not in _CONTAINERS:
        return item_kept(value)
    if id(value) in seen:
        return seen[id(value)]
    pending = True

    def refill() -> Any:
        nonlocal pending
        if pending:  # False if the container contains itself, and is being filled already.
            pending = False
            content = [(key, item()) for key, item in items]
            value.clear()
            if isinstance(value, dict):
                value.update(content)
            elif isinstance(value, set):
                value.update(item for _, item in content)
            else:
                value.extend(item for _, item in content)
            pending = True
        return value

    seen[id(value)] = refill
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    items = [(key, put_back(item, seen, item_kept)) for key, item in pairs]
    return refill
