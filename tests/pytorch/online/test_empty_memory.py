"""Tests of tensors made by `empty` that a program fills by writes to slices (R4, sources).

The result of `empty` may be evicted once operators have written all of it. Until then it is pinned
(stays in memory), because code that PyTorch does not see may have written the rest.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import rekindle
from rekindle import Run
from tests.pytorch import cores
from tests.pytorch.bits import differing
from tests.pytorch.held.placeholders import ADDRESS

Fill = Callable[[Tensor], Tensor]
ROWS, HALF = 64, 32


def _halves(x: Tensor) -> Tensor:
    out = x.new_empty(x.shape)
    out[:HALF].copy_(x[:HALF])
    out[HALF:].copy_(x[HALF:])
    return out


def _half_of_itself(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    out[:HALF] = x[:HALF]
    out[HALF:] = out[:HALF] * 0.5 + out[:HALF]
    return out


def _rows(x: Tensor) -> Tensor:
    out = torch.empty(x.shape)
    for i in range(ROWS):
        out[i] = x[i]
    return out


def _rows_of_recurrence(x: Tensor) -> Tensor:
    out, row = torch.empty(x.shape), x[0]
    for i in reversed(range(ROWS)):
        row = (row + x[i]).sigmoid()
        out[i] = row
    return out


def _columns(x: Tensor) -> Tensor:
    out = torch.empty(x.shape)
    for i in range(ROWS):
        out[:, i] = x[:, i]
    return out


def _interleaved(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    out[..., ::2] = x[..., ::2].cos()
    out[..., 1::2] = x[..., 1::2].sin()
    return out


def _packed(x: Tensor) -> Tensor:
    out = x.new_empty(ROWS, 3 * ROWS)
    for i, part in enumerate((x, x.sin(), x.cos())):
        out.view(ROWS, 3, 4, ROWS // 4)[:, i] = part.view(ROWS, 4, ROWS // 4)
    return out[:, :ROWS] * out[:, ROWS : 2 * ROWS] + out[:, 2 * ROWS :]


def _transposed(x: Tensor) -> Tensor:
    out = torch.empty(x.shape)
    out.t()[:5] = x[:5]
    out.t()[5:] = x[5:]
    return out


def _complex(x: Tensor) -> Tensor:
    out = torch.empty(x.shape, dtype=torch.complex64)
    parts = torch.view_as_real(out)
    parts[..., 0] = x
    parts[..., 1] = x * 0.5
    return out.abs()


def _border(x: Tensor) -> Tensor:
    out = torch.empty(x.shape)
    out[1:-1, 1:-1] = x[1:-1, 1:-1].sin()
    out[0], out[-1] = 1.5, x[-1]
    out[:, 0] = 0.5
    out[:, -1].normal_(1, 0.1)
    return out


def _accumulated(x: Tensor) -> Tensor:
    out = torch.empty(x.shape)
    out[:HALF] = x[:HALF]
    out[:HALF] += x[HALF:]
    out[HALF:] = out[:HALF]
    return out.mul_(0.5)


def _circular(x: Tensor) -> Tensor:
    return F.pad(x[None], (2, 3), mode="circular")[0, :, 2:-3] * x


def _circular_2d(x: Tensor) -> Tensor:
    padded = F.pad(x.view(2, 2, 32, 32), (2, 1, 3, 2), mode="circular")
    return F.avg_pool2d(padded, (6, 4), 1).view(x.shape)


def _circular_3d(x: Tensor) -> Tensor:
    padded = F.pad(x.view(2, 2, 16, 8, 8), (1, 1, 2, 0, 0, 2), mode="circular")
    return F.avg_pool3d(padded, 3, 1).view(x.shape)


FILLS: list[Fill] = [
    _halves,
    _half_of_itself,
    _rows,
    _rows_of_recurrence,
    _columns,
    _interleaved,
    _packed,
    _transposed,
    _complex,
    _border,
    _accumulated,
    _circular,
    _circular_2d,
    _circular_3d,
]
fills = pytest.mark.parametrize("fill", FILLS, ids=[each.__name__[1:] for each in FILLS])


def trained(fill: Fill, layers: int = 20) -> dict[str, Any]:
    torch.manual_seed(3)
    weight = torch.rand(ROWS, ROWS).requires_grad_()
    x = weight * 1.0
    for _ in range(layers):
        x = torch.tanh(fill(x)) * 1.1
    x.square().sum().backward()
    return {"x": x.detach(), "gradient": weight.grad}


def evict_before_every_operator(run: Run) -> None:
    core: Any = run._driver.core
    core.evict_before_every_op(run._driver.handle, True)


@fills
def test_slices_of_empty_memory_are_recomputed(fill: Fill) -> None:
    wanted = trained(fill)
    with rekindle.budget(None, learn=False) as whole:
        assert not differing(trained(fill), wanted)
    for share in (0.5, 0.3):
        with rekindle.budget(int(share * whole.peak), evict="saved", learn=False) as run:
            assert not differing(trained(fill), wanted)
        assert run.recomputations > 0
        run._driver.engine.check()


@pytest.mark.parametrize("evict", ["saved", "auto", "anything"])
@fills
def test_slices_of_empty_memory_match_if_all_is_evicted(
    fill: Fill, evict: Literal["saved", "auto", "anything"]
) -> None:
    wanted = trained(fill, layers=2)
    with rekindle.budget("1GiB", evict=evict, learn=False) as run:
        evict_before_every_operator(run)
        assert not differing(trained(fill, layers=2), wanted)
    run._driver.engine.check()


# -- contents that no operator wrote, so they cannot be recomputed ---------------------------------


def ramp(length: int) -> Tensor:
    return torch.arange(length, dtype=torch.float32)


def by_address(there: Tensor) -> None:
    """Write by address, as C++ code does. Rekindle cannot observe such a write."""
    values = ramp(there.numel())
    ctypes.memmove(ADDRESS(there), ADDRESS(values), there.nbytes)


def by_data_ptr(there: Tensor) -> None:
    values = ramp(there.numel())
    ctypes.memmove(there.data_ptr(), ADDRESS(values), there.nbytes)


def by_numpy(there: Tensor) -> None:
    there.detach().numpy()[:] = ramp(there.numel()).numpy()


Write = Callable[[Tensor], None]
writes = pytest.mark.parametrize("write", [by_address, by_data_ptr, by_numpy])
evicting = pytest.mark.parametrize("evict", ["saved", "auto", "anything"])
Evict = Literal["saved", "auto", "anything"]


def gradient_of(program: Callable[[], Tensor], evict: Evict | None = None) -> Tensor:
    """Return the gradient of a weight that multiplies the result of `program`.

    Without `evict`, run in plain PyTorch. With `evict`, run within a budget that evicts all values
    before every operator and before the backward pass.
    """
    torch.manual_seed(4)
    weight = torch.rand(8).requires_grad_()
    if evict is None:
        (program() * weight).exp().sum().backward()
    else:
        with rekindle.budget("1GiB", evict=evict, learn=False) as run:
            evict_before_every_operator(run)
            loss = (program() * weight).exp().sum()
            cores.evict_all(run._driver)
            loss.backward()
        run._driver.engine.check()
    assert weight.grad is not None
    return weight.grad


@writes
@evicting
def test_empty_tensor_half_written_outside_torch_keeps_contents(write: Write, evict: Evict) -> None:
    def program() -> Tensor:
        out = torch.empty(8)
        out[4:].copy_(torch.ones(4))
        write(out[:4])
        return out

    wanted = gradient_of(program)
    assert torch.equal(gradient_of(program, evict), wanted)


@writes
@evicting
def test_copy_from_half_written_outside_torch_keeps_contents(write: Write, evict: Evict) -> None:
    """An operator fills the second half with a copy of the first, which no operator wrote."""

    def program() -> Tensor:
        out = torch.empty(8)
        out[4:].copy_(torch.ones(4))
        write(out[:4])
        out[4:].copy_(out[:4])
        return out

    wanted = gradient_of(program)
    assert torch.equal(gradient_of(program, evict), wanted)


@writes
@evicting
def test_half_written_outside_torch_then_filled_matches_pytorch(write: Write, evict: Evict) -> None:
    """An operator reads the tensor while code outside of PyTorch has written its first half.

    Another operator then overwrites that half.
    """

    def program() -> Tensor:
        out = torch.empty(8)
        out[4:].copy_(torch.ones(4))
        write(out[:4])
        before = out * 2
        out[:4].fill_(0.5)
        return before * out

    wanted = gradient_of(program)
    assert torch.equal(gradient_of(program, evict), wanted)


@pytest.mark.parametrize("evict", ["auto", "anything"])
@pytest.mark.parametrize("early", [False, True])
def test_slices_of_empty_rewritten_by_address_keep_contents(early: bool, evict: Evict) -> None:
    """If `early`, the program reads the address before an operator writes the first half."""

    def program() -> Tensor:
        values, out = (ctypes.c_float * 4)(1, 2, 3, 4), torch.empty(8)
        address = out.data_ptr() if early else 0
        out[:4].copy_(torch.ones(4))
        ctypes.memmove(address or out.data_ptr(), values, ctypes.sizeof(values))
        out[4:].copy_(torch.ones(4))
        return out

    wanted = gradient_of(program)
    assert torch.equal(gradient_of(program, evict), wanted)


@evicting
def test_slices_of_empty_rewritten_by_numpy_keep_contents(evict: Evict) -> None:
    def program() -> Tensor:
        out = torch.empty(8)
        out[:4].copy_(torch.ones(4))
        by_numpy(out[:4])
        out[4:].copy_(torch.ones(4))
        return out

    wanted = gradient_of(program)
    assert torch.equal(gradient_of(program, evict), wanted)


def _unwritten_row(out: Tensor, x: Tensor) -> None:
    for i in (0, 1, 3):
        out[i] = x[i]


def _added(out: Tensor, x: Tensor) -> None:
    out[:2] = x[:2]
    with torch.no_grad():
        out[2:].zero_()
    out[2:].add_(x[2:])


def _indexed(out: Tensor, x: Tensor) -> None:
    out[torch.arange(4)] = x


def _out(out: Tensor, x: Tensor) -> None:
    out[:2] = x[:2]
    with torch.no_grad():
        torch.add(x[2:], 1, out=out[2:])


def _without_grad(out: Tensor, x: Tensor) -> None:
    out[:2] = x[:2]
    with torch.no_grad():
        out[2:] = x[2:]


def _scattered(out: Tensor, x: Tensor) -> None:
    """Write every third element first, so that more than 64 separate ranges are unwritten."""
    flat = x.reshape(-1)
    for i in [*range(0, flat.numel(), 3), *range(1, flat.numel(), 3), *range(2, flat.numel(), 3)]:
        out.view(-1)[i] = flat[i]


def _halves_into(out: Tensor, x: Tensor) -> None:
    out[:2] = x[:2]
    out[2:] = x[2:]


@pytest.mark.parametrize(
    ("write", "kept"),
    [
        (_unwritten_row, True),
        (_added, True),
        (_indexed, True),
        (_out, True),
        (_without_grad, True),
        (_scattered, True),
        (_halves_into, False),
    ],
    ids=["row_missing", "added", "indexed", "out", "without_grad", "scattered", "halves"],
)
def test_empty_tensor_is_evicted_only_if_slices_fill_it(
    write: Callable[[Tensor, Tensor], None], kept: bool
) -> None:
    """A tensor made by `empty` is evicted only if recorded writes to slices fill all of it.

    It is `kept` in memory if a row is missing, if a write is made under no_grad or by an index
    tensor, or if too many separate ranges are unwritten at some time.
    """
    x, weight = torch.rand(4, 64), torch.rand(4, 64).requires_grad_()
    with rekindle.budget("1GiB", evict="saved", learn=False) as run:
        out = torch.empty(4, 64)
        write(out, x)
        copied = out.clone()
        loss = (out * weight).sum()
        nbytes = out.nbytes
        before = run.memory
        del out
        cores.evict_all(run._driver)
        assert before - run.memory in ((0, 2 * nbytes), (nbytes, 3 * nbytes))[not kept]
        loss.backward()
    assert weight.grad is not None
    assert not differing({"": weight.grad}, {"": copied})


def test_saved_tensor_half_written_by_address_keeps_contents() -> None:
    def program() -> Tensor:
        out = torch.empty(8)
        out[:4] = 2
        by_address(out[4:])
        factor = torch.ones(8).requires_grad_()
        saved = (out * factor).sum()
        (gradient,) = torch.autograd.grad(saved, [factor])
        return gradient

    wanted = gradient_of(program)
    assert torch.equal(gradient_of(program, "saved"), wanted)


def test_empty_memory_written_in_function_matches_pytorch() -> None:
    class Fill(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, out: Tensor, x: Tensor) -> Tensor:
            out[:4] = x[:4] * 2
            ctx.mark_dirty(out)
            return out

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
            (gradient,) = gradients
            return None, torch.cat([gradient[:4] * 2, torch.zeros(4)])

    def program() -> Tensor:
        x = torch.rand(8).requires_grad_()
        out = Fill.apply(torch.empty(8), x * 1)
        out[4:] = x[4:].sin()
        return out

    wanted = gradient_of(program)
    assert torch.equal(gradient_of(program, "anything"), wanted)


def test_resized_empty_memory_matches_pytorch() -> None:
    def program() -> Tensor:
        out = torch.empty(4)
        out[:2] = 1
        out.resize_(8)
        out[2:] = torch.rand(6)
        return out

    wanted = gradient_of(program)
    assert torch.equal(gradient_of(program, "saved"), wanted)


def test_result_from_half_filled_empty_tensor_is_recomputed() -> None:
    """The program reads the first half, and deletes the tensor before all of it is written."""

    def program() -> Tensor:
        x = torch.rand(8)
        out = torch.empty(16)
        out[:8] = x * 2
        y = out[:8].sin()
        out[8:12] = 1
        del out
        return y

    wanted = gradient_of(program)
    assert torch.equal(gradient_of(program, "saved"), wanted)


def test_result_from_half_is_recomputed_after_tensor_was_filled() -> None:
    """`y` reads the first half before the second one is written. Then both are overwritten."""

    def program() -> Tensor:
        x = torch.rand(8)
        out = torch.empty(16)
        out[:8] = x * 2
        y = out[:8].sin()
        out[8:] = out[:8] + y
        out[:8] = y * 3
        return y * out[8:] * out[:8]

    wanted = gradient_of(program)
    assert torch.equal(gradient_of(program, "saved"), wanted)


# -- several threads -------------------------------------------------------------------------------

_meeting = threading.Barrier(2)


@torch.library.custom_op("rekindle_tests::fill_together", mutates_args=("out",))
def _fill_together(out: Tensor, x: Tensor) -> None:
    _meeting.wait(60)
    out.copy_(x)
    _meeting.wait(60)


@_fill_together.register_fake
def _(out: Tensor, x: Tensor) -> None:
    pass


@pytest.mark.parametrize("make", [torch.empty_like, torch.neg])
@pytest.mark.parametrize("evict", ["saved", "auto", "anything"])
def test_tensor_filled_by_two_threads_at_once_matches_pytorch(
    make: Callable[[Tensor], Tensor], evict: Literal["saved", "auto", "anything"]
) -> None:
    """Each thread fills one half. Both begin before Rekindle has recorded one of the writes.

    So no recipe (the operators that recompute a value) contains both writes.
    """
    x, weight = torch.rand(64), torch.rand(64).requires_grad_()
    with rekindle.budget("1GiB", evict=evict, learn=False) as run:
        out = make(x)
        threads = [
            threading.Thread(target=_fill_together, args=(out[part], x[part]))
            for part in (slice(0, 32), slice(32, 64))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        result = (out * weight).exp()
        loss = result.sum()
        del out, result
        cores.evict_all(run._driver)
        run._driver.engine.check()
        loss.backward()
        run._driver.engine.check()
    (wanted,) = torch.autograd.grad((x * weight).exp().sum(), [weight])
    assert weight.grad is not None
    assert torch.equal(weight.grad, wanted)
