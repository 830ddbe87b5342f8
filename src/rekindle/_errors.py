"""Define every error that this library raises on purpose.

Other errors, such as those of the user's code, pass through unchanged. The tree of classes, each
with its built-in base class and its meaning:

RekindleError
 +- InvalidArgument (ValueError)    an argument is not one of the accepted values
 +- InvalidBudget (ValueError)      a budget is not an amount of bytes
 +- InvalidTrace (ValueError)       a trace breaks a rule
 +- InvalidFile (ValueError)        a file cannot be read: line, field, what was expected
 +- InvalidSchedule (ValueError)    a schedule cannot be performed
 +- OutOfBudget (MemoryError)       an operator does not fit (also a torch.OutOfMemoryError)
 +- SwapFailed (OSError)            a value can be neither read back nor recomputed
 +- Unsupported (RuntimeError)      something cannot work; the message says what to do instead
 +- VerificationFailed (AssertionError)  a step gives other results within a budget
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, Final, Self

from rekindle._public import publish
from rekindle._types import Bytes


class RekindleError(Exception):
    """The base of all errors that Rekindle raises on purpose. Errors can be pickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (type(self), self.args), self.__dict__


def _again(kind: type[RekindleError], arguments: tuple[object, ...]) -> RekindleError:
    """Recreate a pickled error from its final message, without `__init__`, which composes it."""
    builtin: Any = kind
    # Python accepts only the `__new__` of the builtin class that fixes the memory layout, such as
    # `OSError.__new__`. `__base__` leads to that class; the last of `__bases__` may be another.
    while builtin.__module__ != "builtins":
        builtin = builtin.__base__
    error = builtin.__new__(_kind_to_raise(kind))
    error.args = arguments
    return error


class InvalidArgument(RekindleError, ValueError):
    """An argument is not one of the accepted values; the message shows what to write."""


class InvalidBudget(RekindleError, ValueError):
    """A budget is not an amount of bytes; the message shows the line to write."""


class InvalidTrace(RekindleError, ValueError):
    """A trace breaks a rule.

    Attributes:
        rule: The rule that is broken.
        complaint: The place at which the trace breaks the rule.
    """

    def __init__(self, rule: str, complaint: str) -> None:
        super().__init__(f"{complaint} [rule: {rule}]")
        self.rule = rule
        self.complaint = complaint


class InvalidFile(RekindleError, ValueError):
    """A file cannot be read.

    Attributes:
        line: The number of the wrong line, from 1.
        field: The name of the wrong field; empty if the whole line is wrong.
        expected: The expected content.
        got: The content found.
        path: The path of the file.
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
        """Return a copy of this error whose message also names the file `path`."""
        return InvalidFile(self.line, self.field, self.expected, self.got, path=path)


class InvalidSchedule(RekindleError, ValueError):
    """A schedule cannot be performed.

    Attributes:
        index: The position of the failing action in the schedule, from 0.
        action: The failing action.
        reason: Why the action fails.
    """

    def __init__(self, index: int, action: object, reason: str) -> None:
        super().__init__(f"action {index}, {action}: {reason}")
        self.index = index
        self.action = action
        self.reason = reason


#: The words by which fairseq, detectron2, accelerate and Lightning recognize that memory ran out.
_RETRY_WORDS: Final = "CUDA out of memory. DefaultCPUAllocator: can't allocate memory"

#: The line in the message of `OutOfBudget` that says how to find a budget for whole steps.
HOW_TO_REHEARSE: Final = (
    "To find the budget that a whole step needs: error.rehearse(), or "
    "rekindle.profile(step).smallest_budget"
)


class OutOfBudget(RekindleError, MemoryError):
    """An operator does not fit into the budget, even after everything else was evicted.

    Once torch is loaded, each `OutOfBudget` is also a `torch.OutOfMemoryError`, and its text has
    the words that PyTorch uses. So code that retries with a smaller batch after a CUDA OOM does the
    same after this error. Weights, optimizer state and batch are as before the step.

    Libraries such as Pyro raise an error again as `type(error)(text)`, to add to its text. In such
    a new error all numbers of bytes are 0.

    Attributes:
        needed: Bytes that the operator needs. If the message says "at least", this is a lower
            bound: the operator ran for the first time, so its workspace is not known.
        budget: The budget in bytes.
        held: Bytes that cannot be evicted, by category.
        smallest_budget: The smallest budget with which this operator runs as a whole, if `needed`
            is exact. In slices it may need less; a later operator may need more.
        worth_trying: The budget that the message tells the user to try. It is `smallest_budget`,
            which is at most the peak of plain PyTorch if `needed` is exact. After `rehearse()`, it
            is the budget for whole steps. If a budget that an earlier message named was too small,
            it is up to half more than `smallest_budget`.
        operator: The name of the operator that does not fit.
        where: The source line that called this operator, as "file:line".
    """

    def __new__(cls, *arguments: Any, **figures: Any) -> Self:
        return RekindleError.__new__(_kind_to_raise(cls))

    def __init__(
        self,
        message: str = "",
        *,
        needed: Bytes = 0,
        budget: Bytes = 0,
        held: Mapping[str, Bytes] | None = None,
        smallest_budget: Bytes = 0,
        worth_trying: Bytes | None = None,
        operator: str = "",
        where: str = "",
    ) -> None:
        if _RETRY_WORDS not in message:
            message += (
                "\n(Some libraries retry with a smaller batch if an error has these words: "
                f"{_RETRY_WORDS})"
            )
        super().__init__(message)
        self.needed = needed
        self.budget = budget
        self.held = dict(held or {})
        self.smallest_budget = smallest_budget
        self.worth_trying = smallest_budget if worth_trying is None else worth_trying
        self.operator = operator
        self.where = where

    def __reduce__(self) -> tuple[Any, ...]:
        state = {key: value for key, value in vars(self).items() if key != "_rehearsal"}
        return _again, (OutOfBudget, self.args), state

    def rehearse(self, seconds: float = 10.0) -> Bytes:
        """Find a budget for whole steps by a rehearsal: the model runs on shapes without data.

        Call it after the `with rekindle.budget(...)` block that raised the error has ended.

        Args:
            seconds: The most seconds that the rehearsal may take.

        Returns:
            The budget in bytes. `worth_trying` and the message then name this budget as well. If
            the model cannot be rehearsed, they still name the budget from before.
        """
        rehearsal = self.__dict__.get("_rehearsal")
        if rehearsal is not None and rehearsal(self, seconds):
            del self._rehearsal
        return self.worth_trying

    def can_rehearse(self, rehearsal: Callable[[OutOfBudget, float], bool]) -> None:
        """Let each call of `rehearse` call `rehearsal`, until `rehearsal` has returned True.

        Args:
            rehearsal: A function of this error and the most seconds that the rehearsal may take. It
                returns True if a further call cannot find a better budget.
        """
        self._rehearsal = rehearsal

    def name(self, budget: Bytes, reason: str) -> None:
        """Replace the suggested budget in the message and in `worth_trying`.

        Args:
            budget: The budget (bytes) to suggest.
            reason: The words that the message puts before the budget.
        """
        self._say(f"{reason}: rekindle.budget({budget})")
        self.worth_trying = budget

    def for_command_line(self, option: str) -> None:
        """Show `option` in the message in place of Python code, which a script's user cannot call.

        Args:
            option: The option of the command line, with a budget that suffices.
        """
        self._say(f"On this command line: {option}", instead_of=HOW_TO_REHEARSE)

    def _say(self, line: str, instead_of: str = "") -> None:
        """Put `line` in the place of the line of the message that suggests a budget.

        Args:
            line: The new line.
            instead_of: Another line of the message, which is removed.
        """
        before = f"rekindle.budget({self.worth_trying})"
        *lines, words = (
            each
            for each in str(self.args[0]).splitlines()
            if not each.endswith(before) and each != instead_of
        )
        self.args = ("\n".join([*lines, line, words]),)


_OF_LOGITS = (
    "aten::_log_softmax",
    "aten::_log_softmax_backward_data",
    "aten::nll_loss_backward",
)  # operators of a cross entropy loss that have a result as large as the logits


_CONVOLUTIONS = ("aten::convolution", "aten::convolution_backward")

#: If more than this share of a convolution's memory is workspace, errors say how to need less.
_MUCH = 0.1


def remedy_for(operator: str, workspace: float = 0.0) -> str:
    """Return advice: how a program can avoid `operator`, which needs most of the memory.

    Args:
        operator: The name of the operator, as "aten::name".
        workspace: The part of the operator's memory that is workspace, from 0 to 1.

    Returns:
        A sentence without a period, or an empty string if no way to avoid it is known.
    """
    if operator in _CONVOLUTIONS and workspace >= _MUCH:
        return _other_kernel()
    if operator not in _OF_LOGITS:
        return ""
    functional: Any = sys.modules.get("torch.nn.functional")
    if hasattr(functional, "linear_cross_entropy"):  # torch 2.13 and later have this function
        loss = "torch.nn.functional.linear_cross_entropy(hidden, weight, target)"
    else:
        loss = "a fused loss, such as Liger's or cut cross entropy,"
    return f"{loss} computes the loss in pieces and never makes the logits"


def _other_kernel() -> str:
    """Return advice: a sentence with code that lets convolutions use less workspace."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and not torch._C._get_mkldnn_enabled():
        return (
            "convolutions of oneDNN need less workspace, and give results of other rounding: "
            "torch.backends.mkldnn.enabled = True"
        )
    layout = ".to(memory_format=torch.channels_last)"
    return (
        "convolutions of channels-last images need less workspace, and give results of other "
        f"rounding: model{layout}, batch{layout}"
    )


def _kind_to_raise(kind: type[Any]) -> type[Any]:
    """Return `kind`; for `OutOfBudget`, once torch is loaded, its subclass from `_also`."""
    torch_error = getattr(sys.modules.get("torch"), "OutOfMemoryError", None)
    return kind if kind is not OutOfBudget or torch_error is None else _also(torch_error)


@cache
def _also(torch_error: type[Exception]) -> type[OutOfBudget]:
    """Make the subclass of `OutOfBudget` that is also a subclass of `torch_error`.

    The subclass is made on first use, because this module must not import torch.
    """
    members = {"__module__": OutOfBudget.__module__, "__doc__": OutOfBudget.__doc__}
    return type(OutOfBudget.__name__, (OutOfBudget, torch_error), members)


@contextmanager
def notes_added_to(error: BaseException | None) -> Generator[None]:
    """Run a `with` block; an exception in the block becomes a note of `error`, the first error.

    Args:
        error: The error that is already being raised to the user. None: exceptions of the block
            are raised as they are.
    """
    try:
        yield
    except Exception as failure:
        if error is None:
            raise
        error.add_note(f"Another error followed: {failure}")


class SwapFailed(RekindleError, OSError):
    """A swapped-out value can be neither read back nor recomputed. The training step fails."""


class Unsupported(RekindleError, RuntimeError):
    """The program does something that cannot work; the message says what to do instead."""


class VerificationFailed(RekindleError, AssertionError):
    """A step gives other results within a budget; the message is the table of `verify`."""


publish(
    "rekindle",
    [
        RekindleError,
        InvalidArgument,
        InvalidBudget,
        InvalidFile,
        InvalidSchedule,
        InvalidTrace,
        OutOfBudget,
        SwapFailed,
        Unsupported,
        VerificationFailed,
    ],
)
