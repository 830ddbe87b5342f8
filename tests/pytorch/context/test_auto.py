"""Tests of `"auto"` budgets, of advice in reports, and of `rekindle.max_batch`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import rekindle
from rekindle.pytorch.context import Amount, _auto
from rekindle.pytorch.context._advice import advice_on

KIB = 1024
ROOT = Path(__file__).parents[3]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Simulate a machine with 1,000 KiB free, no control group, and only the test's own tensors."""
    (tmp_path / "meminfo").write_text("MemTotal: 4000 kB\nMemAvailable:    1000 kB\n")
    monkeypatch.setattr(_auto, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(_auto, "_MEMBERSHIP", tmp_path / "cgroup")
    monkeypatch.setattr(_auto, "_GROUPS", tmp_path)
    monkeypatch.setattr(_auto, "living_tensors", list)
    return tmp_path


def automatic() -> int | None:
    with rekindle.budget("auto") as run:
        pass
    return run.budget


def test_auto_budget_is_nine_tenths_of_free_memory(machine: Path) -> None:
    assert automatic() == int(0.9 * 1000 * KIB)


def test_auto_budget_adds_memory_of_existing_tensors(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = torch.zeros(50 * KIB)
    monkeypatch.setattr(_auto, "living_tensors", lambda: [mine, mine[:3], mine.view(2, -1)])
    assert automatic() == int(0.9 * 1200 * KIB)


def test_auto_budget_is_at_most_limit_of_control_group(machine: Path) -> None:
    (machine / "memory.max").write_text(f"{900 * KIB}\n")
    (machine / "memory.current").write_text(f"{600 * KIB}\n")
    assert automatic() == int(0.9 * 300 * KIB)
    # the operating system frees its file cache when it needs memory
    (machine / "memory.stat").write_text(f"anon 5\ninactive_file {100 * KIB}\n")
    assert automatic() == int(0.9 * 400 * KIB)
    (machine / "memory.max").write_text("max\n")
    assert automatic() == int(0.9 * 1000 * KIB)


@pytest.mark.parametrize(
    ("membership", "folder", "limit", "usage"),
    [
        ("0::/job/step\n", "job/step", "memory.max", "memory.current"),
        ("0::/job/step\n", "job", "memory.max", "memory.current"),
        (
            "7:cpu:/\n4:hugetlb,memory:/slurm/job_1\n0::/\n", "memory/slurm/job_1",
            "memory.limit_in_bytes", "memory.usage_in_bytes",
        ),
        (
            "4:memory:/docker/not-seen-inside\n", "memory",
            "memory.limit_in_bytes", "memory.usage_in_bytes",
        ),
    ],
)  # fmt: skip
def test_auto_budget_is_at_most_limit_of_parent_control_group(
    machine: Path, membership: str, folder: str, limit: str, usage: str
) -> None:
    (machine / "cgroup").write_text(membership)
    group = machine / folder
    group.mkdir(parents=True)
    (group / limit).write_text(f"{500 * KIB}\n")
    (group / usage).write_text(f"{300 * KIB}\n")
    assert automatic() == int(0.9 * 200 * KIB)
    (group / "memory.stat").write_text(f"inactive_file 0\ntotal_inactive_file {50 * KIB}\n")
    assert automatic() == int(0.9 * 250 * KIB)


@pytest.mark.parametrize(("which", "field"), [("RLIMIT_AS", "VmSize"), ("RLIMIT_DATA", "VmData")])
def test_auto_budget_is_at_most_ulimit(
    machine: Path, monkeypatch: pytest.MonkeyPatch, which: str, field: str
) -> None:
    resource = pytest.importorskip("resource")
    (machine / "status").write_text(f"Name:\tpython\n{field}:\t     400 kB\n")
    monkeypatch.setattr(_auto, "_STATUS", machine / "status")
    most = {getattr(resource, which): 700 * KIB}
    monkeypatch.setattr(
        resource, "getrlimit", lambda each: (most.get(each, resource.RLIM_INFINITY), -1)
    )
    assert automatic() == int(0.9 * 300 * KIB)


def test_auto_budget_with_unknown_free_memory_is_refused(machine: Path) -> None:
    (machine / "meminfo").unlink()
    with pytest.raises(rekindle.Unsupported, match=r'write the size, .*budget\("6GiB"\)'):
        automatic()
    with pytest.raises(rekindle.Unsupported, match=r"auto.*memory meta has"):
        _auto.available(torch.device("meta"))


def test_available_memory_exceeds_memory_of_existing_tensors() -> None:
    kept = torch.ones(1000)
    found = _auto.available(torch.device("cpu"))
    assert found > kept.nbytes
    assert any(tensor is kept for tensor in _auto.living_tensors())


def test_auto_budget_on_cuda_adds_free_and_reserved_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (600, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300)
    assert _auto.available(torch.device("cuda")) == 810


def test_device_oom_error_gets_note_with_memory_by_category() -> None:
    weight = torch.ones(1000, requires_grad=True)

    def forward() -> None:
        y = weight.sin().exp()
        y + torch.empty(1 << 60)

    with pytest.raises(RuntimeError, match="can't allocate") as caught, rekindle.budget.unlimited():
        forward()
    (note,) = caught.value.__notes__
    assert note.startswith("The device ran out of memory (the peak was 11.7 KiB)")
    assert "parameters" in note
    assert "rekindle.budget(" in note


def test_error_other_than_device_oom_gets_no_note() -> None:
    with pytest.raises(RuntimeError) as caught, rekindle.budget("1MiB"):
        torch.ones(3) @ torch.ones(4)
    assert not hasattr(caught.value, "__notes__")


def test_report_gives_advice_only_on_large_memory_categories() -> None:
    cpu = torch.device("cpu")
    assert advice_on(100, {"saved for backward": 90, "held by your code": 10}, cpu) == ()
    first, second = advice_on(
        1000, {"held by your code": 300, "kept, cannot be recomputed": 400}, cpu
    )
    assert first.startswith("400 B at the peak cannot be recomputed")
    assert second.startswith("At the peak your program's variables hold 300 B")


def test_report_gives_advice_on_fragmentation_of_cuda_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stats = {
        "reserved_bytes.all.peak": 4 * 2**30,
        "allocated_bytes.all.peak": 3 * 2**30,
        "requested_bytes.all.peak": 3 * 2**30 - 2**28,
        "inactive_split_bytes.all.peak": 2**29,
        "num_alloc_retries": 3,
    }
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    fragmented, short = advice_on(2**30, {}, torch.device("cuda"))
    assert "reserved 4.00 GiB but gave at most 3.00 GiB to tensors, 256.0 MiB of it" in fragmented
    assert "(512.0 MiB are unused parts" in fragmented
    assert 'of="reserved"' in fragmented
    assert "3 times" in short
    stats.update({"reserved_bytes.all.peak": 3 * 2**30, "num_alloc_retries": 0})
    assert advice_on(2**30, {}, torch.device("cuda")) == ()


# -- batches -------------------------------------------------------------------------------------


class Trainer:
    """Training steps of a small network, for batches of any size."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.tried: list[int] = []

    def at(self, batch: int):
        def step() -> None:
            self.tried.append(batch)
            self.optimizer.zero_grad()
            self.model(torch.ones(batch, 64)).sum().backward()
            self.optimizer.step()

        return step


BUDGET = 800_000


def fits(batch: int) -> bool:
    step = Trainer().at(batch)
    try:
        with rekindle.budget(BUDGET):
            step()
            step()
    except rekindle.OutOfBudget:
        return False
    return True


@pytest.mark.slow
def test_max_batch_fits_and_batch_of_one_more_does_not() -> None:
    trainer = Trainer()
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    said: list[str] = []
    found = rekindle.max_batch(trainer.at, budget=BUDGET, watch=said.append)
    assert fits(found)
    assert not fits(found + 1)
    assert found > 100
    assert len({*trainer.tried}) < 30
    assert [each.partition(";")[0] for each in said[:3]] == [
        f"trying a batch of {n}" for n in (1, 2, 4)
    ]
    assert all(map(torch.equal, before, trainer.model.parameters()))
    assert not trainer.optimizer.state
    assert rekindle.max_batch(trainer.at, budget=BUDGET, at_most=37) == 37


def test_simulated_max_batch_is_close_to_measured_max_batch() -> None:
    trainer = Trainer()
    found = rekindle.max_batch(trainer.at, budget=BUDGET, simulated=True)
    assert {*trainer.tried} == {2, 4}
    assert found == pytest.approx(rekindle.max_batch(trainer.at, budget=BUDGET), rel=0.1)


@pytest.mark.slow
def test_simulated_max_batch_is_similar_in_new_process() -> None:
    """A new process has measured no operators yet, and its optimizer state has another order."""
    found = rekindle.max_batch(Trainer().at, budget=BUDGET, simulated=True)
    program = (
        "import rekindle; from tests.pytorch.context.test_auto import BUDGET, Trainer; "
        "print(int(rekindle.max_batch(Trainer().at, budget=BUDGET, simulated=True)))"
    )
    fresh = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    # measured costs differ between processes
    assert int(fresh.stdout) == pytest.approx(found, rel=0.1)


@pytest.mark.parametrize("simulated", [False, True])
def test_max_batch_without_fitting_batch_raises_out_of_budget(simulated: bool) -> None:
    with pytest.raises(rekindle.OutOfBudget):
        rekindle.max_batch(Trainer().at, budget=1000, simulated=simulated)


def sines(batch: int) -> Callable[[], None]:
    """Return a step function whose memory is nearly all activations."""
    x = torch.ones(1000 * batch, requires_grad=True)

    def step() -> None:
        made = x
        for _ in range(24):
            made = made.sin()
        made.sum().backward()

    return step


@pytest.mark.slow
def test_max_batch_error_has_smallest_budget_for_batch_of_1() -> None:
    with pytest.raises(rekindle.OutOfBudget, match="a batch of 1 does not fit") as caught:
        rekindle.max_batch(sines, budget=12_000, simulated=True)
    smallest = caught.value.smallest_budget
    assert smallest > 12_001
    assert rekindle.max_batch(sines, budget=smallest, simulated=True) == 1
    tight = int(1.3 * smallest)
    for simulated in (False, True):
        with pytest.raises(
            rekindle.OutOfBudget, match=r"but a step takes .* at most 1\.00"
        ) as caught:
            rekindle.max_batch(sines, budget=tight, slowdown=1.0, simulated=simulated)
        assert (caught.value.smallest_budget, caught.value.needed) == (tight, 0)


def test_max_batch_raises_error_of_step_function_unchanged() -> None:
    def broken(batch: int):
        return lambda: torch.ones(3) @ torch.ones(4)

    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        rekindle.max_batch(broken, budget="1GiB")


def test_simulated_max_batch_of_steps_that_differ_is_refused() -> None:
    def uneven(batch: int):
        return lambda: [torch.ones(3).exp() for _ in range(batch)]

    with pytest.raises(rekindle.RekindleError, match=r"batch 2 .* batch 4"):
        rekindle.max_batch(uneven, budget="1GiB", simulated=True)


def test_auto_budget_with_rekindle_budget_variable_is_its_value(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REKINDLE_BUDGET", "3MiB")
    assert automatic() == 3 << 20
    with rekindle.budget("2MiB") as run:
        assert run.budget == 2 << 20
    monkeypatch.setenv("REKINDLE_BUDGET", " auto ")
    assert automatic() == int(0.9 * 1000 * KIB)
    monkeypatch.setenv("REKINDLE_BUDGET", "6 Gigs")
    with pytest.raises(rekindle.InvalidBudget, match='write REKINDLE_BUDGET="6GiB"'):
        rekindle.budget("auto")
    monkeypatch.setenv("REKINDLE_BUDGET", "50B")
    assert Amount("auto").on(torch.device("cpu")) == 50
    monkeypatch.setenv("REKINDLE_BUDGET", "24")
    with pytest.raises(rekindle.InvalidBudget, match='write REKINDLE_BUDGET="24GiB"'):
        rekindle.budget("auto")
