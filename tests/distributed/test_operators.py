"""Tests of custom operators that communicate, with several ranks: none runs a second time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import rekindle
from tests.distributed.test_guard import launched

WIDTH, DEPTH = 256, 6


@pytest.mark.slow
def test_operators_that_communicate_match_pytorch_on_four_ranks() -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    code, output = launched([*command, "-m", "tests.distributed.operators", "6"], {})
    assert code == 0, output


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """Join a process group with this process as its only rank."""
    dist.init_process_group("gloo", f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _operator(name: str, body: Any) -> Any:
    made = torch.library.custom_op(
        f"rekindle_ranks::{name}", body, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    made.register_fake(torch.empty_like)
    made.register_autograd(
        lambda ctx, gradient: gradient * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
    )
    return made


def _step(operator: Any) -> Tensor:
    weight = torch.linspace(0, 1, WIDTH).requires_grad_()
    x = weight
    for _ in range(DEPTH):
        x = operator(x).sin()
    x.sum().backward()
    assert weight.grad is not None
    return weight.grad


def test_collective_in_recomputed_operator_raises(group: None) -> None:
    """The operator communicates only when it is recomputed, so no watch could tell."""
    communicates: list[int] = []

    def body(x: Tensor) -> Tensor:
        y = x.clone()
        if communicates:
            dist.all_reduce(y)
        return y * 2

    operator = _operator("communicates_later", body)
    with rekindle.budget(None, evict="saved", learn=False):
        _step(operator)
    with rekindle.budget(6 * 4 * WIDTH, evict="saved", learn=False):
        weight = torch.linspace(0, 1, WIDTH).requires_grad_()
        x = weight
        for _ in range(DEPTH):
            x = operator(x).sin()
        communicates.append(1)
        with pytest.raises(rekindle.Unsupported, match="c10d::allreduce_"):
            x.sum().backward()


def test_unknown_operator_with_several_ranks_is_kept(
    group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body that cannot be watched is recomputed only if the program declares the operator."""
    operator = _operator("unknown", lambda x: x.cos() * 2)
    wanted = _step(operator)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr("rekindle.pytorch.native._watched._is_in_python", lambda name: False)
    for is_declared in (False, True):
        if is_declared:
            rekindle.recomputable("rekindle_ranks::unknown")
        with rekindle.budget(None, evict="saved", learn=False) as run:
            run._driver.core.list_recomputed_ops(run._driver.handle)
            run._driver.core.evict_before_every_op(run._driver.handle, True)
            assert torch.equal(_step(operator), wanted)
        again = run._driver.core.recomputed_ops(run._driver.handle)
        assert ("rekindle_ranks::unknown" in again) is is_declared
        assert any("recomputable(" in each for each in run.report().advice) is not is_declared
