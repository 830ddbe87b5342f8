"""Check the order of recomputations and of the program's own operators on two streams.

The programs let streams wait for their own work only. If a value is recomputed on one stream and
read on another, Rekindle must let the second stream wait.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import rekindle
from rekindle.pytorch.native._higher import hidden

N = 1000


@contextmanager
def _within(missing: list[str]) -> Any:
    with rekindle.budget(None, device="cuda", learn=False) as run:
        driver = run._driver
        for name in missing:
            driver.core.disable_for_tests(driver.handle, name)
        yield run


def _evict(run: Any) -> None:
    """Evict everything that may be evicted, at the next operator."""
    driver = run._driver
    driver.core.evict_before_every_op(driver.handle, True)
    torch.ones(1, device="cuda")
    driver.core.evict_before_every_op(driver.handle, False)


def _overwrite() -> None:
    """Overwrite evicted memory, so that a read that comes too early finds wrong contents.

    The allocator reuses memory that several streams used once all of them are done.
    """
    for _ in range(2):
        torch.cuda.synchronize()
        torch.empty(1, device="cuda")
    torch.cuda.synchronize()


def _gradient(result: Tensor, weight: Tensor) -> Tensor:
    ones = torch.ones(N, device="cuda")
    return torch.autograd.grad(result, weight, ones, retain_graph=True)[0]


def read(missing: list[str]) -> dict[str, Any]:
    """Recompute a value on the main stream, and read it on the side stream."""
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    weight = torch.rand(N).cuda().requires_grad_()
    with _within(missing) as run:
        value = weight * 2
        side.wait_stream(main)
        value.record_stream(side)
        with torch.cuda.stream(side):
            other = value.cos()
        one = value.sin()
        main.wait_stream(side)
        del value
        _evict(run)
        _overwrite()
        side.wait_stream(main)
        _gradient(one, weight)
        with torch.cuda.stream(side):
            found = _gradient(other, weight)
        side.synchronize()  # the main stream is late: its work runs only when a wait requires it
        main.wait_stream(side)
        torch.cuda.synchronize()
        again = run.recomputations
    expected = -2 * (weight.detach().cpu() * 2).sin()
    return {"equal": torch.equal(found.cpu(), expected), "recomputations": again}


def write(missing: list[str]) -> dict[str, Any]:
    """Read a source on the side stream in a recomputation, and then write it on the main stream."""
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    weight = torch.rand(N).cuda().requires_grad_()
    source = torch.rand(N).cuda()
    expected = -(weight.detach().cpu() + source.cpu()).sin()
    with _within(missing) as run:
        side.wait_stream(main)
        with torch.cuda.stream(side):
            value = weight + source
            result = value.cos()
        main.wait_stream(side)
        del value
        _evict(run)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            found = _gradient(result, weight)
        with torch.no_grad():
            source.add_(1)
        main.wait_stream(side)
        torch.cuda.synchronize()
        again = run.recomputations
    return {"equal": torch.equal(found.cpu(), expected), "recomputations": again}


def unseen(missing: list[str]) -> dict[str, Any]:
    """Read a saved value on the side stream in a user's function, without an operator."""
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    weight = torch.rand(N).cuda().requires_grad_()

    class Cosine(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.cos()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            (x,) = ctx.saved_tensors
            # reads memory without an operator, like a user's own kernel
            with hidden(), torch.cuda.stream(side):
                out = -x.sin()
            # the main stream is late: its work runs only when a wait requires it
            side.synchronize()
            main.wait_stream(side)
            out.record_stream(main)
            return grad * out

    with _within(missing) as run:
        with torch.cuda.stream(side):  # an operator on the stream, so that Rekindle knows of it
            torch.ones(1, device="cuda")
        value = weight * 2
        result = Cosine.apply(value)
        side.wait_stream(main)
        value.record_stream(side)
        del value
        _evict(run)
        _overwrite()
        found = _gradient(result, weight)
        torch.cuda.synchronize()
        again = run.recomputations
    expected = -2 * (weight.detach().cpu() * 2).sin()
    return {"equal": torch.equal(found.cpu(), expected), "recomputations": again}


def idle(missing: list[str]) -> dict[str, Any]:
    """Count waits of the main stream after another stream ran a single operator."""
    import _standin

    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    weight = torch.rand(N).cuda().requires_grad_()
    with _within(missing) as run:
        with torch.cuda.stream(side):
            torch.ones(N, device="cuda")
        side.wait_stream(main)
        value = weight
        for _ in range(20):
            value = value.sin()
        result = value.sum()
        del value
        _evict(run)
        _standin.asked()
        result.backward()
        waits = _standin.asked()["event_wait"]
    return {"waits": waits, "recomputations": run.recomputations}


ORDERS: dict[str, Callable[[list[str]], dict[str, Any]]] = {
    "read": read,
    "write": write,
    "unseen": unseen,
    "idle": idle,
}
