"""Loops with Accelerate within a budget: nothing is wrapped, and all of its options hold."""

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
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # theirs
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def forget_accelerator() -> None:
    """Accelerate keeps the settings of the first one for the whole process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def accelerator_of_its_own() -> Iterator[None]:
    forget_accelerator()  # a Trainer has one as well
    yield
    forget_accelerator()


def train(folder: Path, context: Any, *, precision: str = "no") -> tuple[list[Tensor], Any]:
    """Two epochs with accumulation, clipping, an evaluation and a state that is saved and loaded.
    Returns what is left behind, and the run."""
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
    told: list[Tensor] = []
    with context as run:
        for _ in range(2):
            for batch in data:
                with accelerator.accumulate(model):
                    loss = (model(batch) - batch).square().mean()
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        told.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).clone())
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
            with torch.no_grad():
                told.append(accelerator.gather_for_metrics(model(batch).mean()))
            accelerator.save_state(str(folder / "state"))
            if accelerator.num_processes > 1:  # some of its versions name a second CPU
                torch.distributed.barrier()
            accelerator.load_state(str(folder / "state"))
    return [*told, *(each.detach() for each in model.parameters())], run


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
def test_the_same_weights_with_all_options(
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


def test_under_its_autocast(tmp_path: Path) -> None:
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
told = {"left": [each.double().sum().item() for each in left]}
if amount:
    told |= {"peak": run.peak, "recomputations": run.recomputations, "followed": run.steps_followed}
(Path(sys.argv[2]) / f"rank{rank}.json").write_text(json.dumps(told))
leave()
"""


def test_two_processes_each_within_its_own(tmp_path: Path) -> None:
    """Over gloo, with the bits of plain ranks; and both follow what they learn."""
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


def test_two_ranks_on_cpus_train_as_without_a_budget() -> None:
    plain, within = _ranks(), _ranks("2MiB")
    assert within == plain
    assert all(device.startswith("cpu:") for _, device, _ in within)
