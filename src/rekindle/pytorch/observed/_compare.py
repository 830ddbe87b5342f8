"""The same step done in two ways, from the same state of the program: is the outcome the same?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from torch.utils._python_dispatch import TorchDispatchMode

from rekindle._errors import OutOfBudget
from rekindle._types import Bytes
from rekindle.pytorch.context import budget as budget_context
from rekindle.pytorch.observed._before import Before
from rekindle.pytorch.observed._observe import Key, Names, left_behind


@final
class Failed(Exception):
    """The other way raised, where the plain one does not; `__cause__` is what."""


def differing(
    plain: Callable[[], object], other: Callable[[], object], budget: Bytes
) -> tuple[Key, ...]:
    """What is not the same, bit for bit, when a step is done by `plain` and by `other`.

    `plain` runs online within `budget` bytes, or the smallest that is known to do; `other`, which
    may be compiled, as it is. Compared are results, gradients, buffers and generators; everything
    is put back. Raises `Failed` where `other` raises, and whatever `plain` does.
    """
    before = Before()
    names = Names(before)
    try:
        wanted = _within(budget, plain, before, names)
        before.restore()
        try:
            found = _outcome(other, before, names)
        except Exception as error:
            raise Failed from error
    finally:
        before.restore()
    return tuple(key for key in {**wanted, **found} if wanted.get(key) != found.get(key))


def _within(
    budget: Bytes, step: Callable[[], object], before: Before, names: Names
) -> dict[Key, object]:
    while True:
        try:
            with budget_context(budget):
                result = _run(step, before)
            return left_behind(result, before, names)  # what was evicted is back
        except OutOfBudget as error:
            budget = max(error.rehearse(), budget + 1)
        before.restore()


def _outcome(step: Callable[[], object], before: Before, names: Names) -> dict[Key, object]:
    return left_behind(_run(step, before), before, names)


def _run(step: Callable[[], object], before: Before) -> object:
    with _Onlooker(before):
        return step()


@final
class _Onlooker(TorchDispatchMode):
    """Lets `before` know of every operator, of compiled code as well, which runs below it."""

    supports_higher_order_operators = True

    def __init__(self, before: Before) -> None:
        super().__init__()
        self._before = before

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if hasattr(func, "_schema"):
            self._before.about_to_run(func, args, kwargs)
        return func(*args, **kwargs)
