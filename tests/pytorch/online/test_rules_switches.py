"""R9: what is recomputed has the bits of the first time, whatever PyTorch is switched to since."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle.pytorch.native import NativeDriver
from rekindle.pytorch.operators import _switches
from rekindle.pytorch.operators._switches import SWITCHES, Switches, switched, switches
from tests.pytorch.harsh import WIDTH

evict_modes = pytest.mark.parametrize("evict", ["saved", "anything"])
Evict = Literal["saved", "anything"]

pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")


@pytest.fixture(autouse=True)
def all_put_back() -> Iterator[None]:
    """Also what the older functions set beside what they read: they cannot put it back."""
    before = switches.read()
    yield
    _switches._set(before)
    assert switches.read() is before


@contextmanager
def _set(name: str, value: Any) -> Iterator[None]:
    """A pair of functions of PyTorch's, `get_...` and `set_...`."""
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
    """Integers divided have the default type."""
    return weight * ((torch.arange(weight.numel()) % 7) / 3).sin()


def _sum(weight: Tensor) -> Tensor:
    """Of as many numbers as several threads share."""
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
def test_switched_in_the_forward_pass_alone(name: str, evict: Evict) -> None:
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
        driver: Any = run._driver
        if isinstance(driver, NativeDriver):
            driver.core.let_go_of_everything(driver.handle, True)
        else:
            with run._driver.lock:
                run._driver.settle()
                run._driver.poll()
                run._driver.perform(run._driver.engine.shrink(-1))
        (gradient,) = torch.autograd.grad(result, [weight])
    assert run.recomputations > 0
    assert torch.equal(gradient, wanted)


@pytest.mark.parametrize("number", range(len(SWITCHES)))
def test_each_switch_is_set_and_put_back(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_switches, "switches", Switches())  # which has not looked yet
    switch = SWITCHES[number]
    others = {
        False: True, True: False, torch.float32: torch.float64, "none": "ieee", "highest": "medium",
        (False, False): (True, True), "tf32": "ieee",
    }  # fmt: skip
    then = switches.read()
    value = switch.get()
    other = value + 1 if type(value) is int else others.get(value)
    if other is None:
        pytest.skip(f"no other value than {value} is known")
    try:
        switch.set(other)
    except RuntimeError as error:
        pytest.skip(f"not here: {error}")
    try:
        now = switches.read()
        if now is then:
            pytest.skip("cannot be turned on this machine")
        with switched(then):
            assert switches.read() is then
        assert switches.read() is now
    finally:
        with_now = switches.read()
        _switches._set(then)
    assert with_now is now
    assert switches.read() is then


def test_a_look_notices_every_change() -> None:
    # From a fresh process on, the older function does not come back to where it was: to what it
    # leaves behind it does.
    torch.set_float32_matmul_precision(torch.get_float32_matmul_precision())
    seen = {switches.now(precise=True)}
    for setting, _ in SETTINGS.values():
        before = switches.now(precise=True)
        with setting():
            seen.add(switches.now(precise=True))
            assert switches.now(precise=True) is switches.read()
        assert switches.now(precise=True) is before
    assert len(seen) == 1 + len(SETTINGS)


def test_the_cap_holds_after_the_default_type_changed() -> None:
    """The same operator makes twice the bytes."""
    numbers = torch.arange(WIDTH)
    with rekindle.budget(1_000_000) as run:
        for _ in range(3):
            single = numbers / 3
        with _set("default_dtype", torch.float64):
            double = numbers / 3
        assert run.memory == 8 * WIDTH + single.nbytes + double.nbytes
        del single, double
    in_double = _set("default_dtype", torch.float64)
    with rekindle.budget(13 * WIDTH), in_double, pytest.raises(rekindle.OutOfBudget):
        _ = numbers / 3
