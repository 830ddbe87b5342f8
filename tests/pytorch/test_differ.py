"""Tests of the harness that compares programs: each kind of wrong run is reported.

Programs of sources are in test_fuzz, test_hunt, test_scenes, test_libraries and test_sweep.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import rekindle
from rekindle.pytorch.native import Driver
from tests.differ import workers
from tests.differ.judge import Plain, Program, Wrong, complaint, judge, smallest
from tests.differ.modes import Mode, Setting
from tests.differ.tally import Tally
from tests.differ.workers import Work
from tests.pytorch import cores
from tests.pytorch.bits import differing, everything
from tests.pytorch.harsh import deeper, vector

TIGHT, ROOMY = Mode("tight"), Mode("roomy", amount="roomy")


@dataclass(frozen=True)
class Chain(Program):
    """Layers whose gradient is the result; `extra` runs within the budget."""

    extra: Callable[[Setting, Tensor], Any] = lambda setting, x: None

    def run(self, setting: Setting) -> dict[str, Any]:
        torch.manual_seed(20)
        with setting.whole():
            weight = vector(True)
            with setting.budget():
                x = deeper(weight)
                extra = self.extra(setting, x)
                x.sum().backward()
                del x
        return {**everything([weight, extra]), "error": ""}


def _said(program: Program, mode: Mode = TIGHT) -> str:
    found = complaint(program, Plain(program), mode)
    return "" if found is None else found.text


def test_right_program_in_each_mode_is_no_complaint() -> None:
    modes = (TIGHT, ROOMY, Mode("all", {"evict": "anything"}, "roomy", everything=True))
    outcome = judge(Chain(), [(mode, 1.0) for mode in modes])
    assert (outcome.kind, outcome.modes.total()) == ("same", 3)


def test_program_that_reads_its_mode_is_different() -> None:
    assert "result[1]" in _said(Chain(lambda setting, x: setting.mode is None))


def test_program_that_varies_is_undetermined_but_runs() -> None:
    numbers = iter(range(100))
    outcome = judge(Chain(lambda setting, x: next(numbers)), [(TIGHT, 1.0)])
    assert (outcome.kind, outcome.modes.total()) == ("undetermined", 1)


def test_memory_that_stays_after_a_program_is_reported() -> None:
    kept: list[Tensor] = []

    def keep(setting: Setting, x: Tensor) -> None:
        if setting.inside:
            kept.append(x.detach().clone())

    assert "bytes stay" in _said(Chain(keep), ROOMY)


def test_budget_that_refuses_although_roomy_is_reported() -> None:
    def refuse(setting: Setting, x: Tensor) -> None:
        if setting.inside:
            raise rekindle.OutOfBudget("no")

    assert _said(Chain(refuse), ROOMY).startswith("OutOfBudget: no")
    assert "asked for 0" in _said(Chain(refuse))


def test_error_of_a_run_within_budget_is_reported() -> None:
    def fail(setting: Setting, x: Tensor) -> None:
        if setting.inside:
            raise KeyError("lost")

    assert _said(Chain(fail)) == "KeyError: 'lost'"


def _fails(engine: Any) -> None:
    raise AssertionError("counts differ")


@pytest.mark.parametrize(
    ("owner", "name", "fake", "said"),
    [
        ("engine", "check", _fails, "the engine's check"),
        ("engine", "storages", property(lambda engine: [3]), "bookkeeping stays: [3]"),
        ("run", "memory", property(lambda run: -1), "the run's memory is -1"),
    ],
)
def test_bookkeeping_that_is_wrong_is_reported(
    owner: str, name: str, fake: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rekindle.budget("1GiB") as run:
        kind = type(run if owner == "run" else run._driver.engine)
    monkeypatch.setattr(kind, name, fake)
    assert said in _said(Chain())


def test_budget_that_is_not_kept_is_reported() -> None:
    def unlimited(driver: Driver) -> None:
        driver.core.set_budget(driver.handle, -1)

    assert _said(Chain()) == ""
    plain = Plain(Chain())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mode, "around", lambda mode, seed: cores.counting())
        cores.tune(unlimited)
        found = complaint(Chain(), plain, TIGHT)
    assert found is not None
    assert "the peak was" in found.text


def test_smallest_budget_follows_suggestions_that_grow() -> None:
    def attempt(budget: int) -> str:
        if budget < 7:
            raise rekindle.OutOfBudget(smallest_budget=budget + 2)
        return "done"

    assert smallest(attempt, 1) == ("done", 7, [1, 3, 5])
    assert smallest(attempt, 1, lambda budget, refused: 4 * budget) == ("done", 16, [1, 4])
    with pytest.raises(Wrong, match="grew too often"):
        smallest(attempt, 1, most=2)


def test_comparison_sees_hidden_state_of_module_and_optimizer() -> None:
    module = torch.nn.Linear(2, 2)
    module.plain = torch.ones(2)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    wanted = everything([module, optimizer])
    module.plain.add_(1)
    assert differing(everything([module, optimizer]), wanted) == ["result[0]..plain"]
    optimizer.param_groups[0]["lr"] = 0.2
    assert "result[1][param_groups][0][lr]" in differing(everything([module, optimizer]), wanted)


# -- processes -------------------------------------------------------------------------------------

WORKER = """
import os, sys
from tests.differ.workers import write_row
for item in map(int, sys.argv[1:-1]):
    write_row({"begins": item})
    if item == 2:
        os._exit(7)
    write_row({"item": item, "kinds": {"same": 1}})
"""


def test_item_that_ends_its_process_or_hangs_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    run, commands = workers.run, list[list[str]]()

    def started(command: Sequence[object], seconds: float, environment: Any) -> workers.Ended:
        items = [str(word) for word in command[2:]]
        commands.append(items)
        seconds = 0.0 if items[0] == "3" else 600.0  # the second process takes too long
        return run(["-c", WORKER, *items], seconds, environment)

    monkeypatch.setattr(workers, "run", started)
    work = Work(lambda item: Tally(), range(1, 6), lambda some: [*map(str, some)], portion=5)
    total = work.there()
    assert total.kinds == {"same": 3, "different": 2}
    told = [failure.split(" with ")[0] for failure in total.failures]
    assert told == ["2: ended", "3: not done after 0 s"]
    assert [command[0] for command in commands] == ["1", "3", "4"]


def test_counts_of_programs_survive_a_process() -> None:
    one = Tally(Counter(same=2), again=Counter(sin=3), failures=["wrong"], idle=["entry"])
    one += Tally.of_row(one.as_row())
    assert (one.kinds, one.again) == ({"same": 4}, {"sin": 6})
    assert (one.failures, one.idle) == (["wrong"] * 2, ["entry"] * 2)
