"""What waits for what where a recomputation and the program are on two streams.

Here the program orders all that it knows of, and no more: that a value is recomputed on one stream,
and is read on another, is for Rekindle to order.
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
            driver.core.take_out(driver.handle, name)
        yield run


def _evict(run: Any) -> None:
    """Evict all that may be, at the next operator."""
    driver = run._driver
    driver.core.let_go_of_everything(driver.handle, True)
    torch.ones(1, device="cuda")
    driver.core.let_go_of_everything(driver.handle, False)


def _gradient(result: Tensor, weight: Tensor) -> Tensor:
    ones = torch.ones(N, device="cuda")
    return torch.autograd.grad(result, weight, ones, retain_graph=True)[0]


def read(missing: list[str]) -> dict[str, Any]:
    """A value is recomputed on the main stream, and then read on the other one."""
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
        side.wait_stream(main)
        _gradient(one, weight)
        with torch.cuda.stream(side):
            found = _gradient(other, weight)
        main.wait_stream(side)
        torch.cuda.synchronize()
        again = run.recomputations
    expected = -2 * (weight.detach().cpu() * 2).sin()
    return {"equal": torch.equal(found.cpu(), expected), "recomputations": again}


def write(missing: list[str]) -> dict[str, Any]:
    """A recomputation on the other stream reads what the main stream then writes."""
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
    """A function of the program's reads what it saved on the other stream, by no operator."""
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
            with hidden(), torch.cuda.stream(side):  # as a kernel of one's own
                out = -x.sin()
            main.wait_stream(side)
            out.record_stream(main)
            return grad * out

    with _within(missing) as run:
        with torch.cuda.stream(side):  # or nobody knows of the stream
            torch.ones(1, device="cuda")
        value = weight * 2
        result = Cosine.apply(value)
        side.wait_stream(main)
        value.record_stream(side)
        del value
        _evict(run)
        torch.cuda.synchronize()  # what was there is overwritten
        found = _gradient(result, weight)
        torch.cuda.synchronize()
        again = run.recomputations
    expected = -2 * (weight.detach().cpu() * 2).sin()
    return {"equal": torch.equal(found.cpu(), expected), "recomputations": again}


def idle(missing: list[str]) -> dict[str, Any]:
    """How often the main stream waits, or is waited for, once another one ran one operator."""
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
