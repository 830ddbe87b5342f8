"""Run a text of Python as a program, with the names that `kit` defines."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any, ClassVar

import rekindle
from tests.differ.judge import BELOW, Plain, Program, own_dispatch_keys
from tests.differ.modes import Mode, Setting
from tests.pytorch.bits import everything, noted
from tests.pytorch.fuzz.program import NOTICED
from tests.pytorch.hunt import kit

HEADER = """\
from tests.differ.modes import Setting
from tests.pytorch.hunt.kit import *
from tests.pytorch.hunt.modes import MODES
setting = Setting(MODES[{!r}], {})
budget, planned, mark, note = setting.budget, setting.planned, setting.mark, print

"""
#: Errors of `rekindle.plan`; the second is for models that run only without a plan.
NO_PLAN = (rekindle.Unsupported.__name__, rekindle.InvalidArgument.__name__)


class Text(Program):
    """A program whose results are the variables that its text assigns."""

    most_again: ClassVar[float] = 6

    @abc.abstractmethod
    def source(self) -> str:
        """Return the program."""

    def text(self, mode: Mode, amount: int) -> str:
        return HEADER.format(mode.name, amount) + self.source()

    def run(self, setting: Setting) -> dict[str, Any]:
        log: list[Any] = []

        def note(*values: Any) -> None:
            log.append([noted(value) for value in values])

        given: dict[str, Any] = {name: each for name, each in vars(kit).items() if name[0] != "_"}
        given |= {"budget": setting.budget, "planned": setting.planned, "mark": setting.mark}
        given |= {"note": note, "__name__": kit.__name__}
        space = dict(given)
        kit.counts.clear()
        error, code = "", compile(self.source(), "<loop>", "exec")
        try:
            with own_dispatch_keys(), setting.whole():
                exec(code, space)
        except rekindle.OutOfBudget:
            # An unfinished autograd graph holds the program's hooks, whose globals hold the graph.
            # Python's collector does not see this cycle.
            space.clear()
            raise
        except Exception as raised:
            error = _told(raised)
        if "trip" in space:
            setting.order = space["trip"].order
        names = sorted(name for name in space if name not in given and not name.startswith("__"))
        try:
            found = everything({"log": log, **{name: space[name] for name in names}})
        except RuntimeError as unreadable:  # a result is evicted and cannot be recomputed
            found, error = {}, _told(unreadable)
        return {**found, "error": error}

    def excuse(self, plain: Plain, setting: Setting, got: dict[str, Any], names: list[str]) -> str:
        planned = setting.mode is not None and setting.mode.planned
        if planned and got["error"].startswith(NO_PLAN):
            return "no plan"
        return BELOW if plain.is_below(got) else ""


@dataclass(frozen=True)
class Script(Text):
    """A program with a fixed text."""

    lines: str

    def source(self) -> str:
        return self.lines


def _told(error: Exception) -> str:
    text = str(error)
    start = NOTICED if NOTICED in text else text.split("\n")[0]
    return f"{type(error).__name__}: {start}"
