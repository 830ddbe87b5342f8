"""Tests of which arguments `rekindle.budget`, `plan`, `profile` and `max_batch` accept."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import rekindle
from rekindle.policies import LRU
from rekindle.pytorch.online import elsewhere, same_device
from rekindle.pytorch.online._budget_history import BudgetHistory
from rekindle.trace import chain
from rekindle.trace.formats import save

ROOT = Path(__file__).parents[3]
MODEL = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])


def step() -> None:
    MODEL(torch.ones(256, 64)).square().mean().backward()
    MODEL.zero_grad()


@pytest.mark.parametrize("policy", ["lru", " LRU", LRU, LRU(), "random:7", "h-sm-eq"])
def test_policy_argument_accepts_name_class_or_instance(policy: object) -> None:
    with rekindle.budget("600KiB", policy=policy) as run:  # type: ignore[arg-type]
        step()
    assert run.evictions > 0
    trace = rekindle.capture(step)
    rekindle.simulate(trace, budget="600KiB", policy=policy)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        ({"policy": "newest"}, r'one of dtr, .*thrifty, random:SEED; write policy="dtr"'),
        ({"policy": 3}, "wanted a policy or its name"),
        ({"learn": "yes"}, 'write learn=True, learn=False, learn="wait"'),
        ({"evict": "all"}, 'evict="anything"'),
        ({"split": "rows"}, "equal.*never"),
        ({"device": "cuda"}, 'does not find on this machine; write device="cpu"'),
        ({"device": "mps"}, 'does not find on this machine; write device="cpu"'),
        ({"device": "meta"}, "a device without memory"),
        ({"device": "gpu"}, "a name that is no device of PyTorch"),
    ],
)
def test_budget_with_wrong_argument_is_refused_before_entering(
    arguments: dict[str, object], reported: str
) -> None:
    if torch.cuda.is_available() and arguments.get("device") == "cuda":
        pytest.skip("there is CUDA")
    with pytest.raises(rekindle.InvalidArgument, match=reported):
        rekindle.budget("1GiB", **arguments)  # type: ignore[arg-type]


def test_budget_of_none_counts_memory_without_limit() -> None:
    with rekindle.budget(None) as run:
        step()
    assert run.budget is None
    assert run.evictions == 0 < run.peak
    assert "budget                 none" in run.report().text()


def test_budget_asks_whether_cuda_is_in_use_when_entered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def is_initialized() -> bool:
        asked.append("now")
        return False

    monkeypatch.setattr(torch.cuda, "is_initialized", is_initialized)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    context = rekindle.budget("1GiB")
    before = len(asked)
    with context:
        pass
    assert len(asked) > before


def test_program_that_uses_second_device_raises() -> None:
    cpu = torch.device("cpu")
    with pytest.raises(rekindle.Unsupported, match=r'budget\(\.\.\., device="cuda"\)'):
        same_device(cpu, torch.device("cuda", 1))
    with pytest.raises(rekindle.Unsupported, match=r'on cuda:1, but a budget .* device="cuda:0"'):
        same_device(torch.device("cuda", 0), torch.device("cuda", 1))
    same_device(torch.device("cuda", 0), cpu)
    same_device(cpu, torch.device("meta"))


def test_report_of_program_on_other_device_suggests_argument() -> None:
    cpu, cuda = torch.device("cpu"), [torch.device("cuda", index) for index in range(2)]
    reported = elsewhere(cpu, dict.fromkeys(cuda, False))
    assert reported is not None
    assert "all tensors were on cuda, whose memory had no limit." in reported
    assert 'Write rekindle.budget(..., device="cuda")' in reported
    assert elsewhere(cpu, {cuda[0]: False, cpu: True}) is None
    assert elsewhere(cpu, {}) is None


def test_budget_with_swap_does_not_evict_user_held_values() -> None:
    """With `swap`, some values can only be restored from a copy on the host.

    So no tensor in a variable is evicted then.
    """
    with rekindle.budget("1GiB", evict="auto", swap="1MiB") as run:
        assert run._driver.held is None


def test_decorated_function_has_budget_for_each_call() -> None:
    @rekindle.budget("600KiB")
    def train(times: int) -> int:
        """Trains."""
        for _ in range(times):
            step()
        return times

    assert train.__doc__ == "Trains."
    runs = []
    for _ in range(2):
        assert train(2) == 2
        runs.append(train.run)  # type: ignore[attr-defined]
    assert runs[0] is not runs[1]
    assert all(run.recomputations > 0 for run in runs)
    with pytest.raises(rekindle.Unsupported, match="inside it"):

        @rekindle.budget("1GiB")
        def steps():  # type: ignore[no-untyped-def]
            yield step()


def test_run_shows_status_and_calls_on_step_after_each_step() -> None:
    optimizer = torch.optim.SGD(MODEL.parameters(), lr=0.0)
    heard = []
    with rekindle.budget("600KiB") as run:
        assert repr(run).startswith("<rekindle.Run: 0 B of 600.0 KiB, peak 0 B; so far: 0 evict")
        run.on_step(heard.append)
        for _ in range(3):
            MODEL(torch.ones(256, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        status = run.status()
    assert run.steps == 3
    assert run.last_step == heard[-1]
    assert [each.number for each in heard] == [1, 2, 3]
    assert sum(each.evictions for each in heard) <= run.evictions
    assert max(each.peak for each in heard) == run.peak
    assert all(0 < each.memory <= each.peak <= 600 * 1024 for each in heard)
    assert re.fullmatch(
        r".* of 600\.0 KiB, peak .*; step 3: \d+ evictions?, time lost \d+\.\d%", status
    )


def test_report_of_unrecorded_run_has_chart_of_last_steps() -> None:
    optimizer = torch.optim.SGD(MODEL.parameters(), lr=0.0)
    with rekindle.budget("600KiB") as run:
        for _ in range(200):
            MODEL(torch.ones(256, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    line = run.report().timeline
    (memory,) = line.bands.values()
    assert 50 < len(memory) < 3000  # samples of the last steps only, not of all two hundred
    assert max(memory) > 0.8 * run.peak
    assert list(line.clock) == sorted(line.clock)
    assert "last 3 steps" in line.note
    assert "<polygon" in run.report().to_html()


def test_budget_of_text_none_suggests_none() -> None:
    with pytest.raises(rekindle.InvalidBudget, match=r"; write rekindle\.budget\(None\)$"):
        rekindle.budget(" None")


def test_budget_backend_and_plan_refuse_fraction_as_budget() -> None:
    for refuse in (rekindle.budget, rekindle.backend):
        with pytest.raises(rekindle.InvalidBudget):
            refuse("0.5")
    with pytest.raises(rekindle.InvalidBudget):
        rekindle.plan(chain(4), budget="0.5")


def test_plan_without_budget_argument_chooses_feasible_budget(tmp_path: Path) -> None:
    pytest.importorskip("highspy")
    trace = chain(8, nbytes=1000)
    plan = rekindle.plan(trace)
    assert plan.schedule is not None
    assert plan.peak is not None
    path = tmp_path / "chain.jsonl"
    save(trace, path)
    assert rekindle.simulate(path, budget=plan.budget).peak <= plan.budget
    tight = rekindle.plan(trace, budget=1)
    assert tight.smallest_budget is not None
    again = rekindle.plan(trace, budget=tight.smallest_budget)
    assert again.schedule is not None


@pytest.mark.parametrize(
    ("model", "inputs", "reported"),
    [
        (lambda x: x, (torch.ones(2, 64),), "got function, wanted a model"),
        (nn.Linear, (torch.ones(2, 64),), "got the class Linear"),
        (MODEL, (torch.ones(2, 64), torch.ones(2)), "too many positional arguments"),
        pytest.param(MODEL, (torch.ones(2, 63),), r"float32\[2, 63\].*dim", marks=pytest.mark.slow),
    ],
)
def test_plan_of_wrong_model_or_inputs_is_refused(
    model: object, inputs: object, reported: str
) -> None:
    with pytest.raises(rekindle.InvalidArgument, match=reported):
        rekindle.plan(model, inputs, budget="1GiB")


def test_max_batch_and_profile_refuse_step_of_wrong_type() -> None:
    with pytest.raises(rekindle.InvalidArgument, match=r"step_factory\(1\) returned NoneType"):
        rekindle.max_batch(lambda n: None, budget="1GiB")  # type: ignore[arg-type,return-value]
    with pytest.raises(rekindle.InvalidArgument, match="a function that takes one step"):
        rekindle.profile(torch.ones(3))  # type: ignore[arg-type]


def test_max_batch_with_slowdown_limit_is_smaller() -> None:
    def factory(n: int):  # type: ignore[no-untyped-def]
        batch = torch.ones(n, 64)

        def one() -> None:
            MODEL(batch).square().mean().backward()

        return one

    reported: list[str] = []
    any_price = rekindle.max_batch(factory, budget="700KiB", watch=reported.append)
    free = rekindle.max_batch(factory, budget="700KiB", slowdown=1.0)
    assert free < any_price
    assert free.slowdown == 1.0 < any_price.slowdown
    assert repr(free) == f"{int(free)} (a step takes 1.00 x its plain time)"
    assert any(" fits at " in each for each in reported)


def test_report_writes_html_and_json_files_to_given_paths(tmp_path: Path) -> None:
    with rekindle.budget(None) as run:
        step()
    page = run.report().to_html(tmp_path / "run.html")
    assert (tmp_path / "run.html").read_text() == page
    data = run.report().to_json(str(tmp_path / "run.json"))
    assert (tmp_path / "run.json").read_text() == data + "\n"


def test_out_of_budget_suggests_profile_for_smallest_budget() -> None:
    reported = pytest.raises(
        rekindle.OutOfBudget, match=r"rekindle\.profile\(step\)\.smallest_budget"
    )
    with reported, rekindle.budget("64KiB"):
        step()


CLIMB = """
import sys, rekindle, torch
budget = int(sys.argv[1])
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
tries = 0
while True:
    tries += 1
    try:
        with rekindle.budget(budget):
            x = torch.ones(256, 64)
            for layer in model:  # no module that calls them all, whose step could be rehearsed
                x = layer(x)
            x.square().mean().backward()
        break
    except rekindle.OutOfBudget as error:
        budget = error.worth_trying
        del error
        model.zero_grad()
print(tries, budget)
"""


@pytest.mark.slow
def test_error_in_restarted_script_suggests_budget_that_worked(tmp_path: Path) -> None:
    script = tmp_path / "climb.py"
    script.write_text(CLIMB)
    words = [sys.executable, str(script), str(80 * 1024)]
    reported = [
        subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
        for _ in range(2)
    ]
    assert int(reported[0][0]) > 3
    # the first budget, and the budget that worked before
    assert reported[1] == ["2", reported[0][1]]


def test_history_of_refused_budgets_is_kept_per_program(monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(["one.py", "one.py", "one.py", "two.py", "two.py"])
    monkeypatch.setattr("rekindle.pytorch.online._budget_history._program", lambda: next(names))
    first = BudgetHistory().suggest_after(100, 200)
    other = BudgetHistory()
    assert first == 200
    assert other._at_the_end(100, 200) == 200
    assert BudgetHistory()._at_the_end(100, 200) == 0


def test_errors_of_restarted_script_suggest_growing_budgets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the exact need, each start of the script would get only one operator further."""
    monkeypatch.setattr("rekindle.pytorch.online._budget_history._program", lambda: "train.py")
    budget, starts = 1000, 1
    while budget < 1500:
        budget = BudgetHistory().suggest_after(budget, budget + 10)  # simulates a new process
        starts += 1
    assert starts <= 4
    assert budget <= 1.5 * 1500


def test_history_of_refused_budgets_without_cache_is_empty(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("rekindle.pytorch.online._budget_history._program", lambda: "train.py")
    monkeypatch.setenv("REKINDLE_CACHE", str(tmp_path))
    BudgetHistory().suggest_after(100, 200)
    BudgetHistory().suggest_after(200, 300)
    assert BudgetHistory()._at_the_end(100, 200) > 200
    monkeypatch.setenv("REKINDLE_CACHE", "off")
    assert BudgetHistory()._at_the_end(100, 200) == 0
    BudgetHistory().suggest_after(100, 400)
    assert [path.name for path in tmp_path.iterdir()] == ["too-small.json"]
    assert not Path("off").exists()


def test_run_status_can_be_shown_in_tqdm_progress_bar() -> None:
    tqdm = pytest.importorskip("tqdm").tqdm
    optimizer, shown = torch.optim.SGD(MODEL.parameters(), lr=0.0), io.StringIO()
    with rekindle.budget("600KiB") as run, tqdm(range(3), file=shown, ascii=True, ncols=160) as bar:
        for _ in bar:
            MODEL(torch.ones(256, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            bar.set_postfix_str(run.status())
    assert "of 600.0 KiB" in shown.getvalue()
    assert "step 3: " in shown.getvalue()


def test_budget_and_simulate_use_same_default_policy() -> None:
    trace = rekindle.capture(step)
    with rekindle.budget("600KiB") as run:
        step()
    with_default = rekindle.simulate(trace, budget="600KiB")
    assert with_default.made_by == repr(run.policy)
    assert with_default == rekindle.simulate(trace, budget="600KiB", policy=type(run.policy)())


@pytest.mark.evicts_anything
def test_repr_of_ended_run_shows_memory_of_restored_tensors() -> None:
    x = torch.randn(64, 1024)
    with rekindle.budget("1600KiB", evict="anything") as run:
        held = [(x * n).sin() for n in range(8)]
    assert run.evictions
    assert len(held) == 8
    assert run.memory > 1600 << 10 >= run.peak
    restored = (
        "peak 1.5 MiB of 1.6 MiB, 2.2 MiB after the end, which restored evicted tensors; so far"
    )
    assert restored in repr(run)
