"""Every error that this library raises on purpose.

RekindleError
 +- InvalidArgument (ValueError)    an argument that is none of those there are
 +- InvalidBudget (ValueError)      a budget that is no amount of bytes
 +- InvalidTrace (ValueError)       a trace that breaks a rule
 +- InvalidFile (ValueError)        a file that cannot be read: line, field, what was expected
 +- InvalidSchedule (ValueError)    a schedule that cannot be performed
 +- OutOfBudget (MemoryError)       the budget cannot be kept
 +- SwapFailed (OSError)            what was swapped out cannot be read back, nor computed again
 +- Unsupported (RuntimeError)      what cannot work is refused, with what to do instead
 +- VerificationFailed (AssertionError)  a step that is not the same within a budget
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

from rekindle._types import Bytes


class RekindleError(Exception):
    """The base of all errors of this library. They go from process to process as they are."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (type(self), self.args), self.__dict__


def _again(kind: type[RekindleError], arguments: tuple[object, ...]) -> RekindleError:
    """Without `__init__`, which makes the message and wants what it is made of."""
    builtin: Any = kind
    while builtin.__module__ != "builtins":  # whose memory this class has: not always the last base
        builtin = builtin.__base__
    error = builtin.__new__(kind)
    error.args = arguments
    return error


class InvalidArgument(RekindleError, ValueError):
    """An argument that is none of those there are; the message shows what to write instead."""


class InvalidBudget(RekindleError, ValueError):
    """A budget that is no amount of bytes; the message shows the line to write instead."""


class InvalidTrace(RekindleError, ValueError):
    """A trace that breaks a rule: `rule` names it, `complaint` says where."""

    def __init__(self, rule: str, complaint: str) -> None:
        super().__init__(f"{complaint} [rule: {rule}]")
        self.rule = rule
        self.complaint = complaint


class InvalidFile(RekindleError, ValueError):
    """A file that cannot be read: in `line` (from 1) the `field` (empty: the line) is not right.

    `expected` says what should stand there, `got` what does.
    """

    def __init__(self, line: int, field: str, expected: str, got: str, *, path: str = "") -> None:
        place = f"{path}:{line}" if path else f"line {line}"
        what = f"{field}: " if field else ""
        super().__init__(f"{place}: {what}expected {expected}, got {got}")
        self.line = line
        self.field = field
        self.expected = expected
        self.got = got
        self.path = path

    def at(self, path: str) -> InvalidFile:
        """The same complaint about the file `path`."""
        return InvalidFile(self.line, self.field, self.expected, self.got, path=path)


class InvalidSchedule(RekindleError, ValueError):
    """A schedule that cannot be performed: `action` number `index`, and the `reason`."""

    def __init__(self, index: int, action: object, reason: str) -> None:
        super().__init__(f"action {index}, {action}: {reason}")
        self.index = index
        self.action = action
        self.reason = reason


class OutOfBudget(RekindleError, MemoryError):
    """The budget cannot be kept: everything that may be let go has been, and it is not enough.

    All figures in bytes. Nothing is lost: weights, optimizer state and batch are as they were.

    needed: room asked for at this moment.
    budget: the budget in force.
    held: what cannot be let go, by category.
    smallest_budget: the smallest budget that gets past this operator; a later one may need more.
    worth_trying: that, or more: what whole steps need, by a rehearsal of the model on shapes, which
        takes a second or so when this is first asked; and where budgets named before were tried and
        came too short as well, in twice the steps each time, but by no more than a quarter. So a
        loop that needs a little more each time around does not name a budget for each.
    operator: the operator that asked; where: the user's source line, as "file:line".
    """

    look_ahead: Callable[[OutOfBudget], None] | None = None
    """Raises `worth_trying`, and says so, where more is known than when this was raised."""

    def __init__(
        self,
        message: str,
        *,
        needed: Bytes,
        budget: Bytes,
        held: Mapping[str, Bytes],
        smallest_budget: Bytes,
        worth_trying: Bytes | None = None,
        operator: str = "",
        where: str = "",
    ) -> None:
        super().__init__(message)
        self.needed = needed
        self.budget = budget
        self.held = dict(held)
        self.smallest_budget = smallest_budget
        self.worth_trying = smallest_budget if worth_trying is None else worth_trying
        self.operator = operator
        self.where = where

    @property
    def worth_trying(self) -> Bytes:
        self._look()
        return self.__dict__["worth_trying"]

    @worth_trying.setter
    def worth_trying(self, budget: Bytes) -> None:
        self.__dict__["worth_trying"] = budget

    def __str__(self) -> str:
        self._look()
        return super().__str__()

    def __reduce__(self) -> tuple[Any, ...]:
        self._look()
        again, made_of, state = super().__reduce__()
        return again, made_of, {key: value for key, value in state.items() if key != "look_ahead"}

    def _look(self) -> None:
        look_ahead = self.__dict__.pop("look_ahead", None)
        if look_ahead is not None:
            look_ahead(self)


@contextmanager
def beside(error: BaseException | None) -> Generator[None]:
    """What fails inside becomes a note of `error`, which goes on its way; without one it raises."""
    try:
        yield
    except Exception as failure:
        if error is None:
            raise
        error.add_note(f"And then: {failure}")


class SwapFailed(RekindleError, OSError):
    """What was swapped out cannot be read back, nor computed again; this step cannot go on."""


class Unsupported(RekindleError, RuntimeError):
    """What cannot work under a budget; the message says what to do instead."""


class VerificationFailed(RekindleError, AssertionError):
    """A step that is not the same within a budget; the message is the table of `verify`."""


# Tracebacks show what users write: rekindle.OutOfBudget.
for _public in (
    RekindleError,
    InvalidArgument,
    InvalidBudget,
    OutOfBudget,
    SwapFailed,
    Unsupported,
    VerificationFailed,
):
    _public.__module__ = "rekindle"
