"""Every error that this library raises on purpose.

RekindleError
 +- InvalidArgument (ValueError)    an argument that is none of those there are
 +- InvalidBudget (ValueError)      a budget that is no amount of bytes
 +- InvalidTrace (ValueError)       a trace that breaks a rule
 +- InvalidFile (ValueError)        a file that cannot be read: line, field, what was expected
 +- InvalidSchedule (ValueError)    a schedule that cannot be performed
 +- OutOfBudget (MemoryError)       the budget cannot be kept (also a torch.OutOfMemoryError)
 +- SwapFailed (OSError)            what was swapped out cannot be read back, nor computed again
 +- Unsupported (RuntimeError)      what cannot work is refused, with what to do instead
 +- VerificationFailed (AssertionError)  a step that is not the same within a budget
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, Final, Self

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
    error = builtin.__new__(_kind_to_raise(kind))
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


#: What retrying loops look for in a text: fairseq's, detectron2's, accelerate's, Lightning's.
_RETRY_WORDS: Final = "CUDA out of memory. DefaultCPUAllocator: can't allocate memory"


class OutOfBudget(RekindleError, MemoryError):
    """The budget cannot be kept: everything that may be evicted has been, and it is not enough.

    Once torch is loaded, each one is a `torch.OutOfMemoryError` (a `RuntimeError`) as well, and its
    text has the words that PyTorch uses. So code that answers "out of memory" by a smaller batch
    recognizes it. All figures are in bytes. Nothing is lost: weights, optimizer state and batch are
    as they were.

    needed: room asked for at this moment.
    budget: the budget in force.
    held: what cannot be evicted, by category.
    smallest_budget: the smallest budget that gets past this operator; a later one may need more.
    worth_trying: the budget that the text names, never more than plain PyTorch takes. It is the
        smallest one; or more, where budgets named before were tried and were too small as well; or
        what whole steps need, after `rehearse`.
    operator: the operator that asked; where: the user's source line, as "file:line".
    """

    def __new__(cls, *arguments: Any, **figures: Any) -> Self:
        return RekindleError.__new__(_kind_to_raise(cls))

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
        super().__init__(f"{message}\n(What retrying loops look for: {_RETRY_WORDS})")
        self.needed = needed
        self.budget = budget
        self.held = dict(held)
        self.smallest_budget = smallest_budget
        self.worth_trying = smallest_budget if worth_trying is None else worth_trying
        self.operator = operator
        self.where = where

    def __reduce__(self) -> tuple[Any, ...]:
        state = {key: value for key, value in vars(self).items() if key != "_rehearsal"}
        return _again, (OutOfBudget, self.args), state

    def rehearse(self, seconds: float = 10.0) -> Bytes:
        """Find the budget that whole steps need, by running the model on shapes.

        Call it after the context. Until then `worth_trying` knows of one operator alone. The text
        names what was found.

        Args:
            seconds: Stop the rehearsal after that long.

        Returns:
            `worth_trying`, which is larger now if the rehearsal found that more is needed. Where
            nothing can be rehearsed, and in another process, it is as before.
        """
        rehearsal = self.__dict__.get("_rehearsal")
        if rehearsal is not None and rehearsal(self, seconds):
            del self._rehearsal
        return self.worth_trying

    def can_rehearse(self, rehearsal: Callable[[OutOfBudget, float], bool]) -> None:
        """Have `rehearse` call `rehearsal`, until it returns True: that was all it can find."""
        self._rehearsal = rehearsal

    def name(self, budget: Bytes, reason: str) -> None:
        """Name another budget in the text: `reason` says what it is."""
        before = f"rekindle.budget({self.worth_trying})"
        *lines, words = (each for each in self.args[0].splitlines() if not each.endswith(before))
        self.args = ("\n".join([*lines, f"{reason}: rekindle.budget({budget})", words]),)
        self.worth_trying = budget


def _kind_to_raise(kind: type[Any]) -> type[Any]:
    """Return the class to make where `kind` is asked for."""
    torch_error = getattr(sys.modules.get("torch"), "OutOfMemoryError", None)
    return kind if kind is not OutOfBudget or torch_error is None else _also(torch_error)


@cache
def _also(torch_error: type[Exception]) -> type[OutOfBudget]:
    """Return the `OutOfBudget` that is a `torch_error` too: made late, for torch loads late."""
    members = {"__module__": OutOfBudget.__module__, "__doc__": OutOfBudget.__doc__}
    return type(OutOfBudget.__name__, (OutOfBudget, torch_error), members)


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
