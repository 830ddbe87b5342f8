"""Tests of Ctrl-C at any moment of a budget: no hook, mode or key is left, and training goes on.

A trace function sends the signal after a given number of lines of Rekindle's Python code.
"""

from __future__ import annotations

import _weakrefset
import random
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle import budget
from rekindle.pytorch.native import is_seen
from tests.helpers import WHOLE
from tests.pytorch.left import behind, settings

#: Rekindle's code, and the code of Python's library that runs when weakly referenced objects die.
HERE = (str(Path(rekindle.__path__[0])), weakref.__file__, _weakrefset.__file__)
#: Functions whose own lines raise nothing here. In these few lines Python looks for no signal, but
#: the trace function would raise there.
WITHOUT_CHECKS = {budget.__enter__.__code__, budget.__exit__.__code__}


class Interrupter:
    """Sends SIGINT to this process at the line `number` of `HERE`, counted from now."""

    def __init__(self, number: int) -> None:
        self.left = number
        self.sent = False
        self.where = ""

    def __enter__(self) -> Interrupter:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(HERE):
            return None
        if not frame.f_code.co_filename.startswith(HERE[0]) and budget._active is None:
            return (
                None  # outside a budget, Python loses an interrupt in a weak reference's callback
            )
        if event == "line" and not self.sent and frame.f_code not in WITHOUT_CHECKS:
            self.left -= 1
            if self.left <= 0:
                self.sent = True
                self.where = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
                signal.raise_signal(signal.SIGINT)
        return self._trace


@pytest.fixture(autouse=True)
def _handled() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def trained(model: nn.Module, batch: Tensor, arguments: dict[str, Any]) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with rekindle.budget("300KiB", learn=False, cache=False, **arguments):
        for _ in range(2):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1), nn.Tanh()) for _ in range(8)]
    return nn.Sequential(*layers)


def lines_of(step: Callable[[], object]) -> int:
    """Return how many lines of Rekindle's code `step` runs, if it ran before."""
    step()
    with Interrupter(1_000_000) as counted:
        step()
    assert not counted.sent
    return 1_000_000 - counted.left


CONFIGURATIONS: tuple[dict[str, Any], ...] = (
    {},
    {"record": True, "evict": "saved"},
    {"evict": "anything"},
)


@pytest.mark.parametrize("arguments", CONFIGURATIONS, ids=["default", "record", "anything"])
@pytest.mark.evicts_anything
def test_interrupt_at_any_line_leaves_no_budget_active(arguments: dict[str, Any]) -> None:
    batch = torch.rand(200, 16)
    plain = network()
    torch.manual_seed(1)
    trained(plain, batch, arguments)
    lines = lines_of(lambda: trained(network(), batch, arguments))
    before, keys = settings(), torch._C._dispatch_tls_local_include_set()
    numbers = range(1, lines + 1) if WHOLE else random.Random(0).sample(range(1, lines + 1), 20)
    for number in numbers:
        came = False
        with Interrupter(number) as interrupter:
            try:
                trained(network(), batch, arguments)
            except KeyboardInterrupt:
                came = True
        if not interrupter.sent and number > lines - 50:  # runs differ by some lines
            continue
        assert (interrupter.sent, came) == (True, True), (number, lines, interrupter.where)
        assert budget._active is None, number
        assert torch._C._dispatch_tls_local_include_set() == keys, number
        assert behind(before) == [], number
    model = network()
    torch.manual_seed(1)
    trained(model, batch, arguments)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("where", ["__enter__", "__exit__"])
def test_interrupt_while_budget_begins_or_ends_comes_after(where: str) -> None:
    """The interrupt is noted, and raised when everything is installed or removed."""
    before = settings()
    for number in range(1, 12 if WHOLE else 6):
        within = rekindle.budget("1GiB", learn=False)
        if where == "__exit__":
            within.__enter__()
        with Interrupter(number * 9) as interrupter, pytest.raises(KeyboardInterrupt):
            within.__enter__() if where == "__enter__" else within.__exit__(None, None, None)
        assert interrupter.sent
        assert budget._active is None
        assert not is_seen()
        assert behind(before) == []


class Dying:
    """An object at whose end Ctrl-C arrives, in its finalizer or when its weak reference dies."""

    def __init__(self, *, weak: bool) -> None:
        self.weak = weak
        if weak:
            REFERENCES.append(weakref.ref(self, lambda _: Dying.end()))

    def __del__(self) -> None:
        if not self.weak:
            self.end()

    @staticmethod
    def end() -> None:
        signal.raise_signal(signal.SIGINT)


REFERENCES: list[Any] = []


@pytest.mark.parametrize("weak", [False, True])
def test_interrupt_in_finalizer_within_budget_is_raised(weak: bool) -> None:
    hook = sys.unraisablehook

    def step() -> None:
        with rekindle.budget("1GiB", learn=False):
            Dying(weak=weak)
            for _ in range(1_000):
                torch.ones(1)
            raise AssertionError("the interrupt was lost")

    before = settings()
    with pytest.raises(KeyboardInterrupt):
        step()
    assert behind(before) == []
    assert sys.unraisablehook is hook
    REFERENCES.clear()


def test_other_errors_in_finalizers_go_to_hook_of_program(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def __del__(self) -> None:
            raise ValueError("seen")

    seen: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda error: seen.append(error.exc_type))
    with rekindle.budget("1GiB", learn=False):
        Failing()
    assert seen == [ValueError]


# -- leaving a budget twice, or in another thread --------------------------------------------------


def test_budget_that_is_left_twice_says_so() -> None:
    within = rekindle.budget("1GiB")
    within.__enter__()
    within.__exit__(None, None, None)
    with pytest.raises(rekindle.Unsupported, match="has ended"):
        within.__exit__(None, None, None)
    with pytest.raises(rekindle.Unsupported, match="entered once"):
        within.__enter__()


def in_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_budget_left_in_other_thread_leaves_no_key_behind() -> None:
    keys, before = torch._C._dispatch_tls_local_include_set(), settings()
    weight = torch.rand(1_000, requires_grad=True)
    within = rekindle.budget("1GiB", learn=False)
    within.__enter__()
    loss = weight.sin().exp().sum()
    in_thread(lambda: within.__exit__(None, None, None))
    assert budget._active is None
    torch.ones(1)  # the first operator after the end takes this thread out
    assert torch._C._dispatch_tls_local_include_set() == keys
    assert not is_seen()
    assert behind(before) == []
    loss.backward()
    with rekindle.budget("1GiB", learn=False) as run:
        weight.sin().sum()
    assert run.peak > 0
