"""Simulate a device that runs out of memory, and find out how a budget handles that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import rekindle
from rekindle.pytorch.native._callbacks import PythonCallbacks

ROWS = 1 << 16
VECTOR = 4 * ROWS
OFTEN = 1 << 40


def _deep(x: Tensor, depth: int) -> Tensor:
    for _ in range(depth):
        x = (x.sin() * x).exp() * 0.5
    return x


def _weight() -> Tensor:
    return torch.linspace(0.1, 1.0, ROWS, device="cuda").requires_grad_()


@contextmanager
def _room_for(vectors: int, said: str = "") -> Iterator[list[int]]:
    """Limit the device to the memory in use and that of `vectors` more.

    Args:
        vectors: The number of vectors that still fit.
        said: The message of the error, if a library raises it instead of the allocator.

    Yields:
        A list that at the end has the number of refusals.
    """
    import _standin

    torch.cuda.synchronize()
    _standin.refuse(0, torch.cuda.memory_allocated() + vectors * VECTOR, OFTEN, said)
    refused: list[int] = []
    try:
        yield refused
    finally:
        refused.append(OFTEN - _standin.refusals_left())
        _standin.refuse(0, 0, 0, "")


def _budget() -> rekindle.budget:
    """Return a budget that is much larger than the device's memory."""
    return rekindle.budget(1400 * VECTOR, device="cuda", learn=False)


def _refused(said: str = "") -> dict[str, Any]:
    """Train on a device that refuses memory: each retry evicts more, and the step succeeds."""
    weight = _weight()
    (plain,) = torch.autograd.grad(_deep(weight, 12).sum(), weight)
    wanted = plain.cpu()
    del plain
    with _room_for(14, said) as refused, _budget() as run:
        (gradient,) = torch.autograd.grad(_deep(weight, 12).sum(), weight)
        run._driver.engine.check()  # type: ignore[union-attr]
    return {
        "equal": torch.equal(gradient.cpu(), wanted),
        "refused": refused[0],
        "evictions": run.evictions,
        "recomputations": run.recomputations,
    }


def _first_call() -> dict[str, Any]:
    """Fail the first call of an operator of eight vectors, and return the evictions for it."""
    weight = _weight()
    with _budget() as run:
        driver: Any = run._driver
        driver.core.disable_for_tests(driver.handle, "cheapest_neighbors")
        saved = _deep(weight, 20)  # autograd holds these values, so they may be evicted
        wide = weight.expand(8, ROWS)
        with _room_for(4) as refused:
            made = wide + 0.125
        memory, budget = driver.engine.memory, driver.backoff.budget
        driver.engine.check()
        del made, saved
    return {
        "refused": refused[0],
        "evictions": run.evictions,
        "memory": memory / VECTOR,
        "budget": budget / VECTOR,
    }


def _no_segments() -> dict[str, Any]:
    """Return the error if the snapshot of the device's allocator has an unknown format."""
    found: dict[str, Any] = {}
    for given in ((), ["no bytes"]):
        wrong = patch.object(PythonCallbacks, "segments", lambda *_, given=given: given)
        with wrong, _room_for(4), _budget():
            try:
                _deep(_weight(), 12).sum()
                found[str(given)] = "nothing"
            except Exception as error:
                found[str(given)] = type(error).__name__
    return found


def _held() -> dict[str, Any]:
    """Return how many vectors are in memory after a forward pass, if 40 fit on the device."""
    weight = _weight()
    with _room_for(40) as refused, _budget() as run:
        loss = _deep(weight, 50).sum()
        held = run._driver.engine.memory
        loss.backward()
    return {"refused": refused[0], "held": held / VECTOR}


def _hoarded() -> dict[str, Any]:
    """Return the error and the number of attempts if the program itself holds too much."""
    rows = [_weight()]
    with _room_for(14) as refused, _budget() as run:
        try:
            for _ in range(20):
                rows.append(rows[-1].exp())
        except torch.OutOfMemoryError as error:
            found = {"raised": str(error), "notes": error.__notes__, "rows": len(rows)}
        run._driver.engine.check()  # type: ignore[union-attr]
    return found | {"refused": refused[0]}


def _drawn() -> dict[str, Any]:
    """Fail a random operator after it drew numbers; the retry must draw the same numbers."""
    import _standin

    def draw(*, grad_mode: bool, refuse: bool) -> tuple[Tensor, int]:
        torch.manual_seed(1)
        found, refused = [], 0
        with torch.set_grad_enabled(grad_mode):
            for _ in range(3):
                halves = _weight() / 2
                _standin.refuse(0, 0, int(refuse), "")
                found.append(torch.bernoulli(halves))
                refused += refuse - _standin.refusals_left()
            return torch.stack(found), refused

    answers: dict[str, Any] = {}
    for name, grad_mode in (("recorded", True), ("unrecorded", False)):
        wanted, _ = draw(grad_mode=grad_mode, refuse=False)
        with _budget():
            got, refused = draw(grad_mode=grad_mode, refuse=True)
        answers[name] = {"refused": refused, "equal": torch.equal(got, wanted)}
    return answers


_calls: list[int] = []


@torch.library.custom_op("standin::add_one_to_each", mutates_args=["rows"], device_types="cuda")
def _add_one_to_each(rows: list[Tensor]) -> None:
    """Write all rows, and then raise an error."""
    _calls.append(len(rows))
    for row in rows:
        row.add_(1)
    raise torch.OutOfMemoryError("a stand-in has no memory")


def _written() -> dict[str, Any]:
    """Fail an operator after it wrote to a list of tensors; it must not be retried."""
    rows = [torch.ones(3, device="cuda"), torch.ones(4, device="cuda")]
    _calls.clear()
    found: dict[str, Any] = {}
    with _budget():
        try:
            _add_one_to_each(rows)
        except torch.OutOfMemoryError as error:
            found["raised"] = str(error)
    once = all(bool((row == 2).all()) for row in rows)
    return found | {"calls": len(_calls), "once": once}


FAULTS: dict[str, Callable[[], dict[str, Any]]] = {
    "allocator": _refused,
    "cublas": lambda: _refused("CUBLAS_STATUS_ALLOC_FAILED"),
    "driver": lambda: _refused("CUDA error: out of memory"),
    "first_call": _first_call,
    "no_segments": _no_segments,
    "held": _held,
    "hoarded": _hoarded,
    "drawn": _drawn,
    "written": _written,
}
