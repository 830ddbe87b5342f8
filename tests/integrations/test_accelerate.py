"""Tests of training loops with Accelerate inside a budget, with every option of the budget."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rekindle
from tests.cli.test_run import ROOT, python

accelerate = pytest.importorskip("accelerate")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # warnings of Accelerate itself
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def forget_accelerator() -> None:
    """Reset Accelerate's global state, which keeps the settings of the first `Accelerator`."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def accelerator_of_its_own() -> Iterator[None]:
    forget_accelerator()  # an `Accelerator` of an earlier test, or of a `Trainer`, left settings
    yield
    forget_accelerator()


def train(folder: Path, context: Any, *, precision: str = "no") -> tuple[list[Tensor], Any]:
    """Train two epochs with accumulation, clipping, an evaluation, and a saved and loaded state.

    Return the final state of the training and the `Run`.
    """
    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(
        cpu=True, gradient_accumulation_steps=2, mixed_precision=precision
    )
    blocks = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(6)]
    model = torch.nn.Sequential(*blocks, torch.nn.Dropout(0.1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=8)
    data = torch.utils.data.DataLoader(torch.randn(2048, 64), batch_size=256, shuffle=True)
    model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)
    reported: list[Tensor] = []
    with context as run:
        for _ in range(2):
            for batch in data:
                with accelerator.accumulate(model):
                    loss = (model(batch) - batch).square().mean()
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        reported.append(
                            accelerator.clip_grad_norm_(model.parameters(), 1.0).clone()
                        )
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
            with torch.no_grad():
                reported.append(accelerator.gather_for_metrics(model(batch).mean()))
            accelerator.save_state(str(folder / "state"))
            if accelerator.num_processes > 1:  # some versions of Accelerate use a second CPU device
                torch.distributed.barrier()
            accelerator.load_state(str(folder / "state"))
    return [*reported, *(each.detach() for each in model.parameters())], run


@pytest.fixture
def budget(tmp_path: Path) -> int:
    roomy = train(tmp_path, rekindle.budget(None))[1]
    return roomy.peak * 7 // 10


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"learn": "wait", "policy": "lru", "record": True, "cache": False},
        {"swap": "1GiB"},
        {"evict": "anything"},
    ],
    ids=lambda options: next(iter(options), "none"),
)
def test_accelerate_with_each_budget_option_matches_pytorch(
    budget: int, options: dict[str, Any], tmp_path: Path
) -> None:
    expected, _ = train(tmp_path, nullcontext())
    found, run = train(tmp_path, rekindle.budget(budget, **options))
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert run.peak <= budget
    assert run.recomputations > 0 or run.report().swapped is not None
    if "policy" in options:
        assert run.policy == rekindle.policies.LRU()
        assert run.record.actions
        assert run.steps_followed > 0
    assert ("swap" in options) == (run.report().swapped is not None)


def test_accelerate_with_mixed_precision_matches_pytorch(tmp_path: Path) -> None:
    expected, _ = train(tmp_path, nullcontext(), precision="bf16")
    roomy = train(tmp_path, rekindle.budget(None), precision="bf16")[1]
    found, run = train(tmp_path, rekindle.budget(roomy.peak * 8 // 10), precision="bf16")
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert run.recomputations > 0


RANKS = """
import json, sys
from contextlib import nullcontext
from pathlib import Path
import torch
from accelerate import PartialState
import rekindle
from tests.distributed.ranks import leave
from tests.integrations.test_accelerate import train

amount, options = json.loads(sys.argv[1])
context = rekindle.budget(amount, **options) if amount else nullcontext()
state = PartialState(cpu=True)
rank = state.process_index
assert state.num_processes == 2
left, run = train(Path(sys.argv[2]), context)
reported = {"left": [each.double().sum().item() for each in left]}
if amount:
    reported |= {"peak": run.peak, "recomputations": run.recomputations}
    reported["followed"] = run.steps_followed
(Path(sys.argv[2]) / f"rank{rank}.json").write_text(json.dumps(reported))
leave()
"""


def test_two_accelerate_processes_each_stay_within_own_budget(tmp_path: Path) -> None:
    """The ranks use gloo. Weights are those of ranks without budgets. Both ranks learn plans."""
    root = Path(__file__).resolve().parents[2]
    (tmp_path / "ranks.py").write_text(f"import sys\nsys.path.insert(0, {str(root)!r})\n" + RANKS)

    def launched(amount: int | None, **options: Any) -> list[dict[str, Any]]:
        launcher = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
        words = ("ranks.py", json.dumps([amount, options]), tmp_path)
        result = python(*launcher, *words, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        return [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]

    plain = launched(None)
    budget = max(each["peak"] for each in launched(1 << 40)) * 8 // 10
    within = launched(budget, learn="wait", policy="dtr")
    assert [each["left"] for each in within] == [each["left"] for each in plain]
    for each in within:
        assert each["peak"] <= budget
        assert each["recomputations"] > 0
        assert each["followed"] > 0


def _ranks(*arguments: str) -> list[list[str]]:
    """Run two ranks on gloo and return what each printed, by rank."""
    command = ["-m", "torch.distributed.run", "--nproc-per-node=2", "-m"]
    done = python(*command, "tests.integrations.two_ranks", *arguments, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return sorted(line.split() for line in done.stdout.splitlines() if line)


def test_two_accelerate_cpu_ranks_match_pytorch() -> None:
    plain, within = _ranks(), _ranks("2MiB")
    assert within == plain
    assert all(device.startswith("cpu:") for _, device, _ in within)
