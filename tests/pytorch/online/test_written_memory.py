"""Programs that change memory by every route, before and after the eviction of what depends on it.

R4, sources: evicted values that depend on the old contents are recomputed from these. Values read
after the write are those that plain PyTorch reads.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import rekindle
from rekindle import Run
from tests.helpers import sampled
from tests.pytorch import cores
from tests.pytorch.bits import differing
from tests.pytorch.harsh import WIDTH, vector
from tests.pytorch.online.write_routes import ROUTES, TOGETHER, Route

#: the argument `evict`; "counted": as "auto", and the first operators are only counted; "moved": as
#: "anything", with `swap=`
MODES = ("auto", "saved", "anything", "counted", "moved")
FEW = 12  # operators
#: what `x` is: memory of before the budget, or a value that an operator made
KINDS = ("source", "value")
#: what is evicted when: all before the write, all after it, or both
ORDERS = ("before", "after", "both")
#: whether autograd saves `x` itself, and whether the variable dies before the backward pass
USES = ("computed", "saved", "saved, dropped")

#: Errors of programs that plain PyTorch runs. Old contents may be gone when the version of a source
#: is raised. The weak references of autograd's handles forbid `swap_tensors`.
REFUSED = {
    "increment_version": "one of the variables needed for gradient computation",
    "swap_tensors": "Expected no weakrefs",
}


def evict_all(run: Run | None) -> None:
    if run is not None:
        cores.evict_all(run._driver)


@contextmanager
def budget(mode: Any) -> Iterator[Run]:
    evict = {"counted": "auto", "moved": "anything"}.get(mode, mode)
    swap = "1GiB" if mode == "moved" else None
    with rekindle.budget("1GiB", evict=evict, swap=swap, learn=False) as run:
        if mode == "counted":
            run._driver.core.count_only(run._driver.handle, FEW)  # type: ignore[attr-defined]
        yield run


def results(
    write: Route, kind: str, order: str, use: str, context: Any
) -> tuple[dict[str, Any], Run | None]:
    """Return the gradient and the last contents, or the error of the program; and its run."""
    torch.manual_seed(3)
    weight, source = vector(requires_grad=True), vector()
    found: dict[str, Any] = {}
    run: Run | None = None
    try:
        with warnings.catch_warnings(), context as run:
            warnings.simplefilter("ignore")
            x = source if kind == "source" else (source * 2).cos()
            del source
            loss: Any = sum(((x * k).sin() * weight).sum() for k in range(1, 4))
            if use != "computed":
                loss = loss + (x * weight).sum()
            if order != "after":
                evict_all(run)
            with torch.no_grad():
                write(x)
            loss = loss + ((x * 5).sin() * weight).sum()
            if order != "before":
                evict_all(run)
            found["x"] = x.detach().clone()
            if use == "saved, dropped":
                del x
            evict_all(run)
            (found["gradient"],) = torch.autograd.grad(loss, [weight])
    except RuntimeError as error:
        found["error"] = str(error)[:80]
    return found, run


def complaints(name: str, mode: Any) -> Iterator[str]:
    """Yield what differs from plain PyTorch, for all kinds of programs with the route `name`."""
    write, refused, evictions = ROUTES[name], REFUSED.get(name, "no error"), 0
    for kind, order, use in product(KINDS, ORDERS, USES):
        wanted, _ = results(write, kind, order, use, nullcontext())
        got, run = results(write, kind, order, use, budget(mode))
        assert run is not None
        run._driver.engine.check()
        evictions += run.evictions
        names = differing(got, wanted)
        if names and not got.get("error", "").startswith(refused):
            yield f"{kind}, evicted {order}, {use}: {names} {got.get('error', '')}"
    assert evictions > 0, "nothing was evicted: this tests nothing"


@pytest.mark.parametrize(
    ("name", "mode"), [(name, MODES[i % len(MODES)]) for i, name in enumerate(ROUTES)]
)
def test_memory_written_by_any_route_matches_pytorch(name: str, mode: Any) -> None:
    assert list(complaints(name, mode)) == []


@pytest.mark.parametrize(("name", "mode"), sampled(product(ROUTES, MODES), 20))
def test_written_memory_in_every_mode_matches_pytorch(name: str, mode: Any) -> None:
    assert list(complaints(name, mode)) == []


def _together(
    write: Callable[[Tensor, Tensor], object], order: str, context: Any
) -> dict[str, Any]:
    """Return what a program leaves that writes a value and its source in one call."""
    torch.manual_seed(3)
    weight, source = vector(requires_grad=True), vector()
    with context as run:
        derived = source * 2
        further = derived.cos()
        loss: Any = sum(((derived + k).sin() * weight).sum() for k in range(3))
        loss = loss + ((further * source).exp() * weight).sum()
        if order != "after":
            evict_all(run)
        with torch.no_grad():
            write(derived, source)
        evict_all(run)
        (gradient,) = torch.autograd.grad(loss, [weight])
    return {"gradient": gradient, "derived": derived, "source": source, "further": further}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", TOGETHER)
def test_value_and_source_written_in_one_call_match_pytorch(name: str, mode: Any) -> None:
    for order in ORDERS:
        wanted = _together(TOGETHER[name], order, nullcontext())
        got = _together(TOGETHER[name], order, budget(mode))
        assert differing(got, wanted) == [], order


def _frozen_copy(context: Any) -> dict[str, Any]:
    """Train with a copy of the weight that has the weight's version counter, but its own memory."""
    torch.manual_seed(3)
    weight, x = vector(requires_grad=True), vector()
    old = weight.detach()
    old.data = old.data.clone()
    optimizer = torch.optim.SGD([weight], 0.1)
    found: dict[str, Any] = {}
    with context as run:
        held = (x * old).tanh()
        for step in range(3):
            loss = ((x * weight).sin() * held * (x * old).cos()).sum()
            evict_all(run)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found[f"loss {step}"] = loss.detach()
            evict_all(run)
    return found | {"held": held, "weight": weight.detach()}


@pytest.mark.parametrize("mode", MODES)
def test_copy_with_version_counter_of_weight_matches_pytorch(mode: Any) -> None:
    assert differing(_frozen_copy(budget(mode)), _frozen_copy(nullcontext())) == []


def _first_part_first(of: str, context: Any) -> dict[str, Any]:
    """Read the first part of some memory before its whole."""
    torch.manual_seed(3)
    weight, whole = vector(requires_grad=True), vector()
    if of == "a storage":
        part = torch.empty(0).set_(whole.untyped_storage()[: whole.nbytes // 2])
    else:
        array = np.linspace(0, 1, WIDTH, dtype=np.float32)
        part, whole = torch.from_numpy(array[: WIDTH // 2]), torch.from_numpy(array)
    with context as run:
        loss = ((part * 2).sin() * weight[: part.numel()]).sum()
        loss = loss + ((whole * 3).sin() * weight).sum() + (whole * weight).sum()
        evict_all(run)
        with torch.no_grad():
            whole.detach().data.mul_(0.5)
        loss = loss + ((part * 4).sin() * weight[: part.numel()]).sum()
        evict_all(run)
        (gradient,) = torch.autograd.grad(loss, [weight])
    return {"gradient": gradient, "whole": whole}


@pytest.mark.parametrize("of", ["a storage", "an array"])
@pytest.mark.parametrize("mode", MODES)
def test_part_of_memory_read_before_whole_matches_pytorch(mode: Any, of: str) -> None:
    wanted = _first_part_first(of, nullcontext())
    assert differing(_first_part_first(of, budget(mode)), wanted) == []


def _assigned_late(context: Any, late: bool) -> dict[str, Any]:
    """Assign data to a saved tensor that dies, inside the budget or after it."""
    torch.manual_seed(3)
    weight = vector(requires_grad=True)
    with context as run:
        z = weight * 2
        loss = (z * weight).sum() + (z.tanh() * z).sum()
        if not late:
            z.data = z.data.half().float()
            del z
            evict_all(run)
    if late:
        z.data = z.data.half().float()
        del z
    loss.backward()
    return {"gradient": weight.grad}


@pytest.mark.parametrize("late", [False, True], ids=["inside", "after"])
@pytest.mark.parametrize("mode", MODES)
def test_data_assigned_to_tensor_that_dies_matches_pytorch(mode: Any, late: bool) -> None:
    got = _assigned_late(budget(mode), late)
    assert differing(got, _assigned_late(nullcontext(), late)) == []


def test_data_of_dead_saved_tensor_is_freed_with_its_graph() -> None:
    weight = vector(requires_grad=True)
    with budget("auto") as run:
        (weight * 1).sum()
        before = run.memory
        z = weight * 2
        loss = (z * weight).sum()
        z.data = z.data * 0.5
        del z
        assert run.memory > before + weight.nbytes
        del loss
        assert run.memory == before


def test_memory_of_tensor_moved_to_shared_memory_counts_once() -> None:
    source = vector()
    with budget("auto") as run:
        (source * 1).sum()
        before = run.memory
        source.share_memory_()
        (source * 1).sum()
        assert run.memory == before
        run._driver.engine.check()
