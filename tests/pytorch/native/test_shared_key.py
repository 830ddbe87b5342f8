"""Tests of a core whose dispatch key PyTorch uses too, for its FakeTensor in C++.

No released PyTorch has a kernel there, so a library pretends to be it (`tests.pretend_fake`). Each
test runs its program in a process of its own, because the library stays for the life of a process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pretend_fake.build import environment

pytestmark = pytest.mark.timeout(900)  # the first test compiles a core

ROOT = Path(__file__).parents[3]

#: A model, a step that returns its gradients, and a budget of about half of what a step needs.
MODEL = """
import pretend_fake, torch, rekindle
torch.manual_seed(0)
layers = [layer for _ in range(8) for layer in (torch.nn.Linear(64, 64), torch.nn.GELU())]
model, batch = torch.nn.Sequential(*layers), torch.randn(512, 64)

def step():
    model.zero_grad()
    model(batch).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]

def same(found):
    return all(map(torch.equal, found, plain))

plain = step()
BUDGET = 1_500_000
"""


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return environment(tmp_path_factory.mktemp("library"))


def _said(program: str, there: dict[str, str]) -> str:
    """Return what the program prints, run beside a FakeTensor in C++."""
    done = subprocess.run(
        [sys.executable, "-c", MODEL + program],
        cwd=ROOT, env=os.environ | there, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_budget_beside_fake_tensors_has_plain_bits_and_its_cap(there: dict[str, str]) -> None:
    program = """
assert torch._C._dispatch_has_backend_fallback(torch._C._parse_dispatch_key("Fake"))
with rekindle.budget(BUDGET) as run:
    found = step()
print(same(found), run.peak <= BUDGET, run.evictions > 0, run.report().advice)
assert same(step())
"""
    assert _said(program, there) == "True True True ()\n"


def test_operators_after_a_fake_mode_are_seen_again(there: dict[str, str]) -> None:
    program = """
with rekindle.budget(BUDGET) as run:
    with torch._subclasses.FakeTensorMode():
        torch.ones(3)
    before = run.evictions
    found = step()
    hidden = [line for line in run.report().advice if "switched off the dispatch key" in line]
print(same(found), run.peak <= BUDGET, run.evictions > before, len(hidden))
"""
    assert _said(program, there) == "True True True 1\n"


def test_calls_with_fake_tensors_go_to_pytorch(there: dict[str, str]) -> None:
    program = """
def shapes():
    before = pretend_fake.calls()
    with pretend_fake.mode():
        made = torch.ones(4, 5)
        product = made @ made.t()
    larger = made + 1
    pair = torch.stack([made, made])
    return [*map(tuple, (product.shape, larger.shape, pair.shape))], pretend_fake.calls() - before

outside = shapes()
with rekindle.budget(BUDGET) as run:
    step()
    memory = run.memory
    inside = shapes()
    grew = run.memory - memory
print(outside == inside, outside[0], outside[1] >= 5, grew)
"""
    assert _said(program, there) == "True [(4, 4), (4, 5), (2, 4, 5)] True 0\n"


def test_operator_defined_inside_a_budget_is_seen_at_once(there: dict[str, str]) -> None:
    program = """
with rekindle.budget(BUDGET) as run:
    operators = run._driver.operators_run
    late = torch.library.Library("late", "DEF")
    late.define("twice(Tensor x) -> Tensor")
    late.impl("twice", lambda x: x * 2, "CPU")
    doubled = torch.ops.late.twice(batch)
    seen = run._driver.operators_run - operators
print(torch.equal(doubled, batch * 2), seen > 0)
"""
    assert _said(program, there) == "True True\n"


def test_compiled_model_beside_fake_tensors_has_bits_of_plain(there: dict[str, str]) -> None:
    pytest.importorskip("torch._inductor")
    program = """
compiled = torch.compile(model, backend="aot_eager")
model_before, model = model, compiled
plain = step()
torch._dynamo.reset()
with rekindle.budget(BUDGET * 2) as run:
    found = [step(), step()]
print(*map(same, found), run.peak <= BUDGET * 2)
"""
    assert _said(program, there) == "True True True\n"
