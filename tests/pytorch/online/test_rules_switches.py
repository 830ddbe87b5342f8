"""Tests that recomputation uses the global settings of the first run.

This is a part of rule R9, everything else runs once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import rekindle
from tests.pytorch.harsh import WIDTH

evict_modes = pytest.mark.parametrize("evict", ["saved", "anything"])
Evict = Literal["saved", "anything"]

pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")


@pytest.fixture(autouse=True)
def all_put_back() -> Iterator[None]:
    before = {name: get() for name, (get, _, _) in SWITCHES.items()}
    yield
    for name, (_, put, _) in SWITCHES.items():
        put(before[name])
    assert {name: get() for name, (get, _, _) in SWITCHES.items()} == before


@contextmanager
def _set(name: str, value: Any) -> Iterator[None]:
    """Set PyTorch's flag `name` to `value` while the context is open."""
    before = getattr(torch, f"get_{name}")()
    getattr(torch, f"set_{name}")(value)
    try:
        yield
    finally:
        getattr(torch, f"set_{name}")(before)


@contextmanager
def _flushing_denormal() -> Iterator[None]:
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@contextmanager
def _in_bfloat16() -> Iterator[None]:
    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before


def _integers(weight: Tensor) -> Tensor:
    """Divide integers, whose result has the default dtype."""
    return weight * ((torch.arange(weight.numel()) % 7) / 3).sin()


def _sum(weight: Tensor) -> Tensor:
    """Return `weight` times a sum of so many numbers that several threads share the work."""
    return weight * (weight.sin().sum() * 1e-5)


def _convolution(weight: Tensor) -> Tensor:
    torch.manual_seed(1)
    kernels = torch.randn(8, 10, 3, 3) * 0.1, torch.randn(4, 8, 3, 3) * 0.1
    image = nn.functional.conv2d(weight.view(1, 10, 100, 90), kernels[0])
    return nn.functional.conv2d(image.tanh(), kernels[1])


def _product(weight: Tensor) -> Tensor:
    square = weight.view(300, 300)
    return square @ square * 0.001


def _denormal(weight: Tensor) -> Tensor:
    return weight * ((weight * 1e-39) * 1e38).sin()


_C: Any = torch._C
_MATMUL = torch.backends.mkldnn.matmul
#: For each setting: how to read it, how to set it, and a value other than its default.
SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Any]] = {
    "default type": (torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "threads": (torch.get_num_threads, torch.set_num_threads, 3),
    "flushed denormal": (lambda: 5e-324 * 1.0 == 0.0, torch.set_flush_denormal, True),
    "deterministic": (
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True,
    ),
    "oneDNN": (_C._get_mkldnn_enabled, _C._set_mkldnn_enabled, False),
    "deterministic oneDNN": (_C._get_mkldnn_deterministic, _C._set_mkldnn_deterministic, True),
    "NNPACK": (_C._get_nnpack_enabled, _C._set_nnpack_enabled, False),
    "reduction in half precision": (
        _C._get_cpu_allow_fp16_reduced_precision_reduction,
        _C._set_cpu_allow_fp16_reduced_precision_reduction,
        True,
    ),
    "precision": (
        lambda: _MATMUL.fp32_precision,
        lambda value: setattr(_MATMUL, "fp32_precision", value),
        "bf16",
    ),
}  # fmt: skip

Setting = Callable[[], AbstractContextManager[Any]]
SETTINGS: dict[str, tuple[Setting, Callable[[Tensor], Tensor]]] = {
    "default type": (lambda: _set("default_dtype", torch.float64), _integers),
    "threads": (lambda: _set("num_threads", 3), _sum),
    "flushed denormal": (_flushing_denormal, _denormal),
    "no oneDNN": (lambda: torch.backends.mkldnn.flags(enabled=False), _convolution),
    "precision, by the older name": (lambda: _set("float32_matmul_precision", "medium"), _product),
    "precision": (_in_bfloat16, _product),
}


@evict_modes
@pytest.mark.parametrize("name", SETTINGS)
def test_setting_changed_only_in_forward_matches_pytorch(name: str, evict: Evict) -> None:
    setting, compute = SETTINGS[name]
    torch.manual_seed(0)
    weight = torch.rand(90_000, requires_grad=True)

    def loss() -> Tensor:
        with setting():
            x = compute(weight).exp()
        return (x * x.sin()).sum()

    (wanted,) = torch.autograd.grad(loss(), [weight])
    with rekindle.budget("1GiB", evict=evict) as run:
        result = loss()
        run._driver.core.evict_before_every_op(run._driver.handle, True)
        (gradient,) = torch.autograd.grad(result, [weight])
    assert run.recomputations > 0
    assert torch.equal(gradient, wanted)


@torch.library.custom_op("switches::look", mutates_args=())
def _look(x: Tensor) -> Tensor:
    """Note the value of the setting whenever the operator runs."""
    _seen.append(_looked_at[0]())
    return x.sin()


_seen: list[Any] = []
_looked_at: list[Callable[[], Any]] = [lambda: None]
_look.register_fake(torch.empty_like)
_look.register_autograd(lambda ctx, gradient: gradient, setup_context=lambda *_, **__: None)


@pytest.mark.parametrize("name", SWITCHES)
def test_recomputation_uses_global_settings_of_first_run(name: str) -> None:
    get, put, other = SWITCHES[name]
    before = get()
    weight = torch.rand(WIDTH, requires_grad=True)
    _seen.clear()
    _looked_at[0] = get
    with rekindle.budget("1GiB") as run:
        try:
            put(other)
        except RuntimeError as error:
            pytest.skip(f"not here: {error}")
        assert get() == other != before
        x = _look(weight * 1)
        loss = (x * x.cos()).sum()
        put(before)
        del x
        run._driver.core.evict_before_every_op(run._driver.handle, True)
        loss.backward()
    assert len(_seen) > 1
    assert set(_seen) == {other}
    assert get() == before


def test_budget_is_not_exceeded_after_default_dtype_change() -> None:
    """With the other default dtype, the same operator makes twice the bytes."""
    numbers = torch.arange(WIDTH)
    with rekindle.budget(1_000_000) as run:
        for _ in range(3):
            single = numbers / 3
        with _set("default_dtype", torch.float64):
            double = numbers / 3
        assert run.memory == 8 * WIDTH + single.nbytes + double.nbytes
        del single, double
    in_double, budget = (
        _set("default_dtype", torch.float64),
        rekindle.budget(13 * WIDTH, split="never"),
    )
    with budget, in_double, pytest.raises(rekindle.OutOfBudget):
        _ = numbers / 3
