"""Compare a program in plain PyTorch with the same program within a budget."""

from __future__ import annotations

import abc
import gc
import math
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, ClassVar, Literal, Self, TypeVar

import torch

import rekindle
from tests.differ.modes import ROOMY, Mode, Setting, TooLong
from tests.pytorch.bits import differing

T = TypeVar("T")
MOST_ATTEMPTS = 200
#: PyTorch uses other code paths while a dispatch mode is active, such as a memory tracker. So the
#: results of a run below such a mode are right as well.
BELOW = "as below a mode that does nothing"


class Wrong(AssertionError):
    """Raised if a run within a budget is wrong; the text says why."""


class Program(abc.ABC):
    """A program that runs anew in each setting, from the same seeds."""

    seed: int = 0  #: draws what a mode draws
    resizes: ClassVar[bool] = False  #: True if the program itself changes the size of storages
    #: False if equal runs are expected to give equal results: a program that does not is different.
    may_vary: ClassVar[bool] = True
    #: True if `Setting.measuring` is a dispatch mode, which may change the results.
    measured_below: ClassVar[bool] = True
    #: The run within a budget may execute so many times the operators of the plain run.
    most_again: ClassVar[float] = math.inf
    #: False if the program may catch `OutOfBudget`, or change its budget: after an error, the
    #: suggested budget may then be too small.
    suggests: bool = True
    suggestion: ClassVar[str] = "smallest_budget"  #: attribute of `OutOfBudget` to try next
    most_attempts: ClassVar[int] = MOST_ATTEMPTS

    @abc.abstractmethod
    def run(self, setting: Setting) -> dict[str, Any]:
        """Run the program, and return copies of its results by name, "error" among them.

        Raises:
            OutOfBudget: The budget is too small.
        """

    def setting(self, mode: Mode | None, amount: int | None = 0, **how: Any) -> Setting:
        return Setting(mode, amount, resized=self.resizes, **how)

    @property
    def without(self) -> Iterable[Self]:
        """Return simpler versions of this program, to find a small one that still fails."""
        return ()

    @property
    def ready(self) -> Self:
        """Return this program after choices that depend on a run of it, such as an interruption."""
        return self

    def text(self, mode: Mode, amount: int) -> str:
        """Return the program as a script, for a reader."""
        return str(self)

    def amount(self, plain: Plain, mode: Mode, tightness: float) -> int:
        """Return the first budget to try.

        A `tightness` of 0.0 is the peak of plain PyTorch, 1.0 is the memory that the program keeps.
        """
        if isinstance(mode.amount, float):
            return int(plain.unlimited * mode.amount)
        return max(1, plain.kept + int((plain.peak - plain.kept) * (1 - tightness)))

    def most(self, plain: Plain, mode: Mode) -> float:
        """Return the largest budget that a mode may need."""
        return math.inf

    def larger(self, amount: int, attempt: int) -> int:
        """Return a budget to try, if it is larger than the one that `OutOfBudget` suggests."""
        return amount

    def excuse(self, plain: Plain, setting: Setting, got: dict[str, Any], names: list[str]) -> str:
        """Return the reason why results may differ from plain PyTorch, or ""."""
        return ""

    def grown(self) -> Complaint | None:
        """Return a complaint if bookkeeping grows with each step of the program."""
        return None

    def known(self, found: Complaint) -> str:
        """Return the reason why this program has this complaint if the defect is known, or ""."""
        return ""


class Plain:
    """The results of two or three runs in plain PyTorch.

    `first` ran without a dispatch mode. `below` was measured, mostly by a dispatch mode.
    `determined` is True if the program gives equal results each time.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.first = program.run(program.setting(None))
        measuring = program.setting(None, measuring=True)
        self.below = program.run(measuring)
        self.peak, self.kept = measuring.peak, measuring.kept
        self.operators, self.left = measuring.operators, measuring.left
        self.unlimited = 0  #: the peak that a budget without a limit measured
        self.determined = True
        if program.may_vary and differing(self.first, self.below):
            again = program.run(program.setting(None))
            self.determined = program.measured_below and not differing(self.first, again)

    @property
    def error(self) -> str:
        return self.first["error"]

    def is_below(self, got: dict[str, Any]) -> bool:
        """Return True if the results equal those below a dispatch mode that does nothing.

        The program may enter the budget for a part of its steps only. So also compare with a run
        that has the mode active for that part.
        """
        if not differing(got, self.below):
            return True
        within = self.program.run(self.program.setting(None, below=True))
        return not differing(got, within)


@dataclass(frozen=True)
class Complaint:
    """A failure of a program in a mode. If `excepted` is True, the text is why it is right."""

    mode: str
    amount: int
    text: str
    excepted: bool = False


def smallest(
    attempt: Callable[[int], T],
    budget: int,
    larger: Callable[[int, int], int] = lambda budget, attempt: budget,
    *,
    most: int = MOST_ATTEMPTS,
    suggests: bool = True,
    suggestion: str = "smallest_budget",
) -> tuple[T, int, list[int]]:
    """Try `budget`, and then the budgets that `OutOfBudget` suggests, until one suffices.

    Args:
        attempt: Runs a program from a fresh start within a budget.
        budget: The first budget to try.
        larger: Returns a budget to try if it is larger than the suggested one; it gets the budget
            that was refused, and how many were.
        most: How many budgets may be refused.
        suggests: True if each suggested budget must be larger than the refused one.
        suggestion: The attribute of `OutOfBudget` that has the budget to try next; "" to try a
            slightly larger one, since a smaller budget than the suggested one may do.

    Returns:
        The result of the attempt, its budget, and the budgets that were refused.
    """
    refused: list[int] = []
    while len(refused) < most:
        try:
            return attempt(budget), budget, refused
        except rekindle.OutOfBudget as error:
            refused.append(budget)
            suggested = getattr(error, suggestion) if suggestion else budget + budget // 7 + 512
            if suggests and suggested <= budget:
                raise Wrong(f"refused {budget} bytes, and asked for {suggested}") from error
            budget = max(suggested, larger(budget, len(refused)))
    raise Wrong(f"the smallest budget grew too often: {refused[-12:]}, then {budget}")


def complaint(
    program: Program, plain: Plain, mode: Mode, tightness: float = 1.0
) -> Complaint | None:
    """Run `program` in `mode`. Return the complaint about the run, or None.

    If a budget is too small, the smallest budget that works is used (see `Program.amount`).
    """
    tried: list[int | None] = []

    def attempt(amount: int | None) -> str:
        tried.append(amount)
        setting = program.setting(mode, amount)
        setting.most_operators = program.most_again * plain.operators
        try:
            with mode.around(program.seed):
                got = program.run(setting)
        except rekindle.OutOfBudget as error:
            if mode.ample:
                raise Wrong(f"OutOfBudget: {error}") from error
            if setting.peak > setting.most and not mode.planned:
                raise Wrong(f"refused, with a peak of {setting.peak}") from error
            if amount is not None and amount > program.most(plain, mode):
                raise Wrong(
                    f"needs {error.smallest_budget} bytes or more, and gets {amount}: plain "
                    f"PyTorch's peak is {plain.peak}; {str(error).splitlines()[0]}"
                ) from error
            raise
        return _compared(program, plain, setting, got)

    try:
        if mode.ample:
            excepted = attempt(None if mode.amount == "unlimited" else ROOMY)
        else:
            creeps = mode.amount == "creeping"
            first = program.amount(plain, mode, tightness)
            if creeps and tightness == 1:
                first = max(1, plain.peak // 8)
            excepted, *_ = smallest(
                attempt,
                first,
                program.larger,
                most=program.most_attempts,
                suggests=program.suggests,
                suggestion="" if creeps else program.suggestion,
            )
    except TooLong:
        return Complaint(mode.name, tried[-1] or 0, "given up", excepted=True)
    except Wrong as wrong:
        return Complaint(mode.name, tried[-1] or 0, str(wrong))
    except Exception as error:
        traceback.clear_frames(error.__traceback__)
        return Complaint(mode.name, tried[-1] or 0, f"{type(error).__name__}: {error}")
    return Complaint(mode.name, tried[-1] or 0, excepted, excepted=True) if excepted else None


def _compared(program: Program, plain: Plain, setting: Setting, got: dict[str, Any]) -> str:
    """Return the reason why the results may differ from plain PyTorch, "" if they do not.

    Raises:
        Wrong: The results, the peak or the bookkeeping are wrong.
    """
    reason, names = "", differing(got, plain.first) if plain.determined else []
    if names:
        reason = program.excuse(plain, setting, got, names)
        if not reason:
            more = f" and {len(names) - 6} more" if len(names) > 6 else ""
            told = "; ".join(
                f"{name}: {plain.first.get(name)!r} became {got.get(name)!r}"
                for name in ("error", "facts")
                if name in names
            )
            raise Wrong(f"differing: {names[:6]}{more} {told}")
    if setting.peak > setting.most:
        raise Wrong(f"the peak was {setting.peak}")
    left = setting.left
    # Not a complaint: less memory in use than in plain PyTorch, or any amount after an error. After
    # an unpack hook raised, PyTorch itself keeps parts of the graph.
    if left and not plain.left and not got["error"]:
        raise Wrong(f"{left} bytes stay")
    for run in setting.runs:
        try:
            run._driver.engine.check()
        except AssertionError as error:
            raise Wrong(f"the engine's check: {error!r}") from error
        if run.memory < 0:
            raise Wrong(f"the run's memory is {run.memory}")
        over = setting.tracked and not left and not got["error"]
        if over and list(run._driver.engine.storages):
            gc.collect()  # reference cycles of the program, such as those of a thread pool
            if stay := list(run._driver.engine.storages):
                raise Wrong(f"bookkeeping stays: {stay}")
        if setting.amount is None:
            plain.unlimited = run.peak
    return reason


@dataclass
class Outcome:
    """The verdict on a program, by its runs in several modes."""

    program: Program
    #: "excepted": the results are those of another run of PyTorch itself, or the run has no result
    kind: Literal["same", "excepted", "different", "undetermined"] = "same"
    mode: Mode | None = None
    complaint: Complaint | None = None
    tightness: float = 1.0
    grows: bool = False
    drawn_again: int = 0  #: programs that were drawn before, and that PyTorch refused
    excepted: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)


def judge(
    program: Program,
    modes: Iterable[tuple[Mode, float]],
    plain: Plain | None = None,
    *,
    known: bool = False,
    growing: bool = False,
) -> Outcome:
    """Compare a program with plain PyTorch in some modes of a budget; stop at the first complaint.

    Args:
        program: The program to run.
        modes: The modes, each with the tightness of its budget.
        plain: The runs in plain PyTorch; None to run them here.
        known: True to report known defects as well.
        growing: True to look for bookkeeping that grows with each step.
    """
    plain = Plain(program) if plain is None else plain
    outcome = Outcome(program, "same" if plain.determined else "undetermined")
    for mode, tightness in modes:
        outcome.mode, outcome.tightness = mode, tightness
        outcome.modes[mode.name] += 1
        if _is_different(outcome, complaint(program, plain, mode, tightness), known):
            return outcome
    if growing:
        outcome.grows = _is_different(outcome, program.grown(), known)
    if outcome.kind == "same" and outcome.excepted:
        outcome.kind = "excepted"
    return outcome


def _is_different(outcome: Outcome, found: Complaint | None, known: bool) -> bool:
    """Note a complaint; return True if it is to be reported."""
    outcome.complaint = found
    if found is None:
        return False
    reason = found.text if found.excepted else "" if known else outcome.program.known(found)
    if reason:
        outcome.excepted[reason] += 1
        return False
    outcome.kind = "different"
    return True


def collect_little() -> None:
    """Collect garbage after every run, except objects that existed before."""
    import_module("torch._dynamo")  # creating the first optimizer would import it later
    gc.collect()
    gc.freeze()


@contextmanager
def own_dispatch_keys() -> Iterator[None]:
    """Free the exceptions raised inside, so that the thread's dispatch keys are unchanged.

    While PyTorch prints a tensor, it holds a dispatch-key guard. After an error, the frames of the
    traceback keep that guard alive. If the guard ends later than a `torch.inference_mode()` around
    it, the thread has no autograd from then on.
    """
    sets = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(*sets):
        try:
            yield
        except Exception as error:
            traceback.clear_frames(error.__traceback__)
            raise
