"""Tests of `rekindle.verify`, which compares a step within a budget with plain PyTorch.

It names the cause of a difference, and leaves the program unchanged.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rekindle
from tests.pytorch.harsh import differing, everything

TIGHT = "600KiB"
WIDTH, ROWS = 32, 256

_library = torch.library.Library("rekindle_verify", "DEF")
_library.define("shaken(Tensor x) -> Tensor")
_library.define("scaled(Tensor x) -> Tensor")
_library.define("counted(Tensor x) -> Tensor")
_scale = [1.0]
_inside = nn.Identity()


_library.impl("shaken", lambda x: x * int.from_bytes(os.urandom(2)), "CPU")
_library.impl("scaled", lambda x: x * _scale[0], "CPU")
_library.impl("counted", lambda x: _inside(x) + 0, "CPU")


class Program:
    """A network with all kinds of state that a step may change, and a step that trains it."""

    def __init__(self, between: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        torch.manual_seed(20)
        layers = [
            nn.Sequential(
                nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2), nn.GELU()
            )
            for _ in range(8)
        ]
        self.network = nn.Sequential(*layers)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        self.batch = torch.randn(ROWS, WIDTH)
        self.between = between

    def step(self) -> Tensor:
        self.optimizer.zero_grad()
        x = self.batch
        for layer in self.network:
            x = layer(x)
            x = x * self.between(x.detach())
        loss = x.square().mean()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return loss.detach()

    def state(self) -> dict[str, Any]:
        rates = [group["lr"] for group in self.optimizer.param_groups]
        moments = [list(state.values()) for state in self.optimizer.state.values()]
        python = (random.getstate(), self.schedule.last_epoch)
        return everything((self.network, self.batch, rates, moments, python))


def test_verify_of_deterministic_step_passes() -> None:
    found = rekindle.verify(Program().step, budget=TIGHT)
    assert found.ok
    assert found
    assert found.recomputations > 0
    assert found.peak <= found.budget
    assert found.compared["results"] == 1
    # A lower bound, because other tensors of the process are compared as well.
    assert found.compared["gradients"] >= 32
    assert found.compared["buffers"] >= 24
    assert found.compared["optimizer state"] >= 96
    assert found.compared["forward and hook calls"] == 1 + 8 * 4 + 8 - 1
    assert "the same as plain PyTorch, bit for bit" in str(found)
    found.raise_if_different()


def test_verify_compares_each_of_two_models_of_one_class() -> None:
    class Pair(nn.Module):
        """A class that no other test uses."""

        def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.function = function

        def forward(self, x: Tensor) -> Tensor:
            return self.function(self.layer(x))

    def differs(x: Tensor) -> Tensor:
        return torch.ops.rekindle_verify.shaken(x.detach()) + x * int.from_bytes(os.urandom(2))

    x = torch.randn(4, 8)
    for functions in ((differs, torch.tanh), (torch.tanh, differs)):
        models = [Pair(function) for function in functions]
        found = rekindle.verify(
            lambda models=models: sum(m(x).sum() for m in models).backward(), budget="1MiB"
        )
        names = {name for kind, name in found.unstable if kind == "gradients"}
        number = "" if functions[0] is differs else " 2"
        assert f"Pair{number}.layer.weight" in names
        del models


@pytest.mark.parametrize("trained", [0, 2])
def test_verify_leaves_state_of_program_unchanged(trained: int) -> None:
    """Before the first step no gradients and no optimizer state exist; later both exist."""
    program = Program()
    for _ in range(trained):
        program.step()
    gradients = [parameter.grad for parameter in program.network.parameters()]
    wanted = program.state()
    rekindle.verify(program.step, budget=TIGHT)
    assert differing(program.state(), wanted) == []
    for parameter, gradient in zip(program.network.parameters(), gradients, strict=True):
        assert parameter.grad is gradient
    after = program.step(), program.state()
    untouched = Program()
    for _ in range(trained):
        untouched.step()
    assert torch.equal(untouched.step(), after[0])
    assert differing(untouched.state(), after[1]) == []


def test_verify_restores_accumulated_gradients() -> None:
    program = Program()
    program.network(program.batch).sum().backward()
    wanted = program.state()

    def step() -> None:
        program.network(program.batch).sum().backward()

    assert rekindle.verify(step, budget=TIGHT)
    assert differing(program.state(), wanted) == []


def test_verify_names_operator_that_depends_on_global_state() -> None:
    """The step resets the state, so plain runs are equal. A recomputation reads a later state.

    The state changes after the forward pass, so the operator's trial does not show it.
    """
    calls: list[None] = []

    def scaled(x: Tensor) -> Tensor:
        calls.append(None)
        result = torch.ops.rekindle_verify.scaled(x)
        _scale[0] = 1.0 + len(calls) // 8
        return result

    program = Program(scaled)

    def step() -> Tensor:
        _scale[0] = 1.0
        calls.clear()
        return program.step()

    found = rekindle.verify(step, budget=TIGHT)
    assert not found.ok
    assert found.unstable == ()
    assert ("gradients", "Sequential.0.0.weight") in found.differing
    first = found.recomputed_differently[0]
    assert first.operator == "rekindle_verify::scaled"
    assert first.line.startswith(__file__)
    assert "DIFFERENT from plain PyTorch" in str(found)
    assert f"recomputation differs: {first}" in str(found)
    with pytest.raises(rekindle.VerificationFailed, match="rekindle_verify::scaled"):
        found.raise_if_different()


def test_verify_does_not_count_its_copies_in_budget() -> None:
    """`verify` compares a large tensor, whose copies must not count in the budget."""
    other = nn.Linear(512, 512)
    other(torch.ones(1, 512)).sum().backward()
    assert other.weight.nbytes > 1_000_000
    assert rekindle.verify(Program().step, budget=TIGHT).ok


def test_verify_of_results_that_left_memory_passes() -> None:
    """Results that variables hold are read one after the other, and leave memory again."""
    weight = (torch.randn(64, 64) / 8).requires_grad_()
    first = torch.randn(64, 64)

    def step() -> list[Tensor]:
        states = [first]
        for _ in range(12):
            states.append(torch.tanh(states[-1] @ weight))
        states[-1].sum().backward()
        return states

    found = rekindle.verify(step, budget=10 * first.nbytes)
    assert found.ok
    assert found.evictions


def test_verify_of_value_without_room_raises_out_of_budget() -> None:
    """`verify` reads each result as a whole, also those that a budget computes in slices."""
    head = nn.Linear(32, 2000, bias=False)
    hidden, targets = torch.randn(256, 32), torch.randint(2000, (256,))

    def step() -> None:
        head.weight.grad = None
        F.cross_entropy(head(hidden), targets).backward()

    budget = 9 * head.weight.nbytes  # the logits are larger
    with rekindle.budget(budget) as run:
        step()
    assert "ran in slices" in str(run.report())
    with pytest.raises(rekindle.OutOfBudget):
        rekindle.verify(step, budget=budget)


def test_verify_of_operator_drawing_from_python_random_passes() -> None:
    """Python's generator is restored between runs, and the operator is not recomputed."""
    program = Program(lambda x: _drawing(x))
    state = random.getstate()
    found = rekindle.verify(program.step, budget="1MiB")
    assert found.ok
    assert found.unstable == ()
    assert random.getstate() == state


@torch.library.custom_op("rekindle_verify_draw::draw", mutates_args=())
def _drawing(x: Tensor) -> Tensor:
    return x * random.random()


def test_verify_of_random_operator_in_never_recompute_passes() -> None:
    """This is the remedy that `verify` suggests for such an operator."""

    def kept(x: Tensor) -> Tensor:
        with rekindle.never_recompute():
            return _drawing(x)

    assert rekindle.verify(Program(kept).step, budget="1MiB")


def test_verify_names_operator_with_random_results() -> None:
    found = rekindle.verify(Program(torch.ops.rekindle_verify.shaken).step, budget="1MiB")
    assert not found.ok
    assert found.unstable
    assert found.first_unstable is not None
    assert found.first_unstable.operator == "rekindle_verify::shaken"
    assert found.recomputed_differently == ()  # its trial has shown that it is random
    assert "plain PyTorch itself differs between two runs" in str(found)


def test_verify_names_line_of_nondeterministic_plain_step() -> None:
    """A counter that `verify` cannot restore makes even two plain runs differ."""
    program, count = Program(), [0]

    def step() -> Tensor:
        count[0] += 1
        with torch.no_grad():
            program.batch.add_(count[0])
        return program.step()

    found = rekindle.verify(step, budget=TIGHT)
    assert not found.ok
    assert found.recomputed_differently == ()
    assert found.first_unstable is not None
    assert found.first_unstable.operator == "aten::add_"
    assert found.first_unstable.line.startswith(__file__)
    assert "give the step the same batch" in str(found)


def test_verify_compares_numbers_of_hook_calls() -> None:
    """Hooks must run as often as in plain PyTorch. They count in attributes of modules.

    `verify` restores these attributes.
    """
    program = Program()

    def count(module: nn.Module, *_: Any) -> None:
        module.calls = getattr(module, "calls", 0) + 1

    program.network[3].register_forward_hook(count)
    program.network[3].register_full_backward_hook(count)
    program.network[0][0].weight.register_hook(lambda gradient: gradient * 2)
    hooks = dict(program.network[3]._forward_hooks)
    found = rekindle.verify(program.step, budget=TIGHT)
    assert found.ok
    assert found.compared["forward and hook calls"] == 40 + 3
    assert not hasattr(program.network[3], "calls")
    assert program.network[3]._forward_hooks == hooks


def test_verify_reports_module_calls_made_by_recomputation() -> None:
    """An operator calls a module, so a recomputation calls the module once more."""
    found = rekindle.verify(Program(torch.ops.rekindle_verify.counted).step, budget=TIGHT)
    assert found.differing == (("forward and hook calls", "forward of Identity"),)


def test_verify_names_result_that_depends_on_active_budget() -> None:
    """The program itself asks if a budget is active, and then computes something else."""
    program = Program(lambda x: x + float(rekindle.budget._active is not None))
    found = rekindle.verify(program.step, budget="1GiB")
    assert found.recomputed_differently == ()
    assert found.first_differing is not None
    assert found.first_differing.operator == "aten::add"
    assert "nothing was recomputed" in str(found)
    assert f"another result: {found.first_differing}" in str(found)


def test_verify_of_failing_step_raises_and_restores_state() -> None:
    program = Program()
    wanted = program.state()
    with pytest.raises(rekindle.OutOfBudget):
        rekindle.verify(program.step, budget="200KiB")
    assert differing(program.state(), wanted) == []
    runs = [0]

    def fails() -> None:
        runs[0] += 1
        program.step()
        if runs[0] == 2:
            raise ValueError("in the second run")

    with pytest.raises(ValueError, match="in the second run"):
        rekindle.verify(fails, budget=TIGHT)
    assert differing(program.state(), wanted) == []
    with pytest.raises(rekindle.InvalidBudget, match=r"rekindle.verify\(step, budget="):
        rekindle.verify(program.step, budget="600KB of it")


def test_verify_restores_custom_random_generator() -> None:
    generator = torch.Generator().manual_seed(3)
    state = generator.get_state()
    program = Program(lambda x: x + torch.rand(WIDTH, generator=generator))
    assert rekindle.verify(program.step, budget=TIGHT)
    assert torch.equal(generator.get_state(), state)


def test_verify_ignores_uninitialized_memory() -> None:
    """The contents of `empty` differ each time, but the program overwrites them before it reads."""

    def filled(x: Tensor) -> Tensor:
        return torch.empty_like(x).copy_(x).mul_(2)

    assert rekindle.verify(Program(filled).step, budget=TIGHT)


def test_verify_restores_state_in_containers_of_modules() -> None:
    program = Program()
    program.network.log = []
    program.network.seen = {"deep": {"steps": [1]}}
    program.network.seen["itself"] = program.network.seen

    def step() -> Tensor:
        program.network.log.append("step")
        program.network.seen["deep"]["steps"].append(2)
        return program.step() * len(program.network.log)

    assert rekindle.verify(step, budget=TIGHT)
    assert program.network.log == []
    assert program.network.seen["deep"] == {"steps": [1]}
    assert program.network.seen["itself"] is program.network.seen


def test_verify_restores_and_compares_tensors_outside_of_module() -> None:
    program, log = Program(), torch.zeros(3)

    def step() -> Tensor:
        loss = program.step()
        log[1] = loss
        return loss

    found = rekindle.verify(step, budget=TIGHT)
    assert found
    assert found.compared["other tensors"] == 1
    assert torch.equal(log, torch.zeros(3))


def test_plain_budget_records_no_checksums_for_verify() -> None:
    """Only `verify` compares checksums, so other budgets must not compute them."""
    with rekindle.budget(TIGHT) as run:
        F.gelu(torch.ones(3))
    assert run._driver.audit is None
