"""`rekindle.verify(step, budget=...)`: compare a step with and without a budget, bit for bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from rekindle import _checks as checks
from rekindle._errors import VerificationFailed
from rekindle._types import Bytes
from rekindle._units import format_bytes, parse_bytes
from rekindle.policies import Policy
from rekindle.pytorch.context import budget as budget_context
from rekindle.pytorch.observed._before import Before
from rekindle.pytorch.observed._observe import KINDS, Key, Outcome, observe
from rekindle.pytorch.online import Site

_SHOWN = 5  # most names of differing tensors or operators to show, for each kind
_KEEP_IT = (
    "its result depends on more than its arguments. To keep its result in memory, run it in "
    "`with rekindle.never_recompute():`"
)
_SAME_EACH_TIME = (
    "give the step the same batch each time it is called; rekindle.verify restores modules, "
    "optimizers and random number generators"
)


@final
@dataclass(frozen=True)
class Verification:
    """The result of `rekindle.verify`. It is true if nothing differs; printed, it is a table.

    Attributes:
        budget: The budget in bytes.
        peak: The peak of the run within the budget, in bytes.
        evictions: How often a value was evicted that the step might still read.
        recomputations: How many operator calls were repeated to recompute evicted values.
        operators: How many operators the step called.
        compared: How many tensors and numbers of each kind were compared.
        differing: Kind and name of each tensor or number that differs with and without the budget.
        unstable: Kind and name of each tensor or number that differs between the two runs without a
            budget.
        recomputed_differently: Operators whose recomputation gave another result, in order.
        first_unstable: The first operator whose result differs between the runs without a budget.
        first_differing: The first operator whose result differs with and without the budget.
    """

    budget: Bytes
    peak: Bytes
    evictions: int
    recomputations: int
    operators: int
    compared: dict[str, int]
    differing: tuple[Key, ...]
    unstable: tuple[Key, ...]
    recomputed_differently: tuple[Site, ...]
    first_unstable: Site | None
    first_differing: Site | None

    @property
    def ok(self) -> bool:
        """True if nothing differs and every recomputation gave the same result as the first run."""
        return not (self.differing or self.unstable or self.recomputed_differently)

    def __bool__(self) -> bool:
        return self.ok

    def raise_if_different(self) -> None:
        """Raise an error if something differs, with the table as its message.

        Raises:
            VerificationFailed: `ok` is False.
        """
        if not self.ok:
            raise VerificationFailed(str(self))

    def __str__(self) -> str:
        return "\n".join([self._verdict(), *self._table(), *self._reasons()])

    def _verdict(self) -> str:
        within = f"within {format_bytes(self.budget)}"
        if self.unstable:
            return f"{within}: not comparable, plain PyTorch itself differs between two runs"
        if self.differing:
            return f"{within}: DIFFERENT from plain PyTorch"
        if self.recomputed_differently:
            return (
                f"{within}: the same as plain PyTorch this time, but recomputed operators gave "
                "other results"
            )
        return f"{within}: the same as plain PyTorch, bit for bit"

    def _table(self) -> list[str]:
        lines = []
        for kind, count in self.compared.items():
            names = [name for each, name in self.unstable or self.differing if each == kind]
            listed = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
            verdict = f"{len(names)} differ: {listed}" if names else "equal"
            lines.append(f"  {kind:<22} {count:>7}   {verdict}")
        again = f"{self.recomputations} recomputed, {self.evictions} evictions"
        lines.append(f"  {'operators':<22} {self.operators:>7}   {again}")
        lines.append(f"  {'peak':<22} {format_bytes(self.peak)}")
        return lines

    def _reasons(self) -> list[str]:
        lines = []
        if self.recomputed_differently:
            first, *others = self.recomputed_differently
            more = f" (and {len(others)} more)" if others else ""
            lines.append(f"the first operator whose recomputation differs: {first}{more}")
            lines.append(f"  {_KEEP_IT}")
        elif self.first_differing is not None and not self.unstable:
            lines.append(f"the first operator with another result: {self.first_differing}")
        if self.first_unstable is not None:
            lines.append(
                f"the first operator that differs between two plain runs: {self.first_unstable}"
            )
            lines.append(f"  {_SAME_EACH_TIME}")
        if not self.recomputations:
            lines.append("nothing was recomputed: try a smaller budget")
        return lines


def verify(
    step: Callable[[], object], *, budget: str | int, policy: Policy | None = None
) -> Verification:
    """Run a step with and without a budget and compare the results bit for bit.

    The step runs twice without a budget and once within it. `verify` compares results, gradients,
    parameters, buffers, optimizer state, random number generators, and how often modules and hooks
    were called. A difference is not an error: look at the returned value. For large models this
    takes minutes, because the CPU reads the memory of every result.

    Args:
        step: A training step or a part of one; its return value is compared as well. It must do the
            same each time, with the same batch. Everything that it changes is restored before each
            run and at the end. No other thread may train meanwhile.
        budget: The budget of the third run, in bytes or as text ("6GiB").
        policy: Selects the storage to evict: one of `rekindle.policies`.

    Returns:
        A `Verification`. It is true if nothing differs; printed, it is a table.

    Raises:
        OutOfBudget: The step does not fit in the budget. The state of the program is restored.

    Example:
        ```python
        found = rekindle.verify(step, budget="1GiB")
        print(found)
        found.raise_if_different()
        ```
    """
    checks.step(step, "rekindle.verify({}, budget=...)")
    amount = parse_bytes(budget, line="rekindle.verify(step, budget={})")
    before = Before()
    try:
        plain = observe(step, before)
        before.restore()
        again = observe(step, before)
        before.restore()
        with budget_context(amount, policy=policy) as run:
            driver = run._driver
            audit = driver.begin_audit()
            within = observe(step, before)
    finally:
        before.restore()
    counts = Counter(kind for kind, _ in plain.left)
    return Verification(
        budget=amount,
        peak=run.peak,
        evictions=run.evictions,
        recomputations=run.recomputations,
        operators=len(plain.operators),
        compared={kind: counts[kind] for kind in KINDS if counts[kind]},
        differing=_differing(plain, within),
        unstable=_differing(plain, again),
        recomputed_differently=audit.different,
        first_unstable=_first(plain, again),
        first_differing=_first(plain, within),
    )


def _differing(one: Outcome, other: Outcome) -> tuple[Key, ...]:
    keys = {**one.left, **other.left}
    return tuple(key for key in keys if one.left.get(key) != other.left.get(key))


def _first(one: Outcome, other: Outcome) -> Site | None:
    """Return the first operator at which the two runs differ, or None if they are equal."""
    for (_, given), (site, there) in zip(one.operators, other.operators, strict=False):
        if given != there:
            return site
    shorter, longer = sorted((one.operators, other.operators), key=len)
    return longer[len(shorter)][0] if len(shorter) < len(longer) else None
