"""Run a step and describe its outcome: results of operators, and the state after the step.

`rekindle.verify` and `observed/_compare.py` compare such outcomes. An outcome has fingerprints
(hashes) of tensors, not copies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.nn.modules.module import register_module_forward_pre_hook

from rekindle.pytorch.devices import accelerator
from rekindle.pytorch.held import present
from rekindle.pytorch.observed._before import Before, Onlooker
from rekindle.pytorch.online import Site, users_line
from rekindle.pytorch.operators import (
    Fingerprint,
    fingerprint_of,
    fingerprint_of_memory,
    operator,
    tensors_in,
)
from rekindle.pytorch.tensors import UNWRITTEN, homes_of

# Kinds of tensors and numbers that are compared; also the row names in the table of `verify`.
RESULTS, GRADIENTS = "results", "gradients"
PARAMETERS, BUFFERS, STATE = "parameters", "buffers", "optimizer state"
OTHER, GENERATORS, CALLS = "other tensors", "random numbers", "forward and hook calls"
KINDS = (RESULTS, GRADIENTS, PARAMETERS, BUFFERS, STATE, OTHER, GENERATORS, CALLS)

Key = tuple[str, str]  # kind and name of a tensor or number that is compared
_HOOKS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}
_LEAF_HOOKS = {
    "_backward_hooks": "gradient hook",
    "_post_accumulate_grad_hooks": "gradient hook",
}


@final
@dataclass(frozen=True)
class Outcome:
    """The outcome of one run of a step.

    Attributes:
        left: Fingerprints of the results and of the state after the step, by kind and name.
        operators: Each operator that the step called, in order, with fingerprints of its results.
    """

    left: dict[Key, object]
    operators: list[tuple[Site, tuple[Fingerprint, ...]]]


@final
class _Watch(Onlooker):
    """Records each operator that the program calls, with fingerprints of its results."""

    def __init__(self, before: Before) -> None:
        super().__init__()
        self.operators: list[tuple[Site, tuple[Fingerprint, ...]]] = []
        self._before = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return func(*args, **kwargs)
        facts = operator(func)
        if facts.view:
            return func(*args, **kwargs)
        self._before.about_to_run(func, args, kwargs)
        result = func(*args, **kwargs)
        if not facts.content & UNWRITTEN:
            given = tuple(_fingerprint(tensor) for tensor in tensors_in(result))
            self.operators.append((Site(facts.name, users_line()), given))
        return result


def observe(step: Callable[[], object], before: Before) -> Outcome:
    """Run `step` and return its outcome. The caller restores the state of the program."""
    names = Names(before)
    with _counting_calls(before, names) as calls, _Watch(before) as watch:
        result = step()
    left = left_behind(result, before, names)
    left.update(((CALLS, name), count) for name, count in calls.items())
    return Outcome(left, watch.operators)


def left_behind(result: object, before: Before, names: Names) -> dict[Key, object]:
    """Return fingerprints of the result of a step, and of the state that it changed.

    Args:
        result: The return value of the step.
        before: The state of the program before the step.
        names: Names of the tensors of the program.
    """
    left: dict[Key, object] = {}
    for name, value in _walk("result", result):
        left[RESULTS, name] = value
    for leaf, _ in before.leaves:
        if leaf.grad is not None:
            left[GRADIENTS, names.of(leaf)] = _fingerprint(leaf.grad)
    for address, (everything, _) in before.copies.items():
        left[names.at(address)] = fingerprint_of_memory(everything.untyped_storage())
    left.update(_state_of_optimizers(before, names))
    left[GENERATORS, "default"] = fingerprint_of(torch.get_rng_state())
    if accelerator.in_use():
        for index, state in enumerate(accelerator.generator_states()):
            left[GENERATORS, f"{accelerator.KIND}:{index}"] = fingerprint_of(state)
    return left


def _fingerprint(tensor: Tensor) -> Fingerprint:
    """Return the fingerprint of a tensor whose memory may have been evicted."""
    with present([tensor], writes=False):
        return fingerprint_of(tensor)


def _walk(name: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield the tensors and numbers in the result of a step, each with a name."""
    if isinstance(value, Tensor):
        yield name, _fingerprint(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _walk(f"{name}[{key!r}]", item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _walk(f"{name}[{index}]", item)
    elif isinstance(value, bool | int | float | complex | str):
        yield name, repr(value)  # as text, because nan is not equal to itself


def _state_of_optimizers(before: Before, names: Names) -> Iterator[tuple[Key, object]]:
    for optimizer in before.optimizers:
        for parameter, entries in optimizer.state.items():
            if isinstance(entries, dict):
                for entry, value in entries.items():
                    for name, each in _walk(f"{entry} of {names.of(parameter)}", value):
                        yield (STATE, name), each


@final
class Names:
    """Readable names of parameters, buffers, optimizer state and modules of the program."""

    def __init__(self, before: Before) -> None:
        children = {id(child) for module in before.modules for child in module.children()}
        roots = [module for module in before.modules if id(module) not in children]
        self.modules: dict[int, str] = {}
        self._tensors: dict[int, str] = {}
        self._addresses: dict[int, Key] = {}
        # Roots of one class get different names, so that none hides the tensors of another.
        numbers: Counter[str] = Counter()
        for root in roots:
            numbers[_type(root)] += 1
            number = numbers[_type(root)]
            top = f"{_type(root)} {number}" if number > 1 else _type(root)
            for path, module in root.named_modules():
                self.modules.setdefault(id(module), ".".join(filter(None, (top, path))))
        for module in before.modules:
            for kind, found in ((PARAMETERS, module._parameters), (BUFFERS, module._buffers)):
                for name, tensor in found.items():
                    if tensor is not None:
                        self._name(tensor, kind, f"{self.modules.get(id(module), '?')}.{name}")
        for optimizer in before.optimizers:
            for parameter, entries in optimizer.state.items():
                for entry, value in entries.items() if isinstance(entries, dict) else ():
                    if isinstance(value, Tensor):
                        self._name(value, STATE, f"{entry} of {self.of(parameter)}")
        for leaf, grad in before.leaves:
            if grad is not None:
                self._name(grad, GRADIENTS, f"{self.of(leaf)}, as it was before")

    def _name(self, tensor: Tensor, kind: str, name: str) -> None:
        self._tensors.setdefault(id(tensor), name)
        for home in homes_of([tensor]):
            self._addresses.setdefault(home._cdata, (kind, name))

    def of(self, tensor: object) -> str:
        if id(tensor) in self._tensors:
            return self._tensors[id(tensor)]
        shape = list(tensor.shape) if isinstance(tensor, Tensor) else ""
        return f"a tensor {shape} ({id(tensor):#x})"

    def at(self, address: int) -> Key:
        return self._addresses.get(address, (OTHER, f"memory {address:#x}"))


def _type(module: nn.Module) -> str:
    return type(module).__name__


@contextmanager
def _counting_calls(before: Before, names: Names) -> Iterator[Counter[str]]:
    """While open, count the forward passes of each module and the calls of each hook."""
    counts: Counter[str] = Counter()
    changed: list[tuple[dict[Any, Any], dict[Any, Any]]] = []

    def count_hooks(hooks: Any, name: str) -> None:
        if isinstance(hooks, dict) and hooks:
            changed.append((hooks, dict(hooks)))
            for key, hook in list(hooks.items()):
                hooks[key] = _Counted(hook, name, counts)

    for module in before.modules:
        for attribute, kind in _HOOKS.items():
            place = names.modules.get(id(module), _type(module))
            count_hooks(getattr(module, attribute, None), f"{kind} of {place}")
    for leaf, _ in before.leaves:
        for attribute, kind in _LEAF_HOOKS.items():
            count_hooks(getattr(leaf, attribute, None), f"{kind} of {names.of(leaf)}")

    def passed(module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():
            return  # Dynamo traces this hook inside compiled code
        counts[f"forward of {names.modules.get(id(module), _type(module))}"] += 1

    watching = register_module_forward_pre_hook(passed)
    try:
        yield counts
    finally:
        watching.remove()
        for hooks, originals in changed:
            for key, original in originals.items():
                if key in hooks:
                    hooks[key] = original


@final
class _Counted:
    """Replaces a hook: it counts the call, and then calls the hook."""

    def __init__(self, hook: Callable[..., Any], name: str, counts: Counter[str]) -> None:
        self._hook, self._name, self._counts = hook, name, counts

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._counts[self._name] += 1
        return self._hook(*args, **kwargs)
