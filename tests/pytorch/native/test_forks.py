"""Tests of a process that forks while other threads use the core: the child does not hang."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import rekindle
from rekindle.policies import Candidate
from rekindle.pytorch.native import core
from tests.helpers import WHOLE
from tests.pytorch.harsh import WIDTH, deeper, vector
from tests.pytorch.native.own_policies import CheapestChooser, With


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    "count", [80, pytest.param(5_000 if WHOLE else 200, marks=pytest.mark.slow)]
)
def test_child_forked_while_threads_compute_exits_normally(count: int) -> None:
    command = [sys.executable, "-m", "tests.pytorch.native.forks", str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1_200)
    assert done.returncode == 0, done.stdout + done.stderr


# -- a fork while the session mutex is open, because user code runs --------------------------------


def forked(child: Callable[[], int]) -> int:
    """Fork, end the child with the result of `child`, and return the child's exit code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the process has several threads
        pid = os.fork()
    if pid == 0:
        code = 100
        try:
            code = child()
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_child_forked_during_policy_forgets_its_thread() -> None:
    """The thread runs a policy. What the core knows of that is on the thread's stack."""
    deciding, over = threading.Event(), threading.Event()

    class Waiting(CheapestChooser):
        def choose(self, now: int) -> Candidate | None:
            if not deciding.is_set():
                deciding.set()
                over.wait()
            return super().choose(now)

    def compute() -> None:
        weight = vector(requires_grad=True)
        deeper(weight, 30).sum().backward()

    native: Any = core()
    with rekindle.budget(14 * 4 * WIDTH, policy=With(Waiting), learn=False):
        thread = threading.Thread(target=compute)
        thread.start()
        assert deciding.wait(60)
        assert native.openings() == 1
        inherited = forked(native.openings)
        over.set()
        thread.join()
    assert inherited == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_child_forked_in_recomputation_continues_it() -> None:
    pids: list[int] = []
    recomputes = False

    def double(x: Tensor) -> Tensor:
        if recomputes and not pids:
            pids.append(os.fork())
        return x * 2

    def step() -> Tensor | None:
        nonlocal recomputes
        weight = torch.ones(WIDTH, requires_grad=True)
        y = weight
        for _ in range(30):
            y = torch.ops.rekindle_forks.double(y.sin())
        recomputes = True
        y.sum().backward()
        return weight.grad

    with torch.library._scoped_library("rekindle_forks", "FRAGMENT"):
        made = torch.library.custom_op("rekindle_forks::double", double, mutates_args=(),
                                       schema="(Tensor x) -> Tensor")  # fmt: skip
        made.register_fake(torch.empty_like)
        made.register_autograd(lambda ctx, gradient: gradient * 2)
        pids.append(-1)  # does not fork
        wanted = step()
        pids.clear()
        recomputes = False
        with rekindle.budget(14 * 4 * WIDTH, learn=False):
            got = step()
    (pid,) = pids
    equal = torch.equal(got, wanted)
    if pid == 0:
        os._exit(0 if equal else 1)
    assert equal
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
