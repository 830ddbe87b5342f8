"""Puts the content of Python's containers back to what it was."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

_CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)

PutBack = Callable[[], Any]


def keep(value: Any) -> PutBack:
    """Keep `value`; return what returns it."""
    return lambda: value


def put_back(
    value: Any, seen: dict[int, PutBack], item_kept: Callable[[Any], PutBack] = keep
) -> PutBack:
    """Returns what gives `value` its content of now again, and that of the containers in it.

    The same objects are filled again: hooks' handles and C++ refer to them. `item_kept` says how
    to have each item again that is no container.
    """
    if type(value) not in _CONTAINERS:
        return item_kept(value)
    if id(value) in seen:
        return seen[id(value)]
    pending = True

    def refill() -> Any:
        nonlocal pending
        if pending:  # a container that holds itself is filled once
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
